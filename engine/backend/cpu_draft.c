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

void cpu_tap(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const size_t hidden = c->hidden, width = c->draft_target_count * hidden;
    uint32_t target = 0;

    while (target < c->draft_target_count && c->draft_targets[target] != layer)
        target++;
    if (target == c->draft_target_count) return;
    for (uint32_t t = 0; t < batch->count; t++) {
        const float *x = batch->streams + (size_t)t * ENG_STREAMS * hidden;
        float *tap = batch->taps + t * width + target * hidden;
        for (size_t i = 0; i < hidden; i++)
            tap[i] = eng_bf16_round((x[i] + x[hidden + i] + x[2 * hidden + i] + x[3 * hidden + i]) *
                                    0.25f);
    }
}

static void write_stage(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const struct eng_probe *probe = batch->owner->probe;

    cpu_linear(batch, &weights->wkv, batch->xq, c->hidden, batch->count, batch->q, c->head_dim,
               true);
    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *at = &batch->rows[t];
        float *kv = batch->kv + (size_t)t * c->head_dim;
        uint8_t *row = eng_ring_row(at->session, layer, at->position);
        batch->kernels->rms(batch->q + (size_t)t * c->head_dim, weights->kv_norm, c->head_dim,
                            c->rms_eps, kv);
        cpu_rotate(batch, batch->rope_plain + (size_t)t * c->rope_dim, kv, c->head_dim, false);
        cpu_window_encode(batch, kv, row);
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
    const struct eng_draft_weights *weights = &batch->model->weights.draft;
    const size_t width = (size_t)c->draft_target_count * c->hidden;

    if (c->draft_stages == 0) return;
    cpu_quantize(batch, batch->taps, batch->count * width, batch->taps);
    cpu_linear(batch, &weights->main_proj, batch->taps, width, batch->count, batch->sub, c->hidden,
               true);
    for (uint32_t t = 0; t < batch->count; t++)
        batch->kernels->rms(batch->sub + (size_t)t * c->hidden, weights->main_norm, c->hidden,
                            c->rms_eps, batch->x + (size_t)t * c->hidden);
    cpu_quantize(batch, batch->x, (size_t)batch->count * c->hidden, batch->xq);
    for (uint32_t s = 0; s < c->draft_stages; s++)
        write_stage(batch, c->layers + s);
}

/* ---- A block of drafts. ---- */

/* Context and block of one session, consecutively in batch->window; returns how many of context. */
static uint32_t load_block(struct cpu_batch *batch, uint32_t layer, const struct cpu_span *span)
{
    const struct eng_config *c = batch->config;
    const uint32_t end = span->session->tokens;
    const uint32_t reach = end > c->window ? end - c->window : 0;
    const uint32_t first = KV_MAX(reach, eng_layer_first(span->session, layer));
    float *at = batch->window;
    uint8_t packed[2 * 1024];
    assert(batch->owner->layout.window_row_bytes <= sizeof(packed));

    for (uint32_t p = first; p < end; p++, at += c->head_dim)
        cpu_window_decode(batch, eng_ring_row(span->session, layer, p), at);
    for (uint32_t i = 0; i < span->count; i++, at += c->head_dim) {
        cpu_window_encode(batch, batch->kv + (size_t)(span->row + i) * c->head_dim, packed);
        cpu_window_decode(batch, packed, at);
    }
    return end - first;
}

void cpu_draft_attend(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const size_t width = (size_t)c->heads * c->head_dim;

    for (uint32_t n = 0; n < batch->span_count; n++) {
        const struct cpu_span *span = &batch->spans[n];
        const uint32_t context = load_block(batch, layer, span);
        for (uint32_t t = span->row; t < span->row + span->count; t++)
            batch->kernels->attend(&(struct eng_attend_args){
                .q = batch->q + t * width,
                .heads = c->heads,
                .dim = c->head_dim,
                .scale = 1.0f / sqrtf((float)c->head_dim),
                .sink = weights->sink,
                .window = batch->window,
                .window_valid = context,
                .window_columns = c->window,
                .compressed = batch->window + (size_t)context * c->head_dim,
                .compressed_count = span->count,
                .o = batch->o + t * width,
            });
    }
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
    for (uint32_t width = 8; width > 0; width /= 2)
        for (uint32_t l = 0; l < width; l++)
            lanes[l] += lanes[l + width];
    return lanes[0];
}

/* The i-th draft of every session that wants so many. */
static void draft_next(struct cpu_batch *batch, const struct eng_draft_item *items, uint32_t count,
                       uint32_t i)
{
    const struct eng_config *c = batch->config;
    const struct eng_draft_weights *weights = &batch->model->weights.draft;
    const struct cpu_draft *draft = batch->draft;
    const size_t padded = eng_pad_lanes(c->vocab);

    for (uint32_t n = 0; n < count; n++)
        memcpy(draft->embed + (size_t)n * c->draft_rank,
               weights->markov_embed + (size_t)draft->prev[n] * c->draft_rank,
               c->draft_rank * sizeof(float));
    cpu_linear(batch, &weights->markov_head, draft->embed, c->draft_rank, count, draft->bias,
               padded, false);
    for (uint32_t n = 0; n < count; n++) {
        const size_t at = (size_t)n * c->draft_block + i;
        float *logits = draft->logits + at * padded;
        const float *bias = draft->bias + n * padded;
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
    const size_t at = (size_t)block * c->draft_block, padded = eng_pad_lanes(c->vocab);

    if (probe == NULL || probe->draft == NULL) return;
    for (uint32_t i = 0; i < item->max; i++)
        probe->draft(probe->context,
                     &(struct eng_probe_rows){.session = item->session,
                                              .layer = c->layers + c->draft_stages,
                                              .first = item->session->tokens + 1 + i,
                                              .count = 1},
                     draft->tokens + at + i, draft->logits + (at + i) * padded,
                     draft->confidence + at + i);
}

static void draft_group(struct cpu_batch *batch, const struct eng_draft_item *items, uint32_t count)
{
    const struct eng_config *c = batch->config;
    const struct cpu_draft *draft = batch->draft;
    uint32_t most = 0;

    run_stages(batch, items, count);
    cpu_linear(batch, &batch->model->weights.head, batch->x, c->hidden, batch->count, draft->logits,
               eng_pad_lanes(c->vocab), false);
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
