/*
 * How many tokens to draft.
 *
 * Goal: drafting pays where it can, is off where it cannot, comes back when that changes, and never
 * costs more than a few percent against no drafting at all.
 * Method: a session whose drafts are accepted with a known chance and whose steps cost a known
 * time; tokens per second against the best fixed number.  A wrong decision would be seen as a loss.
 */

#include "cached/worker/draft_policy.h"

#include "kvstore/base/bytes.h"
#include "tests/harness.h"

struct sim {
    struct draft_costs costs;
    struct draft_policy policy;
    uint64_t random;
    uint32_t chance;          /* Percent of drafts that are right. */
    double step_ns, draft_ns; /* A step; each draft on top. */
    double ns;
    uint64_t tokens, steps, drafts;
};

static uint32_t draw(struct sim *sim)
{
    sim->random = sim->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(sim->random >> 33) % 100;
}

static void run(struct sim *sim, uint32_t steps, uint32_t max)
{
    for (uint32_t i = 0; i < steps; i++) {
        const uint32_t k = draft_policy_next(&sim->policy, &sim->costs, 1, max);
        uint32_t accepted = 0;
        EXPECT(k <= max);
        while (accepted < k && draw(sim) < sim->chance)
            accepted++;
        const double ns = sim->step_ns + k * sim->draft_ns + draw(sim) * sim->step_ns / 2000;
        draft_policy_seen(&sim->policy, k, accepted);
        draft_costs_seen(&sim->costs, 1, k, (uint64_t)ns);
        sim->ns += ns;
        sim->tokens += accepted + 1;
        sim->drafts += k;
        sim->steps++;
    }
}

/* Tokens per step's time, against 1 for no drafts (a step costs 1.025 on average). */
static double speed(const struct sim *sim)
{
    return (double)sim->tokens / (sim->ns / (sim->step_ns * 1.025));
}

static double best_fixed(const struct sim *sim, uint32_t max)
{
    double tokens = 1;
    double reached = 1;
    double best = 1;
    for (uint32_t k = 1; k <= max; k++) {
        reached *= sim->chance / 100.0;
        tokens += reached;
        best = KV_MAX(best, tokens / (1 + k * sim->draft_ns / sim->step_ns));
    }
    return best;
}

static void test_right_everywhere(void)
{
    static const double prices[] = {0.02, 0.1, 0.3, 0.6, 1.0};
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(prices); i++) {
        for (uint32_t chance = 0; chance <= 100; chance += 10) {
            struct sim sim = {.random = 7, .chance = chance, .step_ns = 1e7};
            sim.draft_ns = sim.step_ns * prices[i];
            run(&sim, 4000, 5);
            const double best = best_fixed(&sim, 5);
            (void)printf("  price %.2f chance %3u: speed %.3f, best fixed %.3f, %.2f a step\n",
                         prices[i], chance, speed(&sim), best, (double)sim.drafts / 4000);
            EXPECT(speed(&sim) >= 0.95);
            EXPECT(speed(&sim) >= 0.9 * best);
        }
    }
}

static void test_off_and_back(void)
{
    struct sim sim = {.random = 3, .chance = 95, .step_ns = 1e7, .draft_ns = 1e6};
    run(&sim, 500, 5);
    EXPECT(speed(&sim) > 2);
    sim.chance = 0;
    run(&sim, 100, 5); /* Notices within this. */
    sim.drafts = 0;
    run(&sim, 1000, 5);
    EXPECT(sim.drafts > 0 && sim.drafts <= 5 * 60); /* Looks in now and then. */
    sim.chance = 95;
    run(&sim, 1100, 5); /* The longest it waits between two tries. */
    sim.tokens = 0;
    sim.ns = 0;
    run(&sim, 500, 5);
    EXPECT(speed(&sim) > 2);
}

static void test_cost_decides(void)
{
    /* The same acceptance: a step that became dear for drafts switches them off. */
    struct sim sim = {.random = 5, .chance = 60, .step_ns = 1e7, .draft_ns = 5e5};
    run(&sim, 300, 5);
    sim.draft_ns = 1e7;
    run(&sim, 100, 5);
    sim.drafts = 0;
    run(&sim, 1000, 5);
    EXPECT(sim.drafts <= 5 * 60);
}

static void test_edges(void)
{
    struct draft_costs costs = {0};
    struct draft_policy policy = {0};
    EXPECT_EQ_U32(draft_policy_next(&policy, &costs, 1, 5), 0); /* No cost known yet. */
    draft_costs_seen(&costs, 1, 0, 1000);
    EXPECT_EQ_U32(draft_policy_next(&policy, &costs, 1, 0), 0); /* A model without drafts. */
    EXPECT_EQ_U32(draft_policy_next(&policy, &costs, 2, 5), 0); /* Unknown for that many. */
    EXPECT_EQ_U32(draft_policy_next(&policy, &costs, 1, 5), 5); /* A try. */
    EXPECT_EQ_U32(draft_policy_next(&policy, &costs, 1, 100), KV_DRAFTS_MAX);
    draft_policy_seen(&policy, 0, 0);
    draft_policy_seen(&policy, KV_DRAFTS_MAX, KV_DRAFTS_MAX);
    draft_policy_seen(&policy, KV_DRAFTS_MAX, 0);
    draft_costs_seen(&costs, 100000, 1000, 0);
    EXPECT(costs.ns[DRAFT_SIZE_CLASSES - 1][KV_DRAFTS_MAX] > 0);
    /* Drafts that cost nothing and are right: all of them. */
    for (uint32_t i = 0; i < 20; i++) {
        draft_costs_seen(&costs, 1, 5, 1000);
        draft_policy_seen(&policy, 5, 5);
    }
    EXPECT_EQ_U32(draft_policy_next(&policy, &costs, 1, 5), 5);
}

