/*
 * The choice between EXACT, REPLAY and MISS, and nothing else.
 *
 * Order of preference: a window close enough below the rows (no approximation, no more work than a
 * replay), a replay, a window anywhere (exact, but more to compute), nothing.  A replay that would
 * reach token 0 is never chosen: it reruns everything the rows would save, so computing from 0
 * costs no more and is exact.
 */

#include "kvstore/plan/plan.h"

#include <assert.h>

static struct kv_plan plan_exact(uint32_t image_tokens, uint32_t prompt_tokens)
{
    return (struct kv_plan){
        .kind = KV_PLAN_EXACT,
        .replay_from = image_tokens,
        .restore_tokens = image_tokens,
        .prompt_tokens = prompt_tokens,
    };
}

static struct kv_plan plan_choose(uint32_t window_tokens, struct kv_found found,
                                  uint32_t prompt_tokens)
{
    const bool has_image = found.image_tokens > 0;
    if (has_image && found.rows_tokens - found.image_tokens <= window_tokens)
        return plan_exact(found.image_tokens, prompt_tokens);

    /* Without tails a position can only be entered between pairs: even(R). */
    const uint32_t even = found.rows_tokens - found.rows_tokens % 2;
    if (even > window_tokens && !found.replays_exhausted) {
        return (struct kv_plan){
            .kind = KV_PLAN_REPLAY,
            .replay_from = even - window_tokens,
            .restore_tokens = even,
            .prompt_tokens = prompt_tokens,
        };
    }

    if (has_image) return plan_exact(found.image_tokens, prompt_tokens);
    return (struct kv_plan){.kind = KV_PLAN_MISS, .prompt_tokens = prompt_tokens};
}

struct kv_plan kv_plan_resume(uint32_t window_tokens, struct kv_found found, uint32_t prompt_tokens)
{
    assert(window_tokens > 0);
    assert(found.rows_tokens < prompt_tokens);
    assert(found.image_tokens <= found.rows_tokens);

    const struct kv_plan plan = plan_choose(window_tokens, found, prompt_tokens);

    assert(plan.replay_from <= plan.restore_tokens);
    assert(plan.restore_tokens < plan.prompt_tokens);
    if (plan.kind == KV_PLAN_REPLAY) assert(plan.restore_tokens % 2 == 0);
    if (plan.kind != KV_PLAN_REPLAY) assert(plan.replay_from == plan.restore_tokens);
    return plan;
}
