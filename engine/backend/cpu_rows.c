/*
 * The compressor: global rows and index keys (the model's specification, sections 2.4 and 2.5).
 *
 * Ratio 2 pools tokens 2j and 2j+1 once the second has arrived; the raw half of the first waits in
 * the session's tails.  Replayed tokens run through here too, because the pair that straddles the
 * floor needs its first half, but nothing below the floor is ever written: a row's bytes are
 * decided once, by the prefill that first computed it.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"

#include <assert.h>
#include <string.h>

/* From latent (bf16, before rotation) of token `t`, whose position completes the entry. */
static void write_entry(struct eng_session *session, struct cpu_batch *batch, uint32_t layer,
                        uint32_t t)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t source = c->rows_source[layer];
    const uint32_t position = batch->first + t;
    /* Rotations begin one position before the batch; an entry stands at its first token. */
    const uint32_t at = c->ratio[layer] == 2 ? t : t + 1;
    float *latent = batch->latent + (size_t)t * c->head_dim;
    float *key = batch->key + (size_t)t * c->index_dim;
    assert(position >= session->run.floor);

    batch->kernels->matmul(&(struct eng_matmul_args){.packed = weights->ix_wk.packed,
                                                     .n = c->index_dim,
                                                     .k = c->head_dim,
                                                     .x = latent,
                                                     .y = batch->scratch,
                                                     .count = 1,
                                                     .round_bf16 = true});
    batch->kernels->rms(batch->scratch, weights->ix_k_norm, c->index_dim, c->rms_eps, key);
    cpu_rotate(batch, batch->rope_yarn, at, key, c->index_dim, false);
    eng_index_row_encode(key, c->index_dim, eng_index_row(session, source, position));

    cpu_rotate(batch, batch->rope_yarn, at, latent, c->head_dim, false);
    eng_main_row_encode(latent, c->head_dim, eng_main_row(session, source, position));
}

/* Softmax over the two tokens of b, per channel. */
static void pool(const float *a0, const float *b0, const float *a1, const float *b1, uint32_t dim,
                 float *pooled)
{
    for (uint32_t i = 0; i < dim; i++) {
        const float top = b0[i] > b1[i] ? b0[i] : b1[i];
        const float e0 = eng_exp(b0[i] - top), e1 = eng_exp(b1[i] - top);
        const float sum = e0 + e1;
        pooled[i] = eng_bf16_round(e0 / sum * a0[i] + e1 / sum * a1[i]);
    }
}

static void write_pairs(struct eng_session *session, struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t dim = c->head_dim;
    const uint32_t offset = eng_tail_offset(session->model, c->rows_source[layer]);

    cpu_linear(batch, &weights->cmp_wkv, batch->x, c->hidden, batch->pool_a, dim, false);
    cpu_linear(batch, &weights->cmp_wgate, batch->x, c->hidden, batch->pool_b, dim, false);
    for (uint32_t t = 0; t < batch->count; t++) {
        const float *a = batch->pool_a + (size_t)t * dim;
        const float *b = batch->pool_b + (size_t)t * dim;
        const uint32_t position = batch->first + t;
        float *tail_a = (float *)(void *)(eng_tails_at(session, position) + offset);
        float *tail_b = tail_a + dim;
        if (position % 2 == 0) {
            memcpy(tail_a, a, dim * sizeof(*a));
            memcpy(tail_b, b, dim * sizeof(*b));
            continue;
        }
        if (position < session->run.floor) continue;
        pool(tail_a, tail_b, a, b, dim, batch->scratch);
        batch->kernels->rms(batch->scratch, weights->cmp_norm, dim, c->rms_eps,
                            batch->latent + (size_t)t * dim);
        write_entry(session, batch, layer, t);
    }
}

static void write_singles(struct eng_session *session, struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t dim = c->head_dim;

    if (batch->first + batch->count <= session->run.floor) return;
    cpu_linear(batch, &weights->cmp_wkv, batch->x, c->hidden, batch->pool_a, dim, true);
    for (uint32_t t = 0; t < batch->count; t++) {
        if (batch->first + t < session->run.floor) continue;
        batch->kernels->rms(batch->pool_a + (size_t)t * dim, weights->cmp_norm, dim, c->rms_eps,
                            batch->latent + (size_t)t * dim);
        write_entry(session, batch, layer, t);
    }
}

void cpu_write_rows(struct eng_session *session, struct cpu_batch *batch, uint32_t layer)
{
    if (batch->config->ratio[layer] == 2)
        write_pairs(session, batch, layer);
    else
        write_singles(session, batch, layer);
}
