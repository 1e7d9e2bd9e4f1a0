#pragma once

/* The benchmarks, each in the file that runs it: `cachectl bench NAME`.  Each returns an exit code.
 */

#include "tools/cachectl/bench_engine.h"
#include "tools/cachectl/bench_pairs.h"

/* daemon NULL: ../cached/cached beside this program. */
int bench_rpc(struct bench_progress *progress, const char *daemon, bool quick);

struct bench_restart_options {
    const char *daemon, *dir; /* dir NULL: made by mkstate, and removed again. */
    uint64_t seed;            /* mkstate's, of dir. */
    bool quick;
};
int bench_restart(struct bench_progress *progress, const struct bench_restart_options *options);

int bench_prefill(struct bench_progress *progress, const struct bench_engine_options *options);
int bench_threads(struct bench_progress *progress, const struct bench_engine_options *options);
int bench_resume(struct bench_progress *progress, const struct bench_engine_options *options);
int bench_decode(struct bench_progress *progress, const struct bench_engine_options *options);
int bench_draft(struct bench_progress *progress, const struct bench_engine_options *options);
int bench_batch_replay(struct bench_progress *progress, const struct bench_engine_options *options);

int bench_ssd_read(struct bench_progress *progress, bool quick);
int bench_ssd_commit(struct bench_progress *progress, bool quick);
