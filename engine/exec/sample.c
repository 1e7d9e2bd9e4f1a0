/*
 * Picks the token of a position from its logits.
 *
 * The random number is a function of (seed, position) alone, so a stream that is resumed, replayed
 * or decoded again draws the same numbers.  Sums run in double in a fixed order; equal logits are
 * ordered by smaller id.  top_k comes first, top_p within what it left.
 */

#include "engine/backend/backend.h"

#include <assert.h>
#include <math.h>

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* In [0, 1). */
static double uniform(uint64_t seed, uint32_t position)
{
    return (double)(mix(mix(seed) ^ mix(position)) >> 11) * 0x1p-53;
}

static uint32_t greedy(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static bool comes_before(const float *logits, uint32_t a, uint32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, uint32_t *heap, uint32_t count, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count) return;
        if (child + 1 < count && comes_before(logits, heap[child + 1], heap[child])) child++;
        if (!comes_before(logits, heap[child], heap[at])) return;
        const uint32_t id = heap[at];
        heap[at] = heap[child];
        heap[child] = id;
        at = child;
    }
}

/* Moves the best of heap[0, count) behind the others; they then stand in order from the end. */
static uint32_t pop_best(const float *logits, uint32_t *heap, uint32_t count)
{
    const uint32_t id = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = id;
    sift_down(logits, heap, count - 1, 0);
    return id;
}

static uint32_t draw(const float *weights, const uint32_t *order, uint32_t count, double mass,
                     double u)
{
    const double target = u * mass;
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += (double)weights[order[count - 1 - i]];
        if (sum > target) return order[count - 1 - i];
    }
    return order[0];
}

/* order[vocab - kept ..) holds the kept ids, best last; returns how many. */
static uint32_t keep_best(const struct eng_model *model, const float *logits,
                          const struct eng_sampling *sampling, double *ret_mass)
{
    const uint32_t vocab = model->layout.vocab_tokens;
    const float *weights = model->sample_values;
    uint32_t *order = model->sample_order;
    const uint32_t k = sampling->top_k > 0 && sampling->top_k < vocab ? sampling->top_k : vocab;
    uint32_t kept = 0;
    double total = 0, mass = 0;

    for (uint32_t i = vocab / 2; i-- > 0;)
        sift_down(logits, order, vocab, i);
    if (k == vocab)
        for (uint32_t i = 0; i < vocab; i++)
            total += (double)weights[i];
    else
        for (; kept < k; kept++)
            total += (double)weights[pop_best(logits, order, vocab - kept)];

    /* The smallest set of best tokens whose mass reaches top_p of the total. */
    const double enough = sampling->top_p < 1.0f ? (double)sampling->top_p * total : total;
    uint32_t count = 0;
    while (count < k && (count == 0 || mass < enough)) {
        if (count == kept) {
            (void)pop_best(logits, order, vocab - kept);
            kept++;
        }
        mass += (double)weights[order[vocab - 1 - count]];
        count++;
    }
    *ret_mass = mass;
    return count;
}

uint32_t eng_sample(const struct eng_model *model, const float *logits, uint32_t position,
                    const struct eng_sampling *sampling)
{
    const uint32_t vocab = model->layout.vocab_tokens;
    float *values = model->sample_values;
    uint32_t *order = model->sample_order;

    const uint32_t best = greedy(logits, vocab);
    if (!(sampling->temperature > 0)) return best;

    for (uint32_t i = 0; i < vocab; i++) {
        const double scaled =
            ((double)logits[i] - (double)logits[best]) / (double)sampling->temperature;
        values[i] = (float)exp(scaled);
        order[i] = i;
    }
    const double u = uniform(sampling->seed, position);
    double mass = 0;
    if (sampling->top_k == 0 && !(sampling->top_p < 1.0f)) {
        for (uint32_t i = 0; i < vocab; i++) {
            mass += (double)values[i];
            order[vocab - 1 - i] = i;
        }
        return draw(values, order, vocab, mass, u);
    }
    const uint32_t count = keep_best(model, logits, sampling, &mass);
    return draw(values, order + (vocab - count), count, mass, u);
}

uint32_t eng_session_sample(const struct eng_session *session, const struct eng_sampling *sampling)
{
    return eng_sample(session->model, eng_session_logits(session), session->tokens, sampling);
}

uint32_t eng_session_sample_at(const struct eng_session *session, uint32_t i,
                               const struct eng_sampling *sampling)
{
    return eng_sample(session->model, eng_session_logits_at(session, i),
                      session->verify_first + i + 1, sampling);
}
