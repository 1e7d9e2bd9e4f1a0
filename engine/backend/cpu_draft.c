/*
 * Drafting (the model's specification, section 2.9).
 *
 * A stage keeps a window of its own, made of main_x: what the last layers of the model see of a
 * token.  So wherever the decoder runs, a row is written for every stage, and drafting after a
 * token needs nothing but those windows and the token sampled for the next position.
 *
 * A block is that token and noise behind it, at the positions to come.  Its rows see the context
 * and each other without a mask, and are forgotten; the stages are ordinary blocks of the model
 * otherwise.  The last part, which makes each draft follow the one before, runs one draft after
 * the other for all sessions at once.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* ---- Windows of the stages, while the decoder runs. ---- */

struct tap {
    uint32_t target;
};

static void tap_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                     struct cpu_thread *thread)
{
    const struct tap *at = arg;
    const size_t hidden = batch->config->hidden;
    const size_t width = batch->config->draft_target_count * hidden;

    for (uint32_t t = first; t < last; t++) {
        const float *x = batch->streams + (size_t)t * ENG_STREAMS * hidden;
        float *tap = batch->taps + t * width + at->target * hidden;
        for (size_t i = 0; i < hidden; i++)
            tap[i] = (x[i] + x[hidden + i] + x[2 * hidden + i] + x[3 * hidden + i]) * 0.25f;
        batch->kernels->round(tap, hidden);
    }
}

void cpu_tap(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    struct tap tap = {0};

    while (tap.target < c->draft_target_count && c->draft_targets[tap.target] != layer)
        tap.target++;
    if (tap.target < c->draft_target_count)
        cpu_each(batch, batch->count, ENG_PACK_ROWS, tap_rows, &tap);
}

/* main_x, and its packed form. */
static void norm_main(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                      struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const float *norm = batch->model->weights.draft.main_norm;
    const struct eng_pack_args packing =
        cpu_packing(batch, batch->x, c->hidden, batch->count, c->hidden, true, batch->packed_xq);

    for (uint32_t t = first; t < last; t++)
        batch->kernels->rms(batch->sub + (size_t)t * c->hidden, norm, c->hidden, c->rms_eps,
                            batch->x + (size_t)t * c->hidden);
    cpu_pack_rows(batch, &packing, first, last);
}

static void write_stage(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                        struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];

    for (uint32_t t = first; t < last; t++) {
        float *kv = batch->kv + (size_t)t * c->head_dim;
        batch->kernels->rms(batch->kv_raw + (size_t)t * c->head_dim, weights->kv_norm, c->head_dim,
                            c->rms_eps, kv);
        cpu_rotate(batch, batch->rope_plain + (size_t)t * 2 * c->rope_dim, kv, c->head_dim, false);
        batch->kernels->window_row(
            kv, c->head_dim, batch->kv_packed + (size_t)t * batch->owner->layout.window_row_bytes);
    }
}

/* Rows go into the ring in order: a span may be longer than the ring. */
static void keep_stage(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_probe *probe = batch->owner->probe;
    const size_t bytes = batch->owner->layout.window_row_bytes;

    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *at = &batch->rows[t];
        uint8_t *row = eng_ring_row(at->session, layer, at->position);
        memcpy(row, batch->kv_packed + t * bytes, bytes);
        if (probe == NULL || probe->window_row == NULL) continue;
        probe->window_row(
            probe->context,
            &(struct eng_probe_rows){
                .session = at->session, .layer = layer, .first = at->position, .count = 1},
            row);
    }
}

void cpu_draft_windows(struct cpu_batch *batch)
{
    const struct eng_config *c = batch->config;
    const struct eng_weights *weights = &batch->model->weights;
    const uint32_t width = c->draft_target_count * c->hidden;
    struct cpu_products products = {.count = 0};

    if (c->draft_stages == 0) return;
    const struct eng_pack_args packing =
        cpu_packing(batch, batch->taps, width, batch->count, width, true, batch->packed_taps);
    cpu_pack(batch, &packing);
    cpu_product(batch, &products, &weights->draft.main_proj, batch->packed_taps, batch->count,
                batch->sub, true);
    cpu_products_run(batch, &products);
    cpu_each(batch, batch->count, ENG_PACK_ROWS, norm_main, NULL);
    for (uint32_t layer = c->layers; layer < c->layers + c->draft_stages; layer++) {
        cpu_product(batch, &products, &weights->layers[layer].wkv, batch->packed_xq, batch->count,
                    batch->kv_raw, true);
        cpu_products_run(batch, &products);
        cpu_each(batch, batch->count, ENG_PACK_ROWS, write_stage, &layer);
        keep_stage(batch, layer);
    }
}

