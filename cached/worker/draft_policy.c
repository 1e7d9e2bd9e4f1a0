/*
 * Tokens per second with k drafts, from two measurements: acceptance by place, cost by k.
 *
 * The expected yield of k drafts is 1 + p1 + p1 p2 + ... ; a draft counts only behind accepted
 * ones.  Costs of k that nobody has tried lie on the line through those that were.  Both are moving
 * averages, so what changes is followed within some tens of steps.
 */

#include "cached/worker/draft_policy.h"

#include "kvstore/base/bytes.h"

#define MARGIN 1.05     /* Gain below which it is not worth the risk. */
#define COST_OVER 8u    /* Steps of an average: costs change with the load, */
#define ACCEPT_OVER 32u /* acceptance with the text. */
#define TRY_STEPS 3u    /* Steps of one try. */
#define WAIT_MIN 32u    /* A try of 3 steps in 32: a few percent at most. */
#define WAIT_MAX 1024u
#define BASELINE_EVERY 64u /* Steps with drafts between two without, to see what those cost, */
#define MORE_EVERY 8u      /* and between two with more. */
#define SEEN_MIN 4u

static uint32_t size_class(uint32_t sessions)
{
    uint32_t size = 0;
    while (size + 1 < DRAFT_SIZE_CLASSES && (1u << size) < sessions)
        size++;
    return size;
}

uint64_t draft_costs_beside(uint64_t ns, uint32_t step_rows, uint32_t other_rows,
                            uint32_t chunk_tokens)
{
    if (2 * (uint64_t)other_rows < chunk_tokens) return 0;
    const double rows = (double)step_rows + other_rows;
    return KV_MAX((uint64_t)((double)ns * ((double)step_rows + chunk_tokens) / rows), 1u);
}

void draft_costs_seen(struct draft_costs *costs, uint32_t sessions, uint32_t drafts, uint64_t ns)
{
    double *average = &costs->ns[size_class(sessions)][KV_MIN(drafts, KV_DRAFTS_MAX)];
    const double seen = KV_MAX((double)ns, 1.0);
    *average = *average <= 0 ? seen : *average + (seen - *average) / COST_OVER;
}

/* Cost of k drafts against none; 0: unknown. */
static double cost_ratio(const double *ns, uint32_t k, uint32_t max)
{
    uint32_t below = k;
    uint32_t above = k;
    while (below > 0 && ns[below] <= 0)
        below--;
    while (above < max && ns[above] <= 0)
        above++;
    if (ns[0] <= 0) return 0;
    if (ns[k] > 0) return ns[k] / ns[0];
    if (ns[above] > 0) {
        const double slope = (ns[above] - ns[below]) / (double)(above - below);
        return (ns[below] + slope * (double)(k - below)) / ns[0];
    }
    if (below == 0) return 0;
    const double slope = (ns[below] - ns[0]) / (double)below;
    return (ns[below] + slope * (double)(k - below)) / ns[0];
}

/* The number with the largest gain; 0: none reaches the margin.  *ret_known: costs are measured. */
static uint32_t best(const struct draft_policy *policy, const double *ns, uint32_t max,
                     bool *ret_known)
{
    double tokens = 1;
    double reached = 1;
    double missed = 0;
    double best_gain = MARGIN;
    uint32_t best_k = 0;
    *ret_known = cost_ratio(ns, max, max) > 0;
    for (uint32_t k = 1; *ret_known && k <= max; k++) {
        /* A place that was hardly reached is like the one before it. */
        if (policy->seen[k - 1] >= SEEN_MIN || k == 1) missed = policy->missed[k - 1];
        reached *= 1 - missed;
        tokens += reached;
        const double gain = tokens / cost_ratio(ns, k, max);
        if (gain <= best_gain || policy->seen[0] == 0) continue;
        best_gain = gain;
        best_k = k;
    }
    return best_k;
}

uint32_t draft_policy_next(struct draft_policy *policy, const struct draft_costs *costs,
                           uint32_t sessions, uint32_t max)
{
    const double *ns = costs->ns[size_class(sessions)];
    const uint32_t most = KV_MIN(max, KV_DRAFTS_MAX);
    bool known;

    if (most == 0 || ns[0] <= 0) return 0;
    if (policy->interval == 0) { /* Its first step: a try at once. */
        policy->interval = WAIT_MIN;
        policy->tries = TRY_STEPS;
    }
    if (policy->wait > 0) {
        policy->wait--;
        return 0;
    }
    const uint32_t k = best(policy, ns, most, &known);
    if (k > 0) {
        policy->interval = WAIT_MIN;
        policy->tries = TRY_STEPS;
        /* Now and then a look at what lies on either side. */
        policy->steps = (policy->steps + 1) % BASELINE_EVERY;
        if (policy->steps == 0) return 0;
        return policy->steps % MORE_EVERY == 0 ? KV_MIN(k + 2, most) : k;
    }
    if (policy->tries > 0) {
        policy->tries--;
        return most;
    }
    policy->tries = TRY_STEPS;
    policy->wait = policy->interval;
    policy->interval = KV_MIN(2 * policy->interval, WAIT_MAX);
    return 0;
}

uint32_t draft_policy_compared(uint32_t proposed, uint32_t accepted, bool ended)
{
    return ended ? accepted : KV_MIN(proposed, accepted + 1);
}

void draft_policy_seen(struct draft_policy *policy, uint32_t proposed, uint32_t accepted)
{
    for (uint32_t i = 0; i < KV_MIN(proposed, KV_DRAFTS_MAX) && i <= accepted; i++) {
        const double missed = i < accepted ? 0 : 1;
        if (policy->seen[i] < ACCEPT_OVER) policy->seen[i]++;
        policy->missed[i] += (missed - policy->missed[i]) / policy->seen[i];
    }
}
