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

static void *take_packed(struct carve *carve, const struct eng_compute *compute, size_t rows,
                         uint32_t k)
{
    return take(carve, eng_compute_packed_bytes(compute, (uint32_t)rows, k), 1);
}

static void lay_out_attention(struct carve *carve, const struct eng_model *model, size_t rows,
                              struct cpu_batch *b)
{
    const struct eng_config *c = &model->config;
    const size_t width = (size_t)c->heads * c->head_dim;
    const size_t group_bytes =
        eng_compute_packed_bytes(b->compute, (uint32_t)rows, (uint32_t)(width / c->o_groups));

    b->qr = take_floats(carve, rows, c->q_lora);
    b->q = take_floats(carve, rows, width);
    b->kv_raw = take_floats(carve, rows, c->head_dim);
    b->kv = take_floats(carve, rows, c->head_dim);
    b->kv_packed = take(carve, rows, model->layout.window_row_bytes);
    b->pool_a = take_floats(carve, rows, c->head_dim);
    b->pool_b = take_floats(carve, rows, c->head_dim);
    b->latent = take_floats(carve, rows, c->head_dim);
    b->key = take_floats(carve, rows, c->index_dim);
    b->entry_row = take(carve, rows, sizeof(uint32_t));
    b->iq = take_floats(carve, rows, (size_t)c->index_heads * c->index_dim);
    b->iw = take_floats(carve, rows, c->index_heads);
    b->o = take_floats(carve, rows, width);
    b->oz = take_floats(carve, rows, (size_t)c->o_groups * c->o_lora);
    b->list = take(carve, rows * c->index_topk, sizeof(uint32_t));
    b->list_count = take(carve, rows, sizeof(uint32_t));
    b->blocks = take(carve, rows * c->candidate_blocks, sizeof(uint32_t));
    b->block_count = take(carve, rows, sizeof(uint32_t));
    b->packed_qr = take_packed(carve, b->compute, rows, c->q_lora);
    b->packed_latent = take_packed(carve, b->compute, rows, c->head_dim);
    b->packed_o = take(carve, c->o_groups, (size_t)kv_round_up(group_bytes, 64));
    b->packed_oz = take_packed(carve, b->compute, rows, c->o_groups * c->o_lora);
    b->rope_plain = take_floats(carve, rows, 2 * (size_t)c->rope_dim);
    b->rope_yarn = take_floats(carve, rows, 2 * (size_t)c->rope_dim);
    b->rope_entry = take_floats(carve, rows, 2 * (size_t)c->rope_dim);
    b->window = take(carve, 1, eng_rows_bytes(cpu_window_room(model), c->head_dim, true));
}

static void lay_out_moe(struct carve *carve, const struct eng_config *c, size_t rows,
                        struct cpu_batch *b)
{
    const uint32_t experts = KV_MAX(c->experts, c->draft_experts);
    const uint32_t active = KV_MAX(c->experts_active, c->draft_active);
    const size_t slots = rows * active;
    /* Each expert's slots end in a block of their own; the shared one has a slot per row. */
    const size_t packed =
        (slots / ENG_PACK_ROWS + KV_MIN(slots, experts) + 2) * ENG_PACK_ROWS + rows;

    b->gate = take_floats(carve, rows, experts);
    b->chosen = take(carve, slots, sizeof(uint32_t));
    b->chosen_weight = take_floats(carve, slots, 1);
    b->slot_of = take(carve, slots, sizeof(uint32_t));
    b->slot_row = take(carve, slots, sizeof(uint32_t));
    b->slot_weight = take_floats(carve, slots + rows, 1);
    b->expert_first = take(carve, experts + 2, sizeof(uint32_t));
    b->expert_block = take(carve, experts + 2, sizeof(uint32_t));
    b->expert_gemms = take(carve, 2 * ((size_t)experts + 1) + 1, sizeof(*b->expert_gemms));
    b->expert_packs = take(carve, (size_t)experts + 1, sizeof(*b->expert_packs));
    b->slot_a = take_floats(carve, slots + rows, c->moe_width);
    b->slot_b = take_floats(carve, slots + rows, c->moe_width);
    b->slot_y = take_floats(carve, slots + rows, c->hidden);
    b->packed_slots = take_packed(carve, b->compute, packed, c->hidden);
    b->packed_h = take_packed(carve, b->compute, packed, c->moe_width);
}

