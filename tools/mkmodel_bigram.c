/*
 * A model that knows one thing: which token follows which.
 *
 * All sublayers add zero (wo_b, every w2, and the value rows of Engram's wkv are zeros), and the
 * columns of a mix sum to one, so the residual streams stay the embedding of the token to the end.
 * The head's row of a token is the embedding of the token before it, so the greedy token after t is
 * bigram_next(t): the next higher ordinary id, after the last the first.  Random embeddings are far
 * from each other: the right logit is about 32, the others a normal of deviation 32 / sqrt(hidden).
 *
 * Drafting: the first row of a block holds the sampled token and is right by the same head.  The
 * other rows hold the noise token, whose embedding is zero, so that their base logits are zero; the
 * Markov head alone decides.  It writes ids in digits, one-hot per digit: the row of the right
 * token agrees in all digits and every other in fewer.  The confidence of every draft is near one.
 *
 * Ordinary ids are those from 3 on that are not special; a special token is followed by what
 * follows the first ordinary one.
 */

#include "tools/mkmodel.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define FIRST_ID 3u
#define RIGHT_LOGIT 32.0f
#define DIGIT_VALUE 4.0f

static bool is_ordinary(const struct eng_config *c, uint32_t id)
{
    const bool noise = c->draft_stages > 0 && id == c->draft_noise;
    const bool pad = c->engram_count > 0 && id == c->pad;
    return id >= FIRST_ID && id < c->vocab && id != c->eos && id != c->image_id && !noise && !pad;
}

static uint32_t first_ordinary(const struct eng_config *config)
{
    uint32_t id = FIRST_ID;
    while (!is_ordinary(config, id))
        id++;
    assert(id < config->vocab);
    return id;
}

uint32_t bigram_next(const struct eng_config *config, uint32_t token)
{
    uint32_t id = is_ordinary(config, token) ? token : first_ordinary(config);
    for (id++; id < config->vocab; id++)
        if (is_ordinary(config, id)) return id;
    return first_ordinary(config);
}

static uint32_t bigram_before(const struct eng_config *config, uint32_t token)
{
    for (uint32_t id = token; id-- > FIRST_ID;)
        if (is_ordinary(config, id)) return id;
    uint32_t last = config->vocab - 1;
    while (!is_ordinary(config, last))
        last--;
    return last;
}

bool bigram_zeroed(const struct eng_config *config, const struct eng_tensor_spec *weight,
                   uint64_t *ret_from)
{
    switch (weight->role) {
    case ENG_ROLE_WO_B:
    case ENG_ROLE_EXPERT_W2:
    case ENG_ROLE_SHARED_W2:
        *ret_from = 0;
        return true;
    case ENG_ROLE_ENGRAM_WKV: /* Four keys, then the value. */
        *ret_from = (uint64_t)ENG_STREAMS * config->hidden;
        return true;
    default:
        return false;
    }
}

/* Embedding of an id: its own stream, so that the head can have it again. */
static void embedding(const struct plan *plan, uint32_t id, float gain, float *values)
{
    const struct eng_config *config = plan->config;
    const uint32_t from = is_ordinary(config, id) ? id : first_ordinary(config);
    struct stream stream = stream_for(plan->seed ^ from, "bigram");

    for (uint32_t i = 0; i < config->hidden; i++)
        values[i] = gain * stream_normal(&stream);
}

/* `id` in digits of a base that gives room for all ids in `rank` places. */
static void digits(uint32_t vocab, uint32_t rank, uint32_t id, float *values)
{
    uint32_t count = 1, base = rank;

    for (;;) {
        uint64_t reach = 1;
        base = rank / count;
        for (uint32_t i = 0; i < count && reach < vocab; i++)
            reach *= base;
        if (reach >= vocab || base <= 2) break;
        count++;
    }
    memset(values, 0, rank * sizeof(*values));
    for (uint32_t i = 0; i < count; i++, id /= base)
        values[i * base + id % base] = DIGIT_VALUE;
}

bool bigram_row(const struct plan *plan, const struct eng_tensor_spec *weight, uint64_t row,
                float *values)
{
    const struct eng_config *c = plan->config;
    const uint32_t id = (uint32_t)row;

    switch (weight->role) {
    case ENG_ROLE_EMBED:
        embedding(plan, id, c->draft_stages > 0 && id == c->draft_noise ? 0.0f : 1.0f, values);
        return true;
    case ENG_ROLE_HEAD:
        embedding(plan, is_ordinary(c, id) ? bigram_before(c, id) : id,
                  is_ordinary(c, id) ? RIGHT_LOGIT / (float)c->hidden : 0.0f, values);
        return true;
    case ENG_ROLE_NORM:
        for (uint64_t i = 0; i < weight->rows; i++)
            values[i] = 1.0f;
        return true;
    case ENG_ROLE_MARKOV_EMBED:
        digits(c->vocab, c->draft_rank, bigram_next(c, id), values);
        return true;
    case ENG_ROLE_MARKOV_HEAD:
        digits(c->vocab, c->draft_rank, id, values);
        return true;
    case ENG_ROLE_CONFIDENCE:
        for (uint64_t i = 0; i < weight->columns; i++)
            values[i] = i < c->hidden ? 0.0f : 1.0f;
        return true;
    default:
        return false;
    }
}
