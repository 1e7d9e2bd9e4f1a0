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

/* Latents of the pairs that are complete, and the raw halves of those that are not. */
static uint32_t pool_pairs(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t dim = c->head_dim;
    const uint32_t offset = eng_tail_offset(batch->owner, c->rows_source[layer]);
    uint32_t entries = 0;

    cpu_linear(batch, &weights->cmp_wkv, batch->x, c->hidden, batch->count, batch->pool_a, dim,
               false);
    cpu_linear(batch, &weights->cmp_wgate, batch->x, c->hidden, batch->count, batch->pool_b, dim,
               false);
    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *row = &batch->rows[t];
        const float *a = batch->pool_a + (size_t)t * dim;
        const float *b = batch->pool_b + (size_t)t * dim;
        const uint32_t even = row->position - row->position % 2;
        float *tail_a = (float *)(void *)(eng_tails_at(row->session, even) + offset);
        float *tail_b = tail_a + dim;
        if (row->position == even) {
            memcpy(tail_a, a, dim * sizeof(*a));
            memcpy(tail_b, b, dim * sizeof(*b));
            continue;
        }
        if (row->position < row->session->run.floor) continue;
        pool(tail_a, tail_b, a, b, dim, batch->scratch);
        batch->kernels->rms(batch->scratch, weights->cmp_norm, dim, c->rms_eps,
                            batch->latent + (size_t)entries * dim);
        batch->entry_row[entries++] = t;
    }
    return entries;
}

static uint32_t norm_singles(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t dim = c->head_dim;
    uint32_t entries = 0;

    cpu_linear(batch, &weights->cmp_wkv, batch->x, c->hidden, batch->count, batch->pool_a, dim,
               true);
    for (uint32_t t = 0; t < batch->count; t++) {
        if (batch->rows[t].position < batch->rows[t].session->run.floor) continue;
        batch->kernels->rms(batch->pool_a + (size_t)t * dim, weights->cmp_norm, dim, c->rms_eps,
                            batch->latent + (size_t)entries * dim);
        batch->entry_row[entries++] = t;
    }
    return entries;
}

/* Keys are made of latents before their rotation; an entry stands at its first token. */
static void write_entries(struct cpu_batch *batch, uint32_t layer, uint32_t entries)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t source = c->rows_source[layer];
    const float *ropes = c->ratio[layer] == 2 ? batch->rope_entry : batch->rope_yarn;

    cpu_linear(batch, &weights->ix_wk, batch->latent, c->head_dim, entries, batch->key,
               c->index_dim, true);
    for (uint32_t e = 0; e < entries; e++) {
        const struct cpu_row *row = &batch->rows[batch->entry_row[e]];
        const float *rope = ropes + (size_t)batch->entry_row[e] * c->rope_dim;
        float *latent = batch->latent + (size_t)e * c->head_dim;
        float *key = batch->scratch;
        assert(row->position >= row->session->run.floor);

        batch->kernels->rms(batch->key + (size_t)e * c->index_dim, weights->ix_k_norm, c->index_dim,
                            c->rms_eps, key);
        cpu_rotate(batch, rope, key, c->index_dim, false);
        cpu_key_encode(batch, key, eng_index_row(row->session, source, row->position));
        cpu_rotate(batch, rope, latent, c->head_dim, false);
        cpu_main_encode(batch, latent, eng_main_row(row->session, source, row->position));
    }
}

void cpu_write_rows(struct cpu_batch *batch, uint32_t layer)
{
    const uint32_t entries =
        batch->config->ratio[layer] == 2 ? pool_pairs(batch, layer) : norm_singles(batch, layer);
    if (entries > 0) write_entries(batch, layer, entries);
}