static struct cpu_top take_top(struct carve *carve, uint32_t max)
{
    const uint32_t room = 4 * max + 1;
    return (struct cpu_top){.scores = take_floats(carve, 1, room),
                            .indices = take(carve, room, sizeof(uint32_t)),
                            .order = take_floats(carve, 1, room),
                            .room = room};
}

static void lay_out_thread(struct carve *carve, const struct eng_model *model, size_t row_width,
                           struct cpu_thread *thread)
{
    const struct eng_config *c = &model->config;
    const bool sliding = c->window % 2 != 0;
    const uint32_t packed = KV_MAX(c->window + cpu_rows_max(model), c->index_topk);

    thread->row = take_floats(carve, 1, row_width);
    thread->packed = take(carve, packed, sizeof(*thread->packed));
    thread->list = (struct eng_rows){
        .memory = take(carve, 1, eng_rows_bytes(c->index_topk, c->head_dim, sliding)),
        .capacity = c->index_topk,
        .dim = c->head_dim,
        .sliding = sliding,
    };
    thread->queries =
        take(carve, 1, eng_queries_bytes(CPU_TILE_ROWS, c->index_heads, c->index_dim));
    thread->scores = take_floats(carve, CPU_TILE_ROWS, CPU_TILE_KEYS);
    thread->keys = take(carve, CPU_TILE_KEYS, sizeof(*thread->keys));
    thread->entries = take(carve, CPU_TILE_KEYS, sizeof(*thread->entries));
    for (uint32_t t = 0; t < CPU_TILE_ROWS; t++) {
        thread->top[t] = take_top(carve, c->index_topk);
        thread->blocks[t] = take_top(carve, c->candidate_blocks);
    }
}

static void lay_out_threads(struct carve *carve, const struct eng_model *model, size_t row_width,
                            struct cpu_batch *b)
{
    const uint32_t threads = eng_pool_threads(b->compute->pool);
    b->threads = take(carve, threads, sizeof(*b->threads));
    for (uint32_t i = 0; i < threads; i++) {
        struct cpu_thread thread = {.scratch = eng_compute_scratch(b->compute, i)};
        lay_out_thread(carve, model, row_width, &thread);
        if (carve->memory != NULL) b->threads[i] = thread;
    }
}

static void lay_out_draft(struct carve *carve, const struct eng_config *c,
                          const struct eng_compute *compute, struct cpu_draft *draft)
{
    const size_t rows = (size_t)CPU_DRAFT_SESSIONS * c->draft_block;

    draft->ids = take(carve, rows, sizeof(*draft->ids));
    draft->logits = take_floats(carve, rows, c->vocab);
    draft->confidence = take_floats(carve, rows, 1);
    draft->tokens = take(carve, rows, sizeof(*draft->tokens));
    draft->prev = take(carve, CPU_DRAFT_SESSIONS, sizeof(*draft->prev));
    draft->embed = take_floats(carve, CPU_DRAFT_SESSIONS, c->draft_rank);
    draft->bias = take_floats(carve, CPU_DRAFT_SESSIONS, c->vocab);
    draft->packed_embed = take_packed(carve, compute, CPU_DRAFT_SESSIONS, c->draft_rank);
    draft->packed_x = take_packed(carve, compute, rows, c->hidden);
    draft->block_rows =
        take(carve, CPU_DRAFT_SESSIONS, eng_rows_bytes(c->draft_block, c->head_dim, true));
}

static void lay_out_extras(struct carve *carve, const struct eng_config *c, size_t rows,
                           struct cpu_batch *b)
{
    struct cpu_draft parts;

    if (c->engram_count > 0) {
        const uint32_t width = eng_config_engram_columns(c) * c->engram_dim;
        b->engram_x = take_floats(carve, rows, width);
        b->engram_kv = take_floats(carve, rows, (size_t)(ENG_STREAMS + 1) * c->hidden);
        b->packed_engram = take_packed(carve, b->compute, rows, width);
    }
    if (c->draft_stages == 0) return;
    b->taps = take_floats(carve, rows, (size_t)c->draft_target_count * c->hidden);
    b->packed_taps = take_packed(carve, b->compute, rows, c->draft_target_count * c->hidden);
    b->draft = take(carve, 1, sizeof(*b->draft));
    lay_out_draft(carve, c, b->compute, &parts);
    if (carve->memory != NULL) *b->draft = parts;
}

static void lay_out_streams(struct carve *carve, const struct eng_config *c, size_t rows,
                            struct cpu_batch *b)
{
    const size_t streams = (size_t)ENG_STREAMS * c->hidden;