/* ---- A block of drafts. ---- */

/* Context of one session as its window, the block as the list behind it; returns how many of
 * context. */
static uint32_t load_block(struct cpu_batch *batch, uint32_t layer, uint32_t n,
                           struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const enum eng_row_kind kind = cpu_row_kind(batch, ENG_ROW_WINDOW);
    struct cpu_span *span = &batch->spans[n];
    const uint32_t end = span->session->tokens;
    const uint32_t reach = end > c->window ? end - c->window : 0;
    const uint32_t first = KV_MAX(reach, eng_layer_first(span->session, layer));
    const size_t window_bytes = eng_rows_bytes(c->window, c->head_dim, true);
    const size_t block_bytes = eng_rows_bytes(c->draft_block, c->head_dim, true);

    span->window = (struct eng_rows){.memory = batch->window + n * window_bytes,
                                     .capacity = c->window,
                                     .dim = c->head_dim,
                                     .sliding = true};
    span->block = (struct eng_rows){.memory = batch->draft->block_rows + n * block_bytes,
                                    .capacity = c->draft_block,
                                    .dim = c->head_dim,
                                    .sliding = true};
    for (uint32_t p = first; p < end; p++)
        thread->packed[p - first] = eng_ring_row(span->session, layer, p);
    batch->compute->kernels->attend->prepare(&span->window, kind, 0, thread->packed, end - first);
    for (uint32_t i = 0; i < span->count; i++)
        thread->packed[i] =
            batch->kv_packed + (size_t)(span->row + i) * batch->owner->layout.window_row_bytes;
    batch->compute->kernels->attend->prepare(&span->block, kind, 0, thread->packed, span->count);
    return end - first;
}

static void attend_blocks(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                          struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg;
    const size_t width = (size_t)c->heads * c->head_dim;

    for (uint32_t n = first; n < last; n++) {
        const uint32_t context = load_block(batch, layer, n, thread);
        const struct cpu_span *span = &batch->spans[n];
        for (uint32_t t = span->row; t < span->row + span->count; t++) {
            batch->compute->kernels->attend->attend(
                &(struct eng_attention_args){
                    .q = batch->q + t * width,
                    .heads = c->heads,
                    .dim = c->head_dim,
                    .scale = 1.0f / sqrtf((float)c->head_dim),
                    .sink = batch->model->weights.layers[layer].sink,
                    .window = &span->window,
                    .window_valid = context,
                    .window_columns = c->window,
                    .list = &span->block,
                    .list_count = span->count,
                    .o = batch->o + t * width,
                },
                thread->scratch);
            cpu_attended(batch, layer, t);
        }
    }
}

void cpu_draft_attend(struct cpu_batch *batch, uint32_t layer)
{
    assert(batch->span_count <= CPU_DRAFT_SESSIONS);
    cpu_each(batch, batch->span_count, 1, attend_blocks, &layer);
}

/* Streams of the blocks through the stages; leaves what the heads read: the collapsed rows in
 * batch->sub, normed in batch->x. */
static void run_stages(struct cpu_batch *batch, const struct eng_draft_item *items, uint32_t count)
{
    const struct eng_config *c = batch->config;
    const float *norm = batch->model->weights.draft.norm;
    struct eng_span spans[CPU_DRAFT_SESSIONS];

    for (uint32_t i = 0; i < count; i++) {
        uint32_t *ids = batch->draft->ids + (size_t)i * c->draft_block;
        spans[i] = (struct eng_span){.session = items[i].session,
                                     .first = items[i].session->tokens,
                                     .count = c->draft_block};
        ids[0] = items[i].first;
        for (uint32_t n = 1; n < c->draft_block; n++)
            ids[n] = c->draft_noise;
    }
    batch->streams = batch->decoder_streams;
    batch->g = batch->decoder_g;
    cpu_batch_start(batch, spans, count);
    batch->draft_ids = batch->draft->ids;
    cpu_embed(batch);
    for (uint32_t layer = c->layers; layer < c->layers + c->draft_stages; layer++) {
        cpu_block(batch, layer, false);
        cpu_leave_layer(batch, layer);
    }
    for (uint32_t t = 0; t < batch->count; t++) {
        float *collapsed = batch->sub + (size_t)t * c->hidden;
        batch->kernels->collapse(batch->streams + (size_t)t * ENG_STREAMS * c->hidden,
                                 batch->g + (size_t)t * ENG_STREAMS, c->hidden, collapsed);
        batch->kernels->rms(collapsed, norm, c->hidden, c->rms_eps,
                            batch->x + (size_t)t * c->hidden);
    }
    batch->draft_ids = NULL;
}

