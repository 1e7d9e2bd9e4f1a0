/*
 * Memory and small steps shared by the layers of the CPU backend.
 *
 * Scratch belongs to the model and is laid out once, for the rows of the largest pass; a session
 * has only its windows, tails and the encoder outputs a later pass may decode.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

struct carve {
    uint8_t *memory; /* NULL: only counts. */
    size_t used;
};

static void *take(struct carve *carve, size_t count, size_t bytes)
{
    void *part = carve->memory != NULL ? carve->memory + carve->used : NULL;
    carve->used += (size_t)kv_round_up(count * bytes, 64);
    return part;
}

static float *take_floats(struct carve *carve, size_t rows, size_t width)
{
    return take(carve, rows * width, sizeof(float));
}

static void lay_out_attention(struct carve *carve, const struct eng_config *c, size_t rows,
                              struct cpu_batch *b)
{
    const size_t width = (size_t)c->heads * c->head_dim;

    b->qr = take_floats(carve, rows, c->q_lora);
    b->qrq = take_floats(carve, rows, c->q_lora);
    b->q = take_floats(carve, rows, width);
    b->kv = take_floats(carve, rows, c->head_dim);
    b->pool_a = take_floats(carve, rows, c->head_dim);
    b->pool_b = take_floats(carve, rows, c->head_dim);
    b->latent = take_floats(carve, rows, c->head_dim);
    b->key = take_floats(carve, rows, c->index_dim);
    b->entry_row = take(carve, rows, sizeof(uint32_t));
    b->iq = take_floats(carve, rows, (size_t)c->index_heads * c->index_dim);
    b->iw = take_floats(carve, rows, eng_pad_lanes(c->index_heads));
    b->o = take_floats(carve, rows, width);
    b->oz = take_floats(carve, rows, (size_t)c->o_groups * c->o_lora);
    b->list = take(carve, rows * c->index_topk, sizeof(uint32_t));
    b->list_count = take(carve, rows, sizeof(uint32_t));
    b->blocks = take(carve, rows * c->candidate_blocks, sizeof(uint32_t));
    b->block_count = take(carve, rows, sizeof(uint32_t));
    b->rope_plain = take_floats(carve, rows, c->rope_dim);
    b->rope_yarn = take_floats(carve, rows, c->rope_dim);
    b->rope_entry = take_floats(carve, rows, c->rope_dim);
    b->tile_score = take_floats(carve, rows * c->index_heads, CPU_TILE);
    b->window = take_floats(carve, (size_t)CPU_WINDOW_SPANS * c->window + rows, c->head_dim);
    b->selected = take_floats(carve, c->index_topk, c->head_dim);
    b->tile = take_floats(carve, CPU_TILE, c->index_dim);
}

static void lay_out_moe(struct carve *carve, const struct eng_config *c, size_t rows,
                        struct cpu_batch *b)
{
    const uint32_t experts = KV_MAX(c->experts, c->draft_experts);
    const uint32_t active = KV_MAX(c->experts_active, c->draft_active);

    b->gate = take_floats(carve, rows, eng_pad_lanes(experts));
    b->chosen = take(carve, rows * active, sizeof(uint32_t));
    b->chosen_weight = take_floats(carve, rows, active);
    b->expert_slot = take(carve, rows * active, sizeof(uint32_t));
    b->expert_first = take(carve, experts + 1, sizeof(uint32_t));
    b->expert_scale = take_floats(carve, rows, 1);
    b->expert_x = take_floats(carve, rows, c->hidden);
    b->expert_a = take_floats(carve, rows, c->moe_width);
    b->expert_b = take_floats(carve, rows, c->moe_width);
    b->expert_h = take_floats(carve, rows, c->moe_width);
    b->expert_y = take_floats(carve, rows, c->hidden);
}

static void lay_out_tops(struct carve *carve, const struct eng_config *c, size_t rows,
                         struct cpu_batch *b)
{
    b->top = take(carve, rows, sizeof(*b->top));
    b->top_blocks = take(carve, rows, sizeof(*b->top_blocks));
    for (size_t t = 0; t < rows; t++) {
        float *scores = take_floats(carve, 1, c->index_topk);
        uint32_t *indices = take(carve, c->index_topk, sizeof(uint32_t));
        float *block_scores = take_floats(carve, 1, c->candidate_blocks);
        uint32_t *block_indices = take(carve, c->candidate_blocks, sizeof(uint32_t));
        if (carve->memory == NULL) continue;
        b->top[t] = (struct cpu_top){.scores = scores, .indices = indices};
        b->top_blocks[t] = (struct cpu_top){.scores = block_scores, .indices = block_indices};
    }
}

