#pragma once

/*
 * What a benchmark says on stderr while it runs, and when it is ended.
 *
 * The long loops of every benchmark ask bench_go_on(): it says now and then what is under way, and
 * whether a signal wants this program to end.  What has been measured is noted as it comes, so that
 * a benchmark that is ended can still say it.  Owned by: the command's stack; one thread,
 * and the watcher reads the two descriptors.
 */

#include "tools/cachectl/ctl.h"

#include <pthread.h>

#define BENCH_NOTES_MAX 12u

struct bench_progress {
    const struct ctl *ctl;
    const char *doing; /* What is under way; outlives the benchmark. */
    uint64_t began_ns, said_ns, every_ns;
    /* --quick of the engine's benchmarks: when it should be over, and how many comparisons have to
     * share the time until then.  0: no such end. */
    uint64_t until_ns;
    uint32_t lines_left;
    char notes[BENCH_NOTES_MAX][240]; /* What was measured so far. */
    uint32_t note_count;
    pthread_t watcher; /* Sleeps until a signal comes; borrows the two descriptors. */
    bool watched;
    int signal_fd, done_fd;
};

/* Signals that end a program are held from now on.  One that is not followed soon is answered at
 * once with a line on stderr; the watcher points to `progress`, which must stay where it is. */
void bench_progress_start(struct bench_progress *progress, const struct ctl *ctl);
void bench_progress_stop(struct bench_progress *progress);

/* One line on stderr, unless --quiet. */
void bench_say(struct bench_progress *progress, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Says what is under way if nothing was said for a while: 2 s on a terminal, 10 s elsewhere.
 * false: this program is to end. */
bool bench_go_on(struct bench_progress *progress);

/* This benchmark makes `lines` comparisons and should be over a minute after its start. */
void bench_quick(struct bench_progress *progress, uint32_t lines);
/* When the next comparison should be over; the others share the time that is left.  0: it may take
 * as long as it wants. */
uint64_t bench_line_end(struct bench_progress *progress, uint64_t now);

/* What note `index` says from now on; index is at most the number of notes there are. */
void bench_note(struct bench_progress *progress, uint32_t index, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* After bench_go_on() was false: which signal it was, and what was measured. */
void bench_say_interrupted(const struct bench_progress *progress);