    b->encoder_streams = take_floats(carve, rows, streams);
    b->encoder_g = take_floats(carve, rows, ENG_STREAMS);
    b->decoder_streams = take_floats(carve, rows, streams);
    b->decoder_g = take_floats(carve, rows, ENG_STREAMS);
    b->mix = take(carve, rows, sizeof(*b->mix));
    b->z = take_floats(carve, rows, 32);
    b->inverse = take_floats(carve, rows, 1);
    b->x = take_floats(carve, rows, c->hidden);
    b->sub = take_floats(carve, rows, c->hidden);
    b->packed_streams = take_packed(carve, b->compute, rows, (uint32_t)streams);
    b->packed_x = take_packed(carve, b->compute, rows, c->hidden);
    b->packed_xq = take_packed(carve, b->compute, rows, c->hidden);
}

static size_t lay_out(const struct eng_model *model, struct cpu_batch *b, void *memory)
{
    const struct eng_config *c = &model->config;
    const size_t rows = cpu_rows_max(model);
    const size_t streams = (size_t)ENG_STREAMS * c->hidden;
    struct carve carve = {.memory = memory, .used = 0};

    b->spans = take(&carve, rows, sizeof(*b->spans));
    b->tiles = take(&carve, rows, sizeof(*b->tiles));
    b->rows = take(&carve, rows, sizeof(*b->rows));
    lay_out_streams(&carve, c, rows, b);
    lay_out_attention(&carve, model, rows, b);
    lay_out_moe(&carve, c, rows, b);
    lay_out_extras(&carve, c, rows, b);
    lay_out_threads(&carve, model, KV_MAX(streams, KV_MAX(c->head_dim, c->index_dim)), b);
    b->head_rows = take(&carve, rows, sizeof(*b->head_rows));
    b->packed_head = take_packed(&carve, b->compute, CPU_HEAD_ROWS, c->hidden);
    b->head_y = take_floats(&carve, CPU_HEAD_ROWS, c->vocab);
    return carve.used;
}

kv_status cpu_batch_init(const struct eng_model *model, struct cpu_model *own, struct kv_error *err)
{
    struct cpu_batch *batch = &own->batch;

    batch->owner = model;
    batch->model = own;
    batch->compute = &own->compute;
    batch->kernels = own->compute.kernels->elementwise;
    batch->config = &model->config;
    const size_t bytes = lay_out(model, batch, NULL);
    own->batch_memory = aligned_alloc(64, bytes);
    if (own->batch_memory == NULL)
        return KV_FAIL(err, KV_NOMEM, "scratch of %zu bytes for %u rows", bytes, model->pass_rows);
    (void)lay_out(model, batch, own->batch_memory);
    own->batch_bytes = bytes + (size_t)eng_pool_threads(own->compute.pool) * ENG_KERNEL_SCRATCH;
    return KV_OK;
}

static size_t lay_out_session(const struct eng_model *model, struct cpu_session *own, void *memory)
{
    const struct eng_config *c = &model->config;
    struct carve carve = {.memory = memory, .used = 0};

    (void)take(&carve, 1, sizeof(*own));
    uint8_t *state = take(&carve, 1, eng_host_bytes(model));
    uint8_t *encoded =
        take(&carve, (size_t)c->window * ENG_STREAMS * c->hidden, model->quant_off ? 4 : 2);
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

void cpu_rotations(const float *frequencies, uint32_t pairs, uint32_t position, float *row)
{
    for (uint32_t i = 0; i < pairs; i++) {
        /* The angle is an fp32 number by definition; its cos and sin are as good as we can. */
        const float angle = (float)position * frequencies[i];
        const float cosine = (float)cos((double)angle), sine = (float)sin((double)angle);
        row[2 * i] = row[2 * i + 1] = cosine;
        row[2 * pairs + 2 * i] = -sine;
        row[2 * pairs + 2 * i + 1] = sine;
    }
}

static void start_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                       struct cpu_thread *thread)
{
    const struct eng_weights *weights = &batch->model->weights;
    const uint32_t rope = batch->config->rope_dim;

    for (uint32_t t = first; t < last; t++) {
        const uint32_t position = batch->rows[t].position;
        const size_t at = (size_t)t * 2 * rope;
        cpu_rotations(weights->rope_plain, rope / 2, position, batch->rope_plain + at);
        cpu_rotations(weights->rope_yarn, rope / 2, position, batch->rope_yarn + at);
        cpu_rotations(weights->rope_yarn, rope / 2, position == 0 ? 0 : position - 1,
                      batch->rope_entry + at);
    }
}