static void lay_out_draft(struct carve *carve, const struct eng_config *c, struct cpu_draft *draft)
{
    const size_t rows = (size_t)CPU_DRAFT_SESSIONS * c->draft_block;

    draft->ids = take(carve, rows, sizeof(*draft->ids));
    draft->logits = take_floats(carve, rows, eng_pad_lanes(c->vocab));
    draft->confidence = take_floats(carve, rows, 1);
    draft->tokens = take(carve, rows, sizeof(*draft->tokens));
    draft->prev = take(carve, CPU_DRAFT_SESSIONS, sizeof(*draft->prev));
    draft->embed = take_floats(carve, CPU_DRAFT_SESSIONS, c->draft_rank);
    draft->bias = take_floats(carve, CPU_DRAFT_SESSIONS, eng_pad_lanes(c->vocab));
}

static void lay_out_extras(struct carve *carve, const struct eng_config *c, size_t rows,
                           struct cpu_batch *b)
{
    struct cpu_draft parts;

    if (c->engram_count > 0) {
        b->engram_x =
            take_floats(carve, rows, (size_t)eng_config_engram_columns(c) * c->engram_dim);
        b->engram_kv = take_floats(carve, rows, (size_t)(ENG_STREAMS + 1) * c->hidden);
    }
    if (c->draft_stages == 0) return;
    b->taps = take_floats(carve, rows, (size_t)c->draft_target_count * c->hidden);
    b->draft = take(carve, 1, sizeof(*b->draft));
    lay_out_draft(carve, c, &parts);
    if (carve->memory != NULL) *b->draft = parts;
}

static size_t lay_out(const struct eng_model *model, struct cpu_batch *b, void *memory)
{
    const struct eng_config *c = &model->config;
    const size_t rows = cpu_rows_max(model);
    const size_t streams = (size_t)ENG_STREAMS * c->hidden;
    struct carve carve = {.memory = memory, .used = 0};

    b->spans = take(&carve, rows, sizeof(*b->spans));
    b->rows = take(&carve, rows, sizeof(*b->rows));
    b->encoder_streams = take_floats(&carve, rows, streams);
    b->encoder_g = take_floats(&carve, rows, ENG_STREAMS);
    b->decoder_streams = take_floats(&carve, rows, streams);
    b->decoder_g = take_floats(&carve, rows, ENG_STREAMS);
    b->mix = take(&carve, rows, sizeof(*b->mix));
    b->z = take_floats(&carve, rows, 32);
    b->x = take_floats(&carve, rows, c->hidden);
    b->xq = take_floats(&carve, rows, c->hidden);
    b->sub = take_floats(&carve, rows, c->hidden);
    lay_out_attention(&carve, c, rows, b);
    lay_out_moe(&carve, c, rows, b);
    lay_out_tops(&carve, c, rows, b);
    lay_out_extras(&carve, c, rows, b);
    b->head_x = take_floats(&carve, CPU_HEAD_ROWS, c->hidden);
    b->head_y = take_floats(&carve, CPU_HEAD_ROWS, eng_pad_lanes(c->vocab));
    b->scratch = take_floats(&carve, 1, KV_MAX(streams, KV_MAX(c->head_dim, c->index_dim)));
    return carve.used;
}

kv_status cpu_batch_init(const struct eng_model *model, struct cpu_model *own, struct kv_error *err)
{
    struct cpu_batch *batch = &own->batch;
    const size_t bytes = lay_out(model, batch, NULL);

    own->batch_memory = aligned_alloc(64, bytes);
    if (own->batch_memory == NULL)
        return KV_FAIL(err, KV_NOMEM, "scratch of %zu bytes for %u rows", bytes, model->pass_rows);
    (void)lay_out(model, batch, own->batch_memory);
    own->batch_bytes = bytes;
    batch->owner = model;
    batch->model = own;
    batch->kernels = own->kernels;
    batch->config = &model->config;
    return KV_OK;
}

