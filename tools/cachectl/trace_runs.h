#pragma once

/* A list of block ids as runs of following numbers: what "ids" of a trace line holds.  A prompt of
 * 2,000 blocks is about 3 runs.  Zero-initialised is empty; no locking. */

#include "kvstore/base/status.h"

#include <stdint.h>

struct trace_run {
    uint64_t first;
    uint32_t count;
};

struct trace_runs {
    struct trace_run *runs;
    uint32_t run_count;
    uint32_t run_capacity;
    uint32_t block_count; /* Sum of the counts. */
};

/* Appends ids first .. first + count - 1; joins them to the last run where they follow it. */
KV_MUST_CHECK kv_status trace_runs_add(struct trace_runs *runs, uint64_t first, uint32_t count);

/* Appends the first `blocks` ids of `from`, which has at least that many. */
KV_MUST_CHECK kv_status trace_runs_add_prefix(struct trace_runs *runs,
                                              const struct trace_runs *from, uint32_t blocks);

/* Keeps the memory. */
void trace_runs_clear(struct trace_runs *runs);
void trace_runs_fini(struct trace_runs *runs);
