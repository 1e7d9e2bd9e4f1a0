/*
 * Resume planning, rule by rule.
 *
 * Goal: every branch of kv_plan_resume() and both sides of each boundary.
 * Method: a table of situations on a toy model (window 4), then a sweep over every situation a
 * prompt of up to 64 tokens can have, checked against the invariants and the bound on work.
 */

#include "kvstore/plan/plan.h"
#include "tests/harness.h"

enum { WINDOW = 4 };

static void test_each_rule(void)
{
    const struct {
        const char *what;
        struct kv_found found;
        struct kv_plan want;
    } cases[] = {
        {"nothing stored", {0, 0, false}, {KV_PLAN_MISS, 0, 0, 40}},
        {"windows at the end of the rows", {30, 30, false}, {KV_PLAN_EXACT, 30, 30, 40}},
        {"windows one window below", {30, 26, false}, {KV_PLAN_EXACT, 26, 26, 40}},
        {"windows too far below", {30, 25, false}, {KV_PLAN_REPLAY, 26, 30, 40}},
        {"windows dropped", {30, 0, false}, {KV_PLAN_REPLAY, 26, 30, 40}},
        {"odd checkpoint with its window", {31, 31, false}, {KV_PLAN_EXACT, 31, 31, 40}},
        {"odd checkpoint without: even(R)", {31, 0, false}, {KV_PLAN_REPLAY, 26, 30, 40}},
        {"cut inside an edge at an odd token", {17, 0, false}, {KV_PLAN_REPLAY, 12, 16, 40}},
        {"whole prompt stored, spare rows serve", {39, 38, false}, {KV_PLAN_EXACT, 38, 38, 40}},
        {"whole prompt stored, no window", {39, 0, false}, {KV_PLAN_REPLAY, 34, 38, 40}},
        {"one past one window", {6, 0, false}, {KV_PLAN_REPLAY, 2, 6, 40}},
        {"odd, and even(R) is one window", {5, 0, false}, {KV_PLAN_MISS, 0, 0, 40}},
        {"H <= one window without a window", {4, 0, false}, {KV_PLAN_MISS, 0, 0, 40}},
        {"H <= one window with a window", {4, 2, false}, {KV_PLAN_EXACT, 2, 2, 40}},
        {"a window at token 1", {5, 1, false}, {KV_PLAN_EXACT, 1, 1, 40}},
        {"far below, replays exhausted", {30, 8, true}, {KV_PLAN_EXACT, 8, 8, 40}},
        {"close, replays exhausted", {30, 28, true}, {KV_PLAN_EXACT, 28, 28, 40}},
        {"no window, replays exhausted", {30, 0, true}, {KV_PLAN_MISS, 0, 0, 40}},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct kv_plan got = kv_plan_resume(WINDOW, cases[i].found, 40);
        (void)printf("  %s\n", cases[i].what);
        EXPECT(got.kind == cases[i].want.kind);
        EXPECT_EQ_U32(got.replay_from, cases[i].want.replay_from);
        EXPECT_EQ_U32(got.restore_tokens, cases[i].want.restore_tokens);
        EXPECT_EQ_U32(got.prompt_tokens, cases[i].want.prompt_tokens);
    }
}

static void check_invariants(struct kv_found found, const struct kv_plan *plan)
{
    const bool is_replay = plan->kind == KV_PLAN_REPLAY;
    EXPECT(plan->replay_from <= plan->restore_tokens);
    EXPECT(plan->restore_tokens < plan->prompt_tokens);
    EXPECT(plan->restore_tokens <= found.rows_tokens);
    EXPECT(!is_replay || plan->restore_tokens % 2 == 0);
    EXPECT(!is_replay || plan->restore_tokens - plan->replay_from == WINDOW);
    EXPECT(!is_replay || plan->replay_from > 0);
    EXPECT(is_replay || plan->replay_from == plan->restore_tokens);
    /* The mark is never taken when an exact plan costs no more, nor when it is forbidden. */
    EXPECT(!is_replay || found.image_tokens == 0 ||
           found.rows_tokens - found.image_tokens > WINDOW);
    EXPECT(!is_replay || !found.replays_exhausted);
    EXPECT(plan->kind != KV_PLAN_EXACT || plan->restore_tokens == found.image_tokens);
    EXPECT(plan->kind != KV_PLAN_MISS || plan->restore_tokens == 0);
    /* A window that is there is never thrown away for a computation from 0. */
    EXPECT(plan->kind != KV_PLAN_MISS || found.image_tokens == 0);
}

/* What is computed: the tokens the rows leave open, plus one window, plus the odd token that a
 * replay cannot enter at. */
static void check_work(struct kv_found found, const struct kv_plan *plan)
{
    if (plan->kind == KV_PLAN_MISS || found.replays_exhausted) return;
    const uint32_t odd = plan->kind == KV_PLAN_REPLAY ? found.rows_tokens % 2 : 0;
    EXPECT(plan->prompt_tokens - plan->replay_from <=
           plan->prompt_tokens - found.rows_tokens + WINDOW + odd);
}

static void test_every_situation(void)
{
    uint64_t kinds[3] = {0};

    for (uint32_t prompt = 1; prompt <= 64; prompt++) {
        for (uint32_t rows = 0; rows < prompt; rows++) {
            for (uint32_t i = 0; i < 2 * (rows + 1); i++) {
                const struct kv_found found = {rows, i / 2, i % 2 == 1};
                const struct kv_plan plan = kv_plan_resume(WINDOW, found, prompt);
                check_invariants(found, &plan);
                check_work(found, &plan);
                kinds[plan.kind]++;
            }
        }
    }
    EXPECT(kinds[KV_PLAN_MISS] > 0 && kinds[KV_PLAN_REPLAY] > 0 && kinds[KV_PLAN_EXACT] > 0);
}

static void test_longest_prompt_and_window(void)
{
    const struct kv_found all = {UINT32_MAX - 1, 0, false};
    EXPECT(kv_plan_resume(UINT32_MAX, all, UINT32_MAX).kind == KV_PLAN_MISS);
    const struct kv_plan plan = kv_plan_resume(128, all, UINT32_MAX);
    EXPECT(plan.kind == KV_PLAN_REPLAY);
    EXPECT_EQ_U32(plan.restore_tokens, UINT32_MAX - 1);
    EXPECT_EQ_U32(plan.replay_from, UINT32_MAX - 129);
}

int main(void)
{
    test_each_rule();
    test_every_situation();
    test_longest_prompt_and_window();
    HARNESS_END();
}
