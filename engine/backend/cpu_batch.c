/*
 * Memory and small steps shared by the layers of the CPU backend.
 *
 * All scratch of a session is laid out once, for CPU_BATCH tokens: enough for a weight to be read
 * once per 16 tokens, small enough for the batch to stay in the second-level cache.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>

struct carve {
    uint8_t *memory;
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

static void lay_out_attention(struct carve *carve, const struct eng_config *c, struct cpu_batch *b)
{
    const size_t width = (size_t)c->heads * c->head_dim;

    b->qr = take_floats(carve, CPU_BATCH, c->q_lora);
    b->qrq = take_floats(carve, CPU_BATCH, c->q_lora);
    b->q = take_floats(carve, CPU_BATCH, width);
    b->kv = take_floats(carve, CPU_BATCH, c->head_dim);
    b->pool_a = take_floats(carve, CPU_BATCH, c->head_dim);
    b->pool_b = take_floats(carve, CPU_BATCH, c->head_dim);
    b->latent = take_floats(carve, CPU_BATCH, c->head_dim);
    b->key = take_floats(carve, CPU_BATCH, c->index_dim);
    b->iq = take_floats(carve, CPU_BATCH, (size_t)c->index_heads * c->index_dim);
    b->iw = take_floats(carve, CPU_BATCH, eng_pad_lanes(c->index_heads));
    b->o = take_floats(carve, CPU_BATCH, width);
    b->oz = take_floats(carve, CPU_BATCH, (size_t)c->o_groups * c->o_lora);
    b->list = take(carve, (size_t)CPU_BATCH * c->index_topk, sizeof(uint32_t));
    b->list_count = take(carve, CPU_BATCH, sizeof(uint32_t));
    b->selected = take_floats(carve, CPU_BATCH, (size_t)c->index_topk * c->head_dim);
    b->blocks = take(carve, (size_t)CPU_BATCH * c->candidate_blocks, sizeof(uint32_t));
    b->block_count = take(carve, CPU_BATCH, sizeof(uint32_t));
    b->rope_plain = take_floats(carve, CPU_BATCH + 1, c->rope_dim);
    b->rope_yarn = take_floats(carve, CPU_BATCH + 1, c->rope_dim);
    b->window = take_floats(carve, c->window + CPU_BATCH, c->head_dim);
    b->tile = take_floats(carve, CPU_TILE, c->index_dim);
    b->tile_score = take_floats(carve, (size_t)CPU_BATCH * c->index_heads, CPU_TILE);
}

static void lay_out_moe(struct carve *carve, const struct eng_config *c, struct cpu_batch *b)
{
    b->gate = take_floats(carve, CPU_BATCH, eng_pad_lanes(c->experts));
    b->chosen = take(carve, (size_t)CPU_BATCH * c->experts_active, sizeof(uint32_t));
    b->chosen_weight = take_floats(carve, CPU_BATCH, c->experts_active);
    b->expert_token = take(carve, CPU_BATCH, sizeof(uint32_t));
    b->expert_scale = take_floats(carve, CPU_BATCH, 1);
    b->expert_x = take_floats(carve, CPU_BATCH, c->hidden);
    b->expert_a = take_floats(carve, CPU_BATCH, c->moe_width);
    b->expert_b = take_floats(carve, CPU_BATCH, c->moe_width);
    b->expert_h = take_floats(carve, CPU_BATCH, c->moe_width);
    b->expert_y = take_floats(carve, CPU_BATCH, c->hidden);
}

static void lay_out_tops(struct carve *carve, const struct eng_config *c, struct cpu_batch *b)
{
    b->top = take(carve, CPU_BATCH, sizeof(*b->top));
    b->top_blocks = take(carve, CPU_BATCH, sizeof(*b->top_blocks));
    for (uint32_t t = 0; t < CPU_BATCH; t++) {
        float *scores = take_floats(carve, 1, c->index_topk);
        uint32_t *indices = take(carve, c->index_topk, sizeof(uint32_t));
        float *block_scores = take_floats(carve, 1, c->candidate_blocks);
        uint32_t *block_indices = take(carve, c->candidate_blocks, sizeof(uint32_t));
        if (carve->memory == NULL) continue;
        b->top[t] = (struct cpu_top){.scores = scores, .indices = indices};
        b->top_blocks[t] = (struct cpu_top){.scores = block_scores, .indices = block_indices};
    }
}

static size_t lay_out(const struct eng_model *model, struct cpu_session *session, void *memory)
{
    const struct eng_config *c = &model->config;
    const size_t streams = (size_t)ENG_STREAMS * c->hidden;
    struct carve carve = {.memory = memory, .used = 0};
    struct cpu_session own = {0};
    struct cpu_batch *b = &own.batch;

    (void)take(&carve, 1, sizeof(own));
    b->streams = take_floats(&carve, CPU_BATCH, streams);
    b->g = take_floats(&carve, CPU_BATCH, 4);
    b->mix = take(&carve, CPU_BATCH, sizeof(*b->mix));
    b->z = take_floats(&carve, CPU_BATCH, 32);
    b->x = take_floats(&carve, CPU_BATCH, c->hidden);
    b->xq = take_floats(&carve, CPU_BATCH, c->hidden);
    b->sub = take_floats(&carve, CPU_BATCH, c->hidden);
    lay_out_attention(&carve, c, b);
    lay_out_moe(&carve, c, b);
    lay_out_tops(&carve, c, b);
    b->scratch = take_floats(&carve, 1, KV_MAX(streams, KV_MAX(c->head_dim, c->index_dim)));
    own.encoded = take_floats(&carve, c->window, streams);
    own.encoded_g = take_floats(&carve, c->window, 4);
    if (session != NULL) *session = own;
    return carve.used;
}

size_t cpu_session_bytes(const struct eng_model *model)
{
    return lay_out(model, NULL, NULL);
}

void cpu_session_init(struct eng_session *session, void *memory)
{
    struct cpu_session *own = memory;
    const struct cpu_model *model = session->model->backend;

    (void)lay_out(session->model, own, memory);
    own->batch.model = model;
    own->batch.kernels = model->kernels;
    own->batch.config = &session->model->config;
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

void cpu_batch_start(struct cpu_batch *batch, uint32_t first, uint32_t count)
{
    const struct eng_weights *weights = &batch->model->weights;
    const uint32_t rope = batch->config->rope_dim;
    assert(count >= 1 && count <= CPU_BATCH);

    batch->first = first;
    batch->count = count;
    for (uint32_t t = 0; t <= count; t++) {
        const uint32_t position = first + t == 0 ? 0 : first + t - 1;
        make_rotations(weights->rope_plain, rope / 2, position, batch->rope_plain + t * rope);
        make_rotations(weights->rope_yarn, rope / 2, position, batch->rope_yarn + t * rope);
    }
}

void cpu_linear(const struct cpu_batch *batch, const struct eng_matrix *matrix, const float *x,
                size_t x_stride, float *y, size_t y_stride, bool round_bf16)
{
    batch->kernels->matmul(&(struct eng_matmul_args){
        .packed = matrix->packed,
        .n = matrix->n,
        .k = matrix->k,
        .x = x,
        .x_stride = x_stride,
        .y = y,
        .y_stride = y_stride,
        .count = batch->count,
        .round_bf16 = round_bf16,
    });
}

void cpu_quantize(const struct cpu_batch *batch, const float *x, size_t width, float *y)
{
    batch->kernels->quantize(x, batch->count * width, y);
}

void cpu_rotate(const struct cpu_batch *batch, const float *table, uint32_t at, float *vector,
                uint32_t width, bool inverse)
{
    const uint32_t pairs = batch->config->rope_dim / 2;
    const float *cosines = table + (size_t)at * 2 * pairs;
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
