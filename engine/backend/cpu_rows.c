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

/* Softmax over the two tokens of b, per channel; not rounded. */
static void pool(const float *a0, const float *b0, const float *a1, const float *b1, uint32_t dim,
                 float *pooled)
{
    for (uint32_t i = 0; i < dim; i++) {
        const float top = b0[i] > b1[i] ? b0[i] : b1[i];
        const float e0 = eng_exp(b0[i] - top), e1 = eng_exp(b1[i] - top);
        const float sum = e0 + e1;
        pooled[i] = e0 / sum * a0[i] + e1 / sum * a1[i];
    }
}

void cpu_rows_products(struct cpu_batch *batch, uint32_t layer, struct cpu_products *products)
{
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const bool pairs = batch->config->ratio[layer] == 2;

    cpu_product(batch, products, &weights->cmp_wkv, batch->packed_x, batch->count, batch->pool_a,
                !pairs);
    if (pairs)
        cpu_product(batch, products, &weights->cmp_wgate, batch->packed_x, batch->count,
                    batch->pool_b, false);
}

/* Rows whose processing completes an entry that is still to be written. */
static uint32_t find_entries(struct cpu_batch *batch, uint32_t layer)
{
    const uint32_t ratio = batch->config->ratio[layer];
    uint32_t entries = 0;

    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *row = &batch->rows[t];
        if ((row->position + 1) % ratio != 0) continue;
        if (row->position < row->session->run.floor) continue;
        batch->entry_row[entries++] = t;
    }
    return entries;
}

static const float *tail_of(const struct cpu_batch *batch, uint32_t layer,
                            const struct cpu_row *row)
{
    const uint32_t offset = eng_tail_offset(batch->owner, batch->config->rows_source[layer]);
    return (
        const float *)(const void *)(eng_tails_at(row->session, row->position - row->position % 2) +
                                     offset);
}

/* What the compressor makes of the row that completes an entry, to `pooled`. */
static void pool_row(const struct cpu_batch *batch, uint32_t layer, uint32_t t, float *pooled)
{
    const uint32_t dim = batch->config->head_dim;
    const float *a = batch->pool_a + (size_t)t * dim, *b = batch->pool_b + (size_t)t * dim;

    if (t > 0 && batch->rows[t - 1].span == batch->rows[t].span) {
        pool(a - dim, b - dim, a, b, dim, pooled);
    } else {
        const float *tail = tail_of(batch, layer, &batch->rows[t]);
        pool(tail, tail + dim, a, b, dim, pooled);
    }
    batch->kernels->round(pooled, dim);
}

static void make_latents(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                         struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];

    for (uint32_t e = first; e < last; e++) {
        const uint32_t t = batch->entry_row[e];
        const float *latent = batch->pool_a + (size_t)t * c->head_dim;
        if (c->ratio[layer] == 2) {
            pool_row(batch, layer, t, thread->row);
            latent = thread->row;
        }
        batch->kernels->rms(latent, weights->cmp_norm, c->head_dim, c->rms_eps,
                            batch->latent + (size_t)e * c->head_dim);
    }
    const struct eng_pack_args packing = cpu_packing(batch, batch->latent, c->head_dim, last,
                                                     c->head_dim, false, batch->packed_latent);
    cpu_pack_rows(batch, &packing, first, last);
}

/* The raw halves of pairs that are not complete, and of the last before that: what rejected tokens
 * may be cut back to. */
static void write_tails(struct cpu_batch *batch, uint32_t layer)
{
    const uint32_t dim = batch->config->head_dim;
    const uint32_t offset = eng_tail_offset(batch->owner, batch->config->rows_source[layer]);

    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *row = &batch->rows[t];
        const struct cpu_span *span = &batch->spans[row->span];
        if (row->position % 2 != 0) continue;
        if (span->first + span->count - row->position > 2 * ENG_TAIL_SLOTS) continue;
        uint8_t *tail = eng_tails_at(row->session, row->position) + offset;
        memcpy(tail, batch->pool_a + (size_t)t * dim, dim * sizeof(float));
        memcpy(tail + dim * sizeof(float), batch->pool_b + (size_t)t * dim, dim * sizeof(float));
    }
}

/* Keys are made of latents before their rotation; an entry stands at its first token. */
static void write_entries(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                          struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg, source = c->rows_source[layer];
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const float *ropes = c->ratio[layer] == 2 ? batch->rope_entry : batch->rope_yarn;

    for (uint32_t e = first; e < last; e++) {
        const struct cpu_row *row = &batch->rows[batch->entry_row[e]];
        const float *rope = ropes + (size_t)batch->entry_row[e] * 2 * c->rope_dim;
        float *latent = batch->latent + (size_t)e * c->head_dim;
        float *key = thread->row;
        assert(row->position >= row->session->run.floor);

        batch->kernels->rms(batch->key + (size_t)e * c->index_dim, weights->ix_k_norm, c->index_dim,
                            c->rms_eps, key);
        cpu_rotate(batch, rope, key, c->index_dim, false);
        batch->kernels->index_row(key, c->index_dim,
                                  eng_index_row(row->session, source, row->position));
        cpu_rotate(batch, rope, latent, c->head_dim, false);
        batch->kernels->main_row(latent, c->head_dim,
                                 eng_main_row(row->session, source, row->position));
    }
}

void cpu_write_rows(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t entries = find_entries(batch, layer);
    struct cpu_products products = {.count = 0};

    cpu_each(batch, entries, ENG_PACK_ROWS, make_latents, &layer);
    if (batch->config->ratio[layer] == 2) write_tails(batch, layer);
    if (entries == 0) return;
    cpu_product(batch, &products, &weights->ix_wk, batch->packed_latent, entries, batch->key, true);
    cpu_products_run(batch, &products);
    cpu_each(batch, entries, ENG_PACK_ROWS, write_entries, &layer);
}