static size_t lay_out_session(const struct eng_model *model, struct cpu_session *own, void *memory)
{
    const struct eng_config *c = &model->config;
    struct carve carve = {.memory = memory, .used = 0};

    (void)take(&carve, 1, sizeof(*own));
    uint8_t *state = take(&carve, 1, eng_host_bytes(model));
    uint16_t *encoded = take(&carve, (size_t)c->window * ENG_STREAMS * c->hidden, sizeof(*encoded));
    float *encoded_g = take_floats(&carve, c->window, ENG_STREAMS);
    if (own != NULL) {
        eng_host_init(&own->host, model, state);
        own->encoded = encoded;
        own->encoded_g = encoded_g;
    }
    return carve.used;
}

size_t cpu_session_bytes(const struct eng_model *model)
{
    return lay_out_session(model, NULL, NULL);
}

kv_status cpu_session_init(struct eng_session *session, void *memory, struct kv_error *err)
{
    (void)lay_out_session(session->model, memory, memory);
    return KV_OK;
}

static void make_rotations(const float *frequencies, uint32_t pairs, uint32_t position, float *row)
{
    for (uint32_t i = 0; i < pairs; i++) {
        /* The angle is an fp32 number by definition; its cos and sin are as good as we can. */
        const float angle = (float)position * frequencies[i];
        row[i] = (float)cos((double)angle);
        row[pairs + i] = (float)sin((double)angle);
    }
}

void cpu_batch_start(struct cpu_batch *batch, const struct eng_span *spans, uint32_t count)
{
    const struct eng_weights *weights = &batch->model->weights;
    const uint32_t rope = batch->config->rope_dim;

    batch->span_count = count;
    batch->count = 0;
    batch->draft_ids = NULL;
    for (uint32_t i = 0; i < count; i++) {
        struct eng_session *session = spans[i].session;
        assert(batch->count + spans[i].count <= cpu_rows_max(batch->owner));
        batch->spans[i] = (struct cpu_span){.session = session,
                                            .first = spans[i].first,
                                            .count = spans[i].count,
                                            .row = batch->count};
        for (uint32_t n = 0; n < spans[i].count; n++)
            batch->rows[batch->count++] =
                (struct cpu_row){.session = session, .position = spans[i].first + n, .span = i};
    }
    for (uint32_t t = 0; t < batch->count; t++) {
        const uint32_t position = batch->rows[t].position;
        const size_t at = (size_t)t * rope;
        make_rotations(weights->rope_plain, rope / 2, position, batch->rope_plain + at);
        make_rotations(weights->rope_yarn, rope / 2, position, batch->rope_yarn + at);
        make_rotations(weights->rope_yarn, rope / 2, position == 0 ? 0 : position - 1,
                       batch->rope_entry + at);
    }
}

struct eng_probe_rows cpu_probe_rows(const struct cpu_span *span, uint32_t layer)
{
    return (struct eng_probe_rows){
        .session = span->session, .layer = layer, .first = span->first, .count = span->count};
}

void cpu_linear(const struct cpu_batch *batch, const struct eng_matrix *matrix, const float *x,
                size_t x_stride, uint32_t rows, float *y, size_t y_stride, bool round_bf16)
{
    batch->kernels->matmul(&(struct eng_matmul_args){
        .packed = matrix->packed,
        .n = matrix->n,
        .k = matrix->k,
        .x = x,
        .x_stride = x_stride,
        .y = y,
        .y_stride = y_stride,
        .count = rows,
        .round_bf16 = round_bf16,
    });
}

void cpu_quantize(const struct cpu_batch *batch, const float *x, size_t count, float *y)
{
    if (!batch->owner->quant_off)
        batch->kernels->quantize(x, count, y);
    else if (x != y)
        memcpy(y, x, count * sizeof(*y));
}

void cpu_rotate(const struct cpu_batch *batch, const float *rotation, float *vector, uint32_t width,
                bool inverse)
{
    const uint32_t pairs = batch->config->rope_dim / 2;
    const float *cosines = rotation;
    const float *sines = cosines + pairs;
    float *v = vector + width - 2 * pairs;

    for (uint32_t i = 0; i < pairs; i++) {
        const float c = cosines[i];
        const float s = inverse ? -sines[i] : sines[i];
        const float even = v[2 * i], odd = v[2 * i + 1];
        v[2 * i] = eng_bf16_round(even * c - odd * s);
        v[2 * i + 1] = eng_bf16_round(odd * c + even * s);
    }
}
