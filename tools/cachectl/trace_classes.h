#pragma once

/* Where a prompt joins the stored history of its session: its class.
 *
 *   k        leading full blocks of the prompt that an earlier prompt of the session had
 *   parent   the newest prompt that holds block k
 *   n        full blocks of the parent's prompt without its tail tokens
 *
 *   extend         k >= n, the parent is the last turn
 *   older          k >= n, the parent is an older turn: rollback to, or fork from, it
 *   tail           k = n - 1 of the last turn: its last block was edited
 *   fall-back      no more than tools + system + 1,024 tokens are reused
 *   cut            anywhere else in the last turn's prompt
 *   cut in older   anywhere else in an older turn's prompt
 *
 * The rules are tried in this order.  trace_classify() is pure. */

#include "tools/cachectl/trace_load.h"

enum trace_class {
    TRACE_CLASS_FIRST, /* First prompt of a session: nothing to join. */
    TRACE_CLASS_EXTEND,
    TRACE_CLASS_TAIL,
    TRACE_CLASS_OLDER,
    TRACE_CLASS_FALLBACK,
    TRACE_CLASS_CUT,
    TRACE_CLASS_CUT_OLDER,
    TRACE_CLASS_COUNT,
};

#define TRACE_FALLBACK_TOKENS 1024u

/* All token counts as recorded, before any scaling. */
struct trace_join {
    uint64_t joined_blocks; /* k */
    uint64_t block_tokens;
    uint64_t parent_in_tokens; /* 0 when k is 0. */
    uint64_t tail_tokens;
    uint64_t prefix_tokens; /* tools + system */
    bool parent_is_last;
};

/* For every turn but the first of a session. */
enum trace_class trace_classify(struct trace_join join);

/* The name in tables, e.g. "fall-back". */
const char *trace_class_name(enum trace_class class);

struct trace_counts {
    uint64_t sessions;
    uint64_t turns;
    uint64_t in_tokens;
    uint64_t out_tokens;
    uint64_t joined_tokens; /* Whole blocks of earlier prompts: what tokens made from ids share. */
    uint64_t ideal_tokens;  /* The same, with the parent's last tokens and its answer. */
    uint64_t classes[TRACE_CLASS_COUNT];
};

/* Of the main sessions and, apart, of the sub-agents' chats.  in, out and ideal are as recorded;
 * the file's own (scaled) tokens are in scaled_*. */
struct trace_summary {
    struct trace_counts main;
    struct trace_counts sub;
    uint64_t scaled_in_tokens; /* Both kinds of session together. */
    uint64_t scaled_out_tokens;
    uint64_t scaled_new_tokens; /* Prompt tokens left to compute after joined blocks. */
    uint64_t scaled_prompt_max;
};

KV_MUST_CHECK kv_status trace_summarize(const struct trace *trace,
                                        struct trace_summary *ret_summary, struct kv_error *err);
