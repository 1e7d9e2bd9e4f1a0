#pragma once

/* The benchmarks, each in the file that runs it: `cachectl bench NAME`.  Each returns an exit code.
 */

#include "tools/cachectl/bench_engine.h"
#include "tools/cachectl/bench_pairs.h"

/* daemon NULL: ../cached/cached beside this program. */
int bench_rpc(struct bench_progress *progress, const char *daemon, bool quick);

struct bench_fill_options {
    const char *bytes;          /* As it was given: "3GiB"; NULL: it was not. */
    const char *dir;            /* State directory of a daemon of its own; NULL: none. */
    const char *daemon;         /* Its program, as for bench_rpc(). */
    const char *ops_token_file; /* Of the daemon at the endpoint. */
};
int bench_fill(struct bench_progress *progress, const struct bench_fill_options *options);
/* "3GiB": a number above 0 with B, KiB, MiB, GiB, TiB or nothing behind it. */
bool bench_parse_bytes(const char *text, uint64_t *ret_bytes);

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
