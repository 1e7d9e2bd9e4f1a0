#pragma once

/* Flags of the trace commands, from one table per command; and progress on stderr. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum trace_exit { TRACE_EXIT_OK = 0, TRACE_EXIT_FAILED = 1, TRACE_EXIT_USAGE = 2 };

enum trace_flag_kind { TRACE_FLAG_SWITCH, TRACE_FLAG_TEXT, TRACE_FLAG_COUNT };

struct trace_flag {
    const char *name;       /* "--scale" */
    const char *short_name; /* "-o"; NULL: none. */
    enum trace_flag_kind kind;
    void *value; /* bool *, const char ** or uint64_t *, by kind. */
    uint64_t min;
    uint64_t max;
};

/* Sets the flags found anywhere in argv[1..] and moves the other arguments to argv[1..].  Returns
 * how many those are, or -1 after saying on stderr what is wrong.  `command` opens the message. */
int trace_flags_parse(const char *command, const struct trace_flag *flags, size_t flag_count,
                      int argc, char **argv);

/* Says how far a long step is, from the second second on and then every two seconds. */
struct trace_progress {
    const char *what;
    bool quiet;
    uint64_t start_ms;
    uint64_t next_ms;
};

void trace_progress_start(struct trace_progress *progress, const char *what, bool quiet);
void trace_progress_tick(struct trace_progress *progress, unsigned percent);