static float dot(const float *a, const float *b, uint32_t count)
{
    float lanes[16] = {0};
    for (uint32_t i = 0; i < count; i += 16)
        for (uint32_t l = 0; l < 16; l++)
            lanes[l] += a[i + l] * b[i + l];
    return cpu_lanes_sum(lanes);
}

/* The i-th draft of every session that wants so many. */
static void draft_next(struct cpu_batch *batch, const struct eng_draft_item *items, uint32_t count,
                       uint32_t i)
{
    const struct eng_config *c = batch->config;
    const struct eng_draft_weights *weights = &batch->model->weights.draft;
    const struct cpu_draft *draft = batch->draft;
    const size_t vocab = c->vocab;
    const struct eng_pack_args packing = cpu_packing(batch, draft->embed, c->draft_rank, count,
                                                     c->draft_rank, false, draft->packed_embed);
    struct cpu_products products = {.count = 0};

    for (uint32_t n = 0; n < count; n++)
        eng_weights_row(&weights->markov_embed, draft->prev[n],
                        draft->embed + (size_t)n * c->draft_rank);
    cpu_pack(batch, &packing);
    cpu_product(batch, &products, &weights->markov_head, draft->packed_embed, count, draft->bias,
                false);
    cpu_products_run(batch, &products);
    for (uint32_t n = 0; n < count; n++) {
        const size_t at = (size_t)n * c->draft_block + i;
        float *logits = draft->logits + at * vocab;
        const float *bias = draft->bias + n * vocab;
        if (i >= items[n].max) continue;
        for (uint32_t v = 0; v < c->vocab; v++)
            logits[v] += bias[v];
        draft->confidence[at] = dot(weights->confidence, batch->sub + at * c->hidden, c->hidden) +
                                dot(weights->confidence + c->hidden,
                                    draft->embed + (size_t)n * c->draft_rank, c->draft_rank);
        draft->tokens[at] =
            eng_sample(batch->owner, logits, items[n].session->tokens + 1 + i, &items[n].sampling);
        draft->prev[n] = draft->tokens[at];
    }
}

/* The probe sees what was asked for, position by position. */
static void show_drafts(const struct cpu_batch *batch, const struct eng_draft_item *item,
                        uint32_t block)
{
    const struct eng_config *c = batch->config;
    const struct eng_probe *probe = batch->owner->probe;
    const struct cpu_draft *draft = batch->draft;
    const size_t at = (size_t)block * c->draft_block, vocab = c->vocab;

    if (probe == NULL || probe->draft == NULL) return;
    for (uint32_t i = 0; i < item->max; i++)
        probe->draft(probe->context,
                     &(struct eng_probe_rows){.session = item->session,
                                              .layer = c->layers + c->draft_stages,
                                              .first = item->session->tokens + 1 + i,
                                              .count = 1},
                     draft->tokens + at + i, draft->logits + (at + i) * vocab,
                     draft->confidence + at + i);
}

static void draft_group(struct cpu_batch *batch, const struct eng_draft_item *items, uint32_t count)
{
    const struct eng_config *c = batch->config;
    const struct cpu_draft *draft = batch->draft;
    struct cpu_products products = {.count = 0};
    uint32_t most = 0;

    run_stages(batch, items, count);
    const struct eng_pack_args packing =
        cpu_packing(batch, batch->x, c->hidden, batch->count, c->hidden, false, draft->packed_x);
    cpu_pack(batch, &packing);
    cpu_product(batch, &products, &batch->model->weights.head, draft->packed_x, batch->count,
                draft->logits, false);
    cpu_products_run(batch, &products);
    for (uint32_t n = 0; n < count; n++) {
        draft->prev[n] = items[n].first;
        most = KV_MAX(most, items[n].max);
    }
    for (uint32_t i = 0; i < most; i++)
        draft_next(batch, items, count, i);
    for (uint32_t n = 0; n < count; n++) {
        const size_t at = (size_t)n * c->draft_block;
        memcpy(items[n].tokens, draft->tokens + at, items[n].max * sizeof(*items[n].tokens));
        if (items[n].confidence != NULL)
            memcpy(items[n].confidence, draft->confidence + at,
                   items[n].max * sizeof(*items[n].confidence));
        show_drafts(batch, &items[n], n);
    }
}

void cpu_draft(struct eng_model *model, const struct eng_draft_item *items, uint32_t count)
{
    struct cpu_model *own = model->backend;
    const uint32_t fit = cpu_rows_max(model) / model->config.draft_block;
    const uint32_t group = KV_MIN(fit, CPU_DRAFT_SESSIONS);

    for (uint32_t done = 0; done < count; done += group)
        draft_group(&own->batch, items + done, KV_MIN(group, count - done));
}
