/*
 * Flags and progress of the trace commands.
 *
 * These commands need no daemon and none of the global flags but --json and --quiet, so they parse
 * for themselves.  A number is refused unless it is a whole one within the flag's range; an unknown
 * flag is an error and never taken for a file.
 */

#include "tools/cachectl/trace_options.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PROGRESS_FIRST_MS = 2000, PROGRESS_EVERY_MS = 2000 };

static const struct trace_flag *flag_find(const struct trace_flag *flags, size_t count,
                                          const char *name, size_t name_bytes)
{
    for (size_t i = 0; i < count; i++) {
        if (strlen(flags[i].name) == name_bytes && memcmp(flags[i].name, name, name_bytes) == 0)
            return &flags[i];
        if (flags[i].short_name != NULL && strlen(flags[i].short_name) == name_bytes &&
            memcmp(flags[i].short_name, name, name_bytes) == 0)
            return &flags[i];
    }
    return NULL;
}

static bool flag_set(const char *command, const struct trace_flag *flag, const char *text)
{
    char *end = NULL;

    if (flag->kind == TRACE_FLAG_TEXT) {
        *(const char **)flag->value = text;
        return true;
    }
    errno = 0;
    const unsigned long long number = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || number < flag->min ||
        number > flag->max) {
        (void)fprintf(stderr, "%s: %s takes a whole number from %llu to %llu, not '%s'\n", command,
                      flag->name, (unsigned long long)flag->min, (unsigned long long)flag->max,
                      text);
        return false;
    }
    *(uint64_t *)flag->value = number;
    return true;
}

int trace_flags_parse(const char *command, const struct trace_flag *flags, size_t flag_count,
                      int argc, char **argv)
{
    int kept = 0;

    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (arg[0] != '-' || arg[1] == '\0') {
            argv[++kept] = argv[i];
            continue;
        }
        const char *equals = strchr(arg, '=');
        const size_t name_bytes = equals == NULL ? strlen(arg) : (size_t)(equals - arg);
        const struct trace_flag *flag = flag_find(flags, flag_count, arg, name_bytes);
        if (flag == NULL) {
            (void)fprintf(stderr, "%s: unknown flag '%s'; --help lists them\n", command, arg);
            return -1;
        }
        if (flag->kind == TRACE_FLAG_SWITCH) {
            if (equals != NULL) {
                (void)fprintf(stderr, "%s: %s takes no value\n", command, flag->name);
                return -1;
            }
            *(bool *)flag->value = true;
            continue;
        }
        if (equals == NULL && i + 1 == argc) {
            (void)fprintf(stderr, "%s: %s needs a value\n", command, flag->name);
            return -1;
        }
        if (!flag_set(command, flag, equals != NULL ? equals + 1 : argv[++i])) return -1;
    }
    return kept;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    const int failed = clock_gettime(CLOCK_MONOTONIC, &now);
    assert(failed == 0);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void trace_progress_start(struct trace_progress *progress, const char *what, bool quiet)
{
    const uint64_t now = now_ms();
    *progress = (struct trace_progress){
        .what = what, .quiet = quiet, .start_ms = now, .next_ms = now + PROGRESS_FIRST_MS};
}

void trace_progress_tick(struct trace_progress *progress, unsigned percent)
{
    if (progress->quiet) return;
    const uint64_t now = now_ms();
    if (now < progress->next_ms) return;
    progress->next_ms = now + PROGRESS_EVERY_MS;
    (void)fprintf(stderr, "%s: %u %% read, %llu s\n", progress->what, percent,
                  (unsigned long long)((now - progress->start_ms) / 1000));
}