static void divide_span(struct cpu_batch *batch, uint32_t i)
{
    const struct cpu_span *span = &batch->spans[i];
    for (uint32_t n = 0; n < span->count; n++)
        batch->rows[batch->count++] =
            (struct cpu_row){.session = span->session, .position = span->first + n, .span = i};
    for (uint32_t n = 0; n < span->count; n += CPU_TILE_ROWS)
        batch->tiles[batch->tile_count++] = (struct cpu_tile){
            .span = i, .row = span->row + n, .count = KV_MIN(CPU_TILE_ROWS, span->count - n)};
}

void cpu_batch_start(struct cpu_batch *batch, const struct eng_span *spans, uint32_t count)
{
    batch->span_count = count;
    batch->count = batch->tile_count = 0;
    batch->draft_ids = NULL;
    batch->is_packed = false;
    for (uint32_t i = 0; i < count; i++) {
        assert(batch->count + spans[i].count <= cpu_rows_max(batch->owner));
        batch->spans[i] = (struct cpu_span){.session = spans[i].session,
                                            .first = spans[i].first,
                                            .count = spans[i].count,
                                            .row = batch->count};
        divide_span(batch, i);
    }
    for (uint32_t i = 0; i < eng_pool_threads(batch->compute->pool); i++)
        batch->threads[i].list_session = NULL;
    cpu_each(batch, batch->count, ENG_PACK_ROWS, start_rows, NULL);
}

struct eng_probe_rows cpu_probe_rows(const struct cpu_span *span, uint32_t layer)
{
    return (struct eng_probe_rows){
        .session = span->session, .layer = layer, .first = span->first, .count = span->count};
}

/* Rows of this many values together are done before another thread has woken up. */
#define ALONE_VALUES 8192u

struct each {
    struct cpu_batch *batch;
    cpu_rows_fn *fn;
    const void *arg;
    uint32_t count, grain;
};

static void run_each(void *arg, uint32_t part, uint32_t thread)
{
    const struct each *each = arg;
    const uint32_t first = part * each->grain;
    each->fn(each->batch, each->arg, first, KV_MIN(each->count, first + each->grain),
             &each->batch->threads[thread]);
}

void cpu_each(struct cpu_batch *batch, uint32_t count, uint32_t grain, cpu_rows_fn *fn,
              const void *arg)
{
    struct each each = {.batch = batch, .fn = fn, .arg = arg, .count = count, .grain = grain};
    const uint32_t parts = (count + grain - 1) / grain;

    if (count * batch->config->hidden < ALONE_VALUES)
        eng_pool_run_alone(parts, run_each, &each);
    else
        eng_pool_run(batch->compute->pool, parts, run_each, &each);
}

struct eng_pack_args cpu_packing(const struct cpu_batch *batch, const float *x, size_t x_stride,
                                 uint32_t rows, uint32_t k, bool quantize, void *packed)
{
    return (struct eng_pack_args){.x = x,
                                  .x_stride = x_stride,
                                  .rows = rows,
                                  .k = k,
                                  .quantize = quantize && !batch->owner->quant_off,
                                  .packed = packed};
}

void cpu_pack(const struct cpu_batch *batch, const struct eng_pack_args *args)
{
    eng_compute_pack(batch->compute, args, 1);
}

void cpu_pack_rows(const struct cpu_batch *batch, const struct eng_pack_args *args, uint32_t first,
                   uint32_t last)
{
    assert(first % ENG_PACK_ROWS == 0);
    batch->compute->kernels->gemm->pack(args, first / ENG_PACK_ROWS, eng_pack_blocks(last));
}

void cpu_product(const struct cpu_batch *batch, struct cpu_products *products,
                 const struct eng_matrix *matrix, const void *packed, uint32_t rows, float *y,
                 bool round_bf16)
{
    assert(products->count < KV_ARRAY_COUNT(products->items));
    products->items[products->count++] =
        (struct eng_gemm_args){.matrix = matrix,
                               .packed = packed,
                               .rows = rows,
                               .y = y,
                               .y_stride = matrix->n,
                               .round_bf16 = round_bf16 && !batch->owner->quant_off};
}

void cpu_products_run(const struct cpu_batch *batch, struct cpu_products *products)
{
    eng_compute_gemm(batch->compute, products->items, products->count);
    products->count = 0;
}
