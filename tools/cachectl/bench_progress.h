#pragma once

/*
 * What a benchmark says on stderr while it runs, and when it is ended.
 *
 * The long loops of every benchmark ask bench_go_on(): it says now and then what is under way, and
 * whether a signal wants this program to end.  What has been measured is noted as it comes, so that
 * a benchmark that is ended can still say it.  Owned by: the command's stack; one thread.
 */

#include "tools/cachectl/ctl.h"

#define BENCH_NOTES_MAX 8u

struct bench_progress {
    const struct ctl *ctl;
    const char *doing; /* What is under way; outlives the benchmark. */
    uint64_t began_ns, said_ns, every_ns;
    char notes[BENCH_NOTES_MAX][240]; /* What was measured so far. */
    uint32_t note_count;
};

/* Signals that end a program are held from now on. */
void bench_progress_start(struct bench_progress *progress, const struct ctl *ctl);

/* One line on stderr, unless --quiet. */
void bench_say(struct bench_progress *progress, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Says what is under way if nothing was said for a while: 2 s on a terminal, 10 s elsewhere.
 * false: this program is to end. */
bool bench_go_on(struct bench_progress *progress);

/* What note `index` says from now on; index is at most the number of notes there are. */
void bench_note(struct bench_progress *progress, uint32_t index, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* After bench_go_on() was false: which signal it was, and what was measured. */
void bench_say_interrupted(const struct bench_progress *progress);
