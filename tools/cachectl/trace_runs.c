/*
 * Block ids as runs.
 *
 * The full id list of every prompt of the agentic file would be 76 million numbers.  As runs the
 * whole file fits in a few megabytes, which is why a trace can be held in memory and looked at from
 * both ends (the answer of a turn is read out of the next one's prompt).
 */

#include "tools/cachectl/trace_runs.h"

#include <assert.h>
#include <stdlib.h>

enum { RUNS_FIRST = 4 };

kv_status trace_runs_add(struct trace_runs *runs, uint64_t first, uint32_t count)
{
    assert(count <= UINT32_MAX - runs->block_count);

    if (count == 0) return KV_OK;
    if (runs->run_count > 0) {
        struct trace_run *last = &runs->runs[runs->run_count - 1];
        if (last->first + last->count == first) {
            last->count += count;
            runs->block_count += count;
            return KV_OK;
        }
    }
    if (runs->run_count == runs->run_capacity) {
        const uint32_t capacity = runs->run_capacity == 0 ? RUNS_FIRST : 2 * runs->run_capacity;
        struct trace_run *bigger = realloc(runs->runs, capacity * sizeof(*bigger));
        if (bigger == NULL) return KV_NOMEM;
        runs->runs = bigger;
        runs->run_capacity = capacity;
    }
    runs->runs[runs->run_count++] = (struct trace_run){first, count};
    runs->block_count += count;
    return KV_OK;
}

kv_status trace_runs_add_prefix(struct trace_runs *runs, const struct trace_runs *from,
                                uint32_t blocks)
{
    assert(blocks <= from->block_count);

    for (uint32_t i = 0; blocks > 0; i++) {
        const uint32_t part = from->runs[i].count < blocks ? from->runs[i].count : blocks;
        const kv_status status = trace_runs_add(runs, from->runs[i].first, part);
        if (status != KV_OK) return status;
        blocks -= part;
    }
    return KV_OK;
}

void trace_runs_clear(struct trace_runs *runs)
{
    runs->run_count = 0;
    runs->block_count = 0;
}

void trace_runs_fini(struct trace_runs *runs)
{
    free(runs->runs);
    *runs = (struct trace_runs){0};
}
