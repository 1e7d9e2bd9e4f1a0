/*
 * Classes of turns, counted over a whole trace.
 *
 * `par` and `keep` of the file are not believed: k and the parent are found again from the block
 * ids, so the same rules hold for any converter, and a converter that chose another parent is seen.
 * Sub-agents are counted apart, because the published counts are over the main sessions only.
 */

#include "tools/cachectl/trace_classes.h"

#include <assert.h>

enum trace_class trace_classify(struct trace_join join)
{
    assert(join.block_tokens > 0);

    if (join.joined_blocks == 0) return TRACE_CLASS_FALLBACK;

    const uint64_t tail = join.tail_tokens;
    const uint64_t parent = join.parent_in_tokens < tail ? 0 : join.parent_in_tokens - tail;
    const uint64_t n = parent / join.block_tokens;

    if (join.joined_blocks >= n)
        return join.parent_is_last ? TRACE_CLASS_EXTEND : TRACE_CLASS_OLDER;
    if (join.parent_is_last && join.joined_blocks + 1 == n) return TRACE_CLASS_TAIL;
    if (join.joined_blocks * join.block_tokens <= join.prefix_tokens + TRACE_FALLBACK_TOKENS)
        return TRACE_CLASS_FALLBACK;
    return join.parent_is_last ? TRACE_CLASS_CUT : TRACE_CLASS_CUT_OLDER;
}

const char *trace_class_name(enum trace_class class)
{
    static const char *const names[TRACE_CLASS_COUNT] = {[TRACE_CLASS_FIRST] = "first",
                                                         [TRACE_CLASS_EXTEND] = "extend",
                                                         [TRACE_CLASS_TAIL] = "tail",
                                                         [TRACE_CLASS_OLDER] = "older",
                                                         [TRACE_CLASS_FALLBACK] = "fall-back",
                                                         [TRACE_CLASS_CUT] = "cut",
                                                         [TRACE_CLASS_CUT_OLDER] = "cut in older"};

    assert(class < TRACE_CLASS_COUNT);
    return names[class];
}

/* Leading blocks that some earlier prompt of the session holds, and the newest that holds the last
 * of them. */
static uint32_t joined_blocks(const struct trace_map *holders, const struct trace_runs *blocks,
                              uint32_t *ret_holder)
{
    uint32_t joined = 0;

    *ret_holder = TRACE_MAP_NONE;
    for (uint32_t i = 0; i < blocks->run_count; i++) {
        for (uint32_t j = 0; j < blocks->runs[i].count; j++) {
            const uint32_t holder = trace_map_get(holders, blocks->runs[i].first + j);
            if (holder == TRACE_MAP_NONE) return joined;
            *ret_holder = holder;
            joined++;
        }
    }
    return joined;
}

static kv_status hold_blocks(struct trace_map *holders, const struct trace_runs *blocks,
                             uint32_t turn)
{
    for (uint32_t i = 0; i < blocks->run_count; i++) {
        for (uint32_t j = 0; j < blocks->runs[i].count; j++) {
            const kv_status status = trace_map_put(holders, blocks->runs[i].first + j, turn);
            if (status != KV_OK) return status;
        }
    }
    return KV_OK;
}

/* Tokens an unlimited cache could reuse: where the turn goes on from its parent's end, its answer
 * too when the prompt has room for it (an upper bound: answers carry no block ids). */
static uint64_t ideal_tokens(enum trace_class class, struct trace_join join,
                             const struct trace_turn *turn, const struct trace_turn *parent)
{
    const uint64_t joined = join.joined_blocks * join.block_tokens;

    if (class != TRACE_CLASS_EXTEND && class != TRACE_CLASS_OLDER) return joined;
    assert(parent != NULL);
    const uint64_t whole = (uint64_t)parent->raw_in_tokens + parent->raw_out_tokens;
    if (turn->raw_in_tokens >= whole) return whole;
    const uint64_t without_tail =
        join.parent_in_tokens < join.tail_tokens ? 0 : join.parent_in_tokens - join.tail_tokens;
    const uint64_t end = without_tail < turn->raw_in_tokens ? without_tail : turn->raw_in_tokens;
    return end > joined ? end : joined;
}

static kv_status summarize_session(const struct trace *trace, const struct trace_session *session,
                                   struct trace_summary *summary)
{
    struct trace_counts *counts = session->is_sub ? &summary->sub : &summary->main;
    struct trace_map holders = {0};
    kv_status status = KV_OK;

    counts->sessions++;
    for (uint32_t i = 0; i < session->item_count && status == KV_OK; i++) {
        const struct trace_item *item = &trace->items[session->items[i]];
        const struct trace_turn *turn = &item->turn;
        uint32_t holder = TRACE_MAP_NONE;
        const uint32_t joined = joined_blocks(&holders, &item->blocks, &holder);
        const struct trace_turn *parent =
            holder == TRACE_MAP_NONE ? NULL : &trace->items[session->items[holder]].turn;
        const struct trace_join join = {
            .joined_blocks = joined,
            .block_tokens = (uint64_t)trace->header.block_tokens * trace->header.scale,
            .parent_in_tokens = parent == NULL ? 0 : parent->raw_in_tokens,
            .tail_tokens = trace->header.tail_tokens,
            .prefix_tokens = (uint64_t)turn->sys_tokens * trace->header.scale,
            .parent_is_last = holder + 1 == i,
        };
        const enum trace_class class = i == 0 ? TRACE_CLASS_FIRST : trace_classify(join);

        counts->turns++;
        counts->classes[class]++;
        counts->in_tokens += turn->raw_in_tokens;
        counts->out_tokens += turn->raw_out_tokens;
        counts->joined_tokens += join.joined_blocks * join.block_tokens;
        counts->ideal_tokens += ideal_tokens(class, join, turn, parent);
        summary->scaled_in_tokens += turn->in_tokens;
        summary->scaled_out_tokens += turn->out_tokens;
        summary->scaled_new_tokens +=
            turn->in_tokens - (uint64_t)joined * trace->header.block_tokens;
        if (turn->in_tokens > summary->scaled_prompt_max)
            summary->scaled_prompt_max = turn->in_tokens;
        status = hold_blocks(&holders, &item->blocks, i);
    }
    trace_map_fini(&holders);
    return status;
}

kv_status trace_summarize(const struct trace *trace, struct trace_summary *ret_summary,
                          struct kv_error *err)
{
    struct trace_summary summary = {0};

    for (uint32_t i = 0; i < trace->session_count; i++) {
        const kv_status status = summarize_session(trace, &trace->sessions[i], &summary);
        if (status != KV_OK) return KV_FAIL(err, status, "no memory to classify the trace");
    }
    *ret_summary = summary;
    return KV_OK;
}
