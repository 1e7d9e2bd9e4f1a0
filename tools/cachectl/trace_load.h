#pragma once

/* A whole trace in memory: its sessions, and of every turn the full list of block ids.
 *
 * The agentic file is 36,864 turns and takes about 20 MB.  Owned by: the caller; read-only after
 * loading, so any thread may read it. */

#include "tools/cachectl/trace_file.h"
#include "tools/cachectl/trace_map.h"

#define TRACE_NO_ITEM UINT32_MAX

struct trace_item {
    struct trace_turn turn;
    struct trace_runs blocks; /* All full blocks of the prompt, kept ones first. */
    uint32_t session;         /* Index into trace.sessions. */
    uint32_t parent;          /* Index into trace.items, of turn `par`. */
    uint32_t child;           /* First later turn whose `par` is this one. */
};

struct trace_session {
    uint64_t sess;
    uint64_t user;
    uint64_t sub; /* Only when is_sub. */
    bool is_sub;  /* Chat of a sub-agent. */
    uint32_t *items;
    uint32_t item_count;
    uint32_t item_capacity;
};

struct trace {
    struct trace_header header;
    struct trace_item *items; /* In file order. */
    uint32_t item_count;
    uint32_t item_capacity;
    struct trace_session *sessions; /* In order of their first line. */
    uint32_t session_count;
    uint32_t session_capacity;
    struct trace_map session_of; /* sess -> index into sessions. */
};

/* scale 1 takes the trace as it is; a larger one scales it by that much (again). */
KV_MUST_CHECK kv_status trace_load(const char *path, uint32_t scale, struct trace **ret_trace,
                                   struct kv_error *err);
void trace_destroy(struct trace *trace);
