#pragma once

/*
 * Two things measured in turn, A B A B, and what their ratios say.  Every engine benchmark is a
 * list of such comparisons: a ratio against an anchor of the same minute is all that counts on a
 * shared machine.
 */

#include "tools/cachectl/bench_progress.h"
#include "tools/cachectl/bench_ratio.h"
#include "tools/cachectl/ctl.h"

struct json_t;

#define BENCH_PAIRS_MIN 3u /* Fewer say nothing about how far a ratio strays. */

/* One line of the result.  Owned by: the benchmark's stack. */
struct bench_pairs {
    char what[96];   /* What was measured. */
    char anchor[96]; /* What it is compared with. */
    double unit;     /* Work done by one measured run; 0: seconds are printed instead. */
    double anchor_unit;
    const char *unit_name;   /* Of its speed; NULL: "tok/s". */
    double target;           /* 0: none. */
    bool at_least;           /* The ratio should be at least `target`; false: at most. */
    bool speed;              /* The ratio is of speeds (unit / seconds); false: of seconds. */
    uint32_t count, planned; /* Fewer than planned: the time of --quick was used up. */
    double seconds[BENCH_PAIRS_MAX], anchor_seconds[BENCH_PAIRS_MAX];
};

/* Runs something once.  false: it failed (the sentence is printed), or this program is to end. */
typedef bool (*bench_run)(void *context, double *ret_seconds);

/* `count` pairs, the order changing from pair to pair; fewer, but BENCH_PAIRS_MIN at least, when
 * the end that bench_quick() set comes before.  Returns an exit code. */
int bench_pairs_measure(struct bench_progress *progress, struct bench_pairs *pairs, uint32_t count,
                        bench_run run, void *run_context, bench_run anchor, void *anchor_context);

struct bench_ratio bench_pairs_ratio(const struct bench_pairs *pairs);

/* Prints a table of comparisons, or JSON.  `facts` (taken over; NULL: none) is an object of figures
 * that have no anchor: printed as one line each.  Returns an exit code: a missed target is printed
 * as missed and is no error; a ratio that is not measurable is printed as that and is not met. */
int bench_pairs_report(const struct ctl *ctl, const char *name, const struct bench_pairs *pairs,
                       size_t count, struct json_t *facts);
