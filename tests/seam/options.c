/* Arguments of the two tests. */

#include "tests/seam/options.h"

#include "tests/planted.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2 };

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
    if (strcmp(name, "--case") != 0) return false;
    options->every = 0;
    options->count = 1;
    options->one = true;
    return parse_number(value, &options->first);
}

static void usage(const char *harness, FILE *out)
{
    (void)fprintf(out, "usage: iofail [--every N] [--from CALL] or [--first K] [--count N]\n"
                       "       crashimage [--images N] or [--first K] [--count N]\n"
                       "       either: [--seed S] [--case K] [--idle] [--encrypt]\n"
                       "               [--plant NAME] [--expect-loss]\n"
                       "\n"
                       "exit code: 0 nothing lost, 1 a loss or a refusal, 2 wrong usage\n"
                       "\n"
                       "planted bugs that it finds:\n");
    planted_list(harness, out);
}

void options_parse(const char *harness, int argc, char **argv, struct options *options)
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
        if (i + 1 < argc && strcmp(argv[i], "--plant") == 0) {
            i++;
            if (!planted_check(harness, argv[i]) || !plant_find(argv[i], &options->plant))
                exit(EXIT_USAGE);
            continue;
        }
        if (i + 1 < argc && parse_pair(argv[i], argv[i + 1], options)) {
            i++;
            continue;
        }
        const bool asked = strcmp(argv[i], "--help") == 0;
        if (!asked) (void)fprintf(stderr, "%s: %s: bad argument\n", harness, argv[i]);
        usage(harness, asked ? stdout : stderr);
        exit(asked ? EXIT_SUCCESS : EXIT_USAGE);
    }
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