/* A policy that never switches off would not pass: the loss is seen. */
static void test_planted(void)
{
    struct sim sim = {.random = 9, .chance = 0, .step_ns = 1e7, .draft_ns = 3e6};
    for (uint32_t i = 0; i < 1000; i++) {
        sim.policy = (struct draft_policy){0};
        run(&sim, 1, 5);
    }
    EXPECT(speed(&sim) < 0.95);
}

/*
 * A prefill is always queued: every pass has one chunk of it, two at its end, and a little between
 * two.  Drafts that are right pay there too, those that are wrong do not, and with many sessions
 * their rows count against the chunk.
 */
static double speed_beside(uint32_t chance, uint32_t sessions, double *ret_drafts)
{
    enum { CHUNK = 128, STEPS = 2000 };
    struct draft_costs costs = {0};
    struct draft_policy policy = {0};
    struct sim sim = {.random = 11, .chance = chance};
    double ns = 0, plain_ns = 0;
    uint64_t tokens = 0, drafts = 0;

    for (uint32_t i = 0; i < STEPS; i++) {
        const uint32_t k = draft_policy_next(&policy, &costs, sessions, 5);
        const uint32_t others = i % 8 == 7 ? 2 * CHUNK : i % 8 == 3 ? CHUNK / 16 : CHUNK;
        const uint32_t rows = sessions * 2 * (1 + k);
        uint32_t accepted = 0;
        while (accepted < k && draw(&sim) < chance)
            accepted++;
        const uint64_t pass_ns = 10000u * (uint64_t)(KV_MAX(rows + others, 64u));
        const uint64_t beside = draft_costs_beside(pass_ns, rows, others, CHUNK);
        EXPECT((beside > 0) == (others >= CHUNK / 2));
        if (beside > 0) draft_costs_seen(&costs, sessions, k, beside);
        draft_policy_seen(&policy, draft_policy_compared(k, accepted, false), accepted);
        ns += (double)pass_ns;
        plain_ns += 10000.0 * KV_MAX(2 * sessions + others, 64u);
        tokens += accepted + 1;
        drafts += k;
    }
    *ret_drafts = (double)drafts / STEPS;
    return (double)tokens / STEPS / (ns / plain_ns);
}

static void test_beside_prefills(void)
{
    double drafts;
    EXPECT(speed_beside(90, 1, &drafts) > 2.5);
    EXPECT(drafts > 3);
    EXPECT(speed_beside(50, 1, &drafts) > 1.3);
    EXPECT(speed_beside(0, 1, &drafts) > 0.98);
    EXPECT(drafts < 0.5);
    EXPECT(speed_beside(30, 64, &drafts) > 0.95);
    EXPECT(drafts < 0.5);
    EXPECT_EQ_U64(draft_costs_beside(1000, 4, 128, 128), 1000);
    EXPECT_EQ_U64(draft_costs_beside(1300, 4, 256, 128), 660);
    EXPECT_EQ_U64(draft_costs_beside(1000, 4, 63, 128), 0);
    EXPECT_EQ_U64(draft_costs_beside(0, 4, 128, 128), 1);
}

/* What was never compared is neither right nor wrong. */
static void test_compared(void)
{
    EXPECT_EQ_U32(draft_policy_compared(5, 5, false), 5);
    EXPECT_EQ_U32(draft_policy_compared(5, 2, false), 3); /* The third is wrong; two unknown. */
    EXPECT_EQ_U32(draft_policy_compared(5, 0, false), 1);
    EXPECT_EQ_U32(draft_policy_compared(5, 2, true), 2); /* A stop token behind two. */
    EXPECT_EQ_U32(draft_policy_compared(5, 0, true), 0);
    EXPECT_EQ_U32(draft_policy_compared(5, 5, true), 5);

    struct draft_policy policy = {0};
    draft_policy_seen(&policy, draft_policy_compared(5, 2, true), 2);
    EXPECT_EQ_U32(policy.seen[1], 1);
    EXPECT_EQ_U32(policy.seen[2], 0);
    EXPECT(policy.missed[0] <= 0 && policy.missed[1] <= 0 && policy.missed[2] <= 0);
}

int main(void)
{
    test_right_everywhere();
    test_off_and_back();
    test_cost_decides();
    test_edges();
    test_beside_prefills();
    test_compared();
    test_planted();
    HARNESS_END();
}
