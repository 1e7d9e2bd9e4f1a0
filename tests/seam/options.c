/* Arguments of the two tests. */

#include "tests/seam/options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool parse_number(const char *text, uint64_t *ret_number)
{
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-') return false;
    *ret_number = number;
    return true;
}

static bool parse_pair(const char *name, const char *value, struct options *options)
{
    if (strcmp(name, "--every") == 0)
        return parse_number(value, &options->every) && options->every > 0;
    if (strcmp(name, "--from") == 0)
        return parse_number(value, &options->from) && options->from > 0;
    if (strcmp(name, "--seed") == 0) return parse_number(value, &options->seed);
    if (strcmp(name, "--images") == 0 || strcmp(name, "--count") == 0) {
        options->every = 0;
        return parse_number(value, &options->count) && options->count > 0;
    }
    if (strcmp(name, "--first") == 0) return parse_number(value, &options->first);
    if (strcmp(name, "--case") == 0) {
        options->every = 0;
        options->count = 1;
        options->one = true;
        return parse_number(value, &options->first);
    }
    if (strcmp(name, "--plant") != 0) return false;
    return plant_find(value, &options->plant);
}

bool options_parse(int argc, char **argv, struct options *options)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--expect-loss") == 0) {
            options->expect_loss = true;
            continue;
        }
        if (strcmp(argv[i], "--encrypt") == 0) {
            options->encrypt = true;
            continue;
        }
        if (strcmp(argv[i], "--idle") == 0) {
            options->idle = true;
            continue;
        }
        if (i + 1 < argc && parse_pair(argv[i], argv[i + 1], options)) {
            i++;
            continue;
        }
        (void)fprintf(stderr,
                      "%s: bad argument\n"
                      "usage: iofail [--every N] [--from CALL] or [--first K] [--count N]\n"
                      "       crashimage [--images N] or [--first K] [--count N]\n"
                      "       either: [--seed S] [--case K] [--idle] [--encrypt]\n"
                      "               [--plant NAME] [--expect-loss]\n"
                      "plants:",
                      argv[i]);
        for (unsigned plant = 0; plant_name((enum kv_plant)plant) != NULL; plant++)
            (void)fprintf(stderr, " %s", plant_name((enum kv_plant)plant));
        (void)fprintf(stderr, "\n");
        return false;
    }
    return true;
}

int options_exit(const struct options *options, uint64_t failures)
{
    if (options->idle && failures == 0)
        (void)fprintf(stderr, "nothing happened, and the run passed\n");
    if (options->idle) return failures > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
    if (!options->expect_loss) return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
    if (failures > 0) return EXIT_SUCCESS;
    (void)fprintf(stderr, "the planted bug '%s' was not found\n", plant_name(options->plant));
    return EXIT_FAILURE;
}
