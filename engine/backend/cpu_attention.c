/*
 * Attention of one layer (the model's specification, section 2.3).
 *
 * The window rows a span can see (those before it from the ring, its own as they were made) are
 * prepared once, before its own go into the ring, so a span may be longer than what the ring has to
 * spare.  Every row then attends over its own slice: the result is that of tokens processed one by
 * one.  Spans are taken in groups whose windows fit into scratch.
 *
 * Rows of a list are prepared by the thread that attends, into memory that stays in its cache; a
 * thread that meets the same list again, in the next layer, or the same entries and a few more, in
 * the next row, has them already.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>

static void show_window_row(const struct cpu_batch *batch, const struct cpu_span *span,
                            uint32_t layer, uint32_t position, const uint8_t *row)
{
    const struct eng_probe *probe = batch->owner->probe;
    if (probe == NULL || probe->window_row == NULL) return;
    const struct eng_probe_rows rows = {
        .session = span->session, .layer = layer, .first = position, .count = 1};
    probe->window_row(probe->context, &rows, row);
}

/* Oldest position a query may see: `window` back, and no further than what the session has. */
static uint32_t window_first(const struct cpu_batch *batch, const struct cpu_span *span,
                             uint32_t layer, uint32_t position)
{
    const uint32_t back = batch->config->window - 1;
    const uint32_t reach = position >= back ? position - back : 0;
    return KV_MAX(reach, KV_MIN(eng_layer_first(span->session, layer), span->first));
}

/* Where the windows of the spans from `first` on lie, as many as fit; returns where the next group
 * begins. */
static uint32_t place_group(struct cpu_batch *batch, uint32_t first, uint32_t layer)
{
    const uint32_t room = cpu_window_room(batch->owner), dim = batch->config->head_dim;
    uint32_t used = 0, i = first;

    for (; i < batch->span_count; i++) {
        struct cpu_span *span = &batch->spans[i];
        const uint32_t base = window_first(batch, span, layer, span->first);
        const uint32_t rows = span->first + span->count - base;
        if (used + rows + CPU_PACKED_PAD > room) break;
        span->window_base = base;
        span->window = (struct eng_rows){
            .memory =
                batch->window + eng_rows_bytes(used, dim, true) - eng_rows_bytes(0, dim, true),
            .capacity = rows,
            .dim = dim,
            .sliding = true,
        };
        used += rows + CPU_PACKED_PAD;
    }
    assert(i > first);
    return i;
}

/* Prepares the window of a span and writes its rows into the ring. */
static void load_window(struct cpu_batch *batch, const struct cpu_span *span, uint32_t layer,
                        struct cpu_thread *thread)
{
    const uint32_t bytes = batch->owner->layout.window_row_bytes;
    const uint8_t *own = batch->kv_packed + (size_t)span->row * bytes;
    const uint32_t ring = batch->owner->ring_rows;
    uint32_t count = 0;

    for (uint32_t p = span->window_base; p < span->first; p++)
        thread->packed[count++] = eng_ring_row(span->session, layer, p);
    for (uint32_t i = 0; i < span->count; i++)
        thread->packed[count++] = own + (size_t)i * bytes;
    batch->compute->kernels->attend->prepare(&span->window, cpu_row_kind(batch, ENG_ROW_WINDOW), 0,
                                             thread->packed, count);
    for (uint32_t i = span->count > ring ? span->count - ring : 0; i < span->count; i++)
        memcpy(eng_ring_row(span->session, layer, span->first + i), own + (size_t)i * bytes, bytes);
}

struct group {
    uint32_t layer, first; /* Number of what this part's counts begin at: a span or a row. */
};

static void load_windows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                         struct cpu_thread *thread)
{
    const struct group *group = arg;
    for (uint32_t i = group->first + first; i < group->first + last; i++)
        load_window(batch, &batch->spans[i], group->layer, thread);
}

/* Entries that the last row of t's span sees, as far as they fit into a list. */
static uint32_t entries_ahead(const struct cpu_batch *batch, uint32_t layer, uint32_t t)
{
    const struct cpu_span *span = &batch->spans[batch->rows[t].span];
    const uint32_t end = span->first + span->count;
    return KV_MIN(end / batch->config->ratio[layer], batch->config->index_topk);
}

/* Makes the thread's list rows those of row t, which has some. */
static void load_list(struct cpu_batch *batch, uint32_t layer, uint32_t t,
                      struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const struct eng_session *session = batch->rows[t].session;
    const uint32_t *list = batch->list + (size_t)t * c->index_topk;
    const uint32_t source = c->rows_source[layer];
    uint32_t count = batch->list_count[t];
    const bool all = list[count - 1] == count - 1; /* The first `count` entries. */
    const bool same = thread->list_session == session && thread->list_source == source;

    if (all && same && thread->list_number == 0 && count <= thread->list_count) return;
    if (!all && same && thread->list_number == batch->list_number && thread->list_row == t) return;
    /* The rows behind this one will want a few more of the same. */
    if (all) count = entries_ahead(batch, layer, t);
    for (uint32_t i = 0; i < count; i++)
        thread->packed[i] = cpu_entry_row(session, source, all ? i : list[i], true);
    batch->compute->kernels->attend->prepare(&thread->list, cpu_row_kind(batch, ENG_ROW_MAIN), 0,
                                             thread->packed, count);
    thread->list_session = session;
    thread->list_source = source;
    thread->list_count = count;
    thread->list_number = all ? 0 : batch->list_number;
    thread->list_row = t;
}

void cpu_attended(struct cpu_batch *batch, uint32_t layer, uint32_t t)
{
    const struct eng_config *c = batch->config;
    const float *ropes = c->ratio[layer] == 0 ? batch->rope_plain : batch->rope_yarn;
    const size_t width = (size_t)c->heads * c->head_dim;
    float *o = batch->o + t * width;

    batch->kernels->round(o, width);
    for (uint32_t h = 0; h < c->heads; h++)
        cpu_rotate(batch, ropes + (size_t)t * 2 * c->rope_dim, o + (size_t)h * c->head_dim,
                   c->head_dim, true);
}

static void attend_row(struct cpu_batch *batch, uint32_t layer, uint32_t t,
                       struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const struct cpu_row *row = &batch->rows[t];
    const struct cpu_span *span = &batch->spans[row->span];
    const size_t width = (size_t)c->heads * c->head_dim;
    const uint32_t from = window_first(batch, span, layer, row->position);
    const bool has_list = c->ratio[layer] != 0 && batch->list_count[t] > 0;

    if (has_list) load_list(batch, layer, t, thread);
    batch->compute->kernels->attend->attend(
        &(struct eng_attention_args){
            .q = batch->q + t * width,
            .heads = c->heads,
            .dim = c->head_dim,
            .scale = 1.0f / sqrtf((float)c->head_dim),
            .sink = batch->model->weights.layers[layer].sink,
            .window = &span->window,
            .window_first = from - span->window_base,
            .window_valid = row->position + 1 - from,
            .window_columns = c->window,
            .list = has_list ? &thread->list : NULL,
            .list_count = has_list ? batch->list_count[t] : 0,
            .o = batch->o + t * width,
        },
        thread->scratch);
    cpu_attended(batch, layer, t);
}

static void attend_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                        struct cpu_thread *thread)
{
    const struct group *group = arg;
    for (uint32_t t = group->first + first; t < group->first + last; t++)
        attend_row(batch, group->layer, t, thread);
}

/* Rows that follow each other share most of their list. */
static uint32_t attend_grain(const struct cpu_batch *batch, uint32_t rows)
{
    const uint32_t threads = eng_pool_threads(batch->compute->pool);
    return KV_MAX(1u, KV_MIN(8u, rows / (4 * threads)));
}

static void show_window_rows(const struct cpu_batch *batch, uint32_t layer)
{
    const uint32_t bytes = batch->owner->layout.window_row_bytes;
    for (uint32_t t = 0; t < batch->count; t++)
        show_window_row(batch, &batch->spans[batch->rows[t].span], layer, batch->rows[t].position,
                        batch->kv_packed + (size_t)t * bytes);
}

static void attend(struct cpu_batch *batch, uint32_t layer)
{
    show_window_rows(batch, layer);
    for (uint32_t first = 0; first < batch->span_count;) {
        const uint32_t end = place_group(batch, first, layer);
        const struct cpu_span *last = &batch->spans[end - 1];
        const uint32_t row = batch->spans[first].row, rows = last->row + last->count - row;
        cpu_each(batch, end - first, 1, load_windows, &(struct group){layer, first});
        cpu_each(batch, rows, attend_grain(batch, rows), attend_rows, &(struct group){layer, row});
        first = end;
    }
}

static size_t group_bytes(const struct cpu_batch *batch)
{
    const struct eng_config *c = batch->config;
    const uint32_t width = c->heads * c->head_dim / c->o_groups;
    return (size_t)kv_round_up(
        eng_compute_packed_bytes(batch->compute, cpu_rows_max(batch->owner), width), 64);
}

/* The way of what each row has read back to the streams. */
static void project_out(struct cpu_batch *batch, const struct eng_layer *weights)
{
    const struct eng_config *c = batch->config;
    const uint32_t width = c->heads * c->head_dim, group_width = width / c->o_groups;
    const uint32_t rank = c->o_groups * c->o_lora;
    struct cpu_products products = {.count = 0};
    struct eng_pack_args packs[8];
    struct eng_gemm_args gemms[8];
    struct eng_matrix groups[8];

    for (uint32_t g = 0; g < c->o_groups;) {
        uint32_t n = 0;
        for (; n < KV_ARRAY_COUNT(packs) && g < c->o_groups; n++, g++) {
            uint8_t *packed = (uint8_t *)batch->packed_o + g * group_bytes(batch);
            packs[n] = cpu_packing(batch, batch->o + (size_t)g * group_width, width, batch->count,
                                   group_width, false, packed);
            groups[n] = eng_matrix_rows(&weights->wo_a, g * c->o_lora, c->o_lora);
            gemms[n] = (struct eng_gemm_args){.matrix = &groups[n],
                                              .packed = packed,
                                              .rows = batch->count,
                                              .y = batch->oz + (size_t)g * c->o_lora,
                                              .y_stride = rank,
                                              .round_bf16 = !batch->owner->quant_off};
        }
        eng_compute_pack(batch->compute, packs, n);
        eng_compute_gemm(batch->compute, gemms, n);
    }
    packs[0] = cpu_packing(batch, batch->oz, rank, batch->count, rank, true, batch->packed_oz);
    cpu_pack(batch, packs);
    cpu_product(batch, &products, &weights->wo_b, batch->packed_oz, batch->count, batch->sub, true);
    cpu_products_run(batch, &products);
}

/* What lies between the two products of a query; and the window rows. */
static void norm_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                      struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const float *ropes = c->ratio[layer] == 0 ? batch->rope_plain : batch->rope_yarn;
    const struct eng_pack_args packing =
        cpu_packing(batch, batch->qr, c->q_lora, batch->count, c->q_lora, true, batch->packed_qr);

    for (uint32_t t = first; t < last; t++) {
        float *qr = batch->qr + (size_t)t * c->q_lora, *kv = batch->kv + (size_t)t * c->head_dim;
        batch->kernels->rms(qr, weights->q_norm, c->q_lora, c->rms_eps, qr);
        batch->kernels->rms(batch->kv_raw + (size_t)t * c->head_dim, weights->kv_norm, c->head_dim,
                            c->rms_eps, kv);
        cpu_rotate(batch, ropes + (size_t)t * 2 * c->rope_dim, kv, c->head_dim, false);
        batch->kernels->window_row(
            kv, c->head_dim, batch->kv_packed + (size_t)t * batch->owner->layout.window_row_bytes);
    }
    cpu_pack_rows(batch, &packing, first, last);
}

static void rotate_index_queries(const struct cpu_batch *batch, uint32_t t)
{
    const struct eng_config *c = batch->config;
    const uint32_t dim = c->index_dim;
    const float scale = (1.0f / sqrtf((float)dim)) * (1.0f / sqrtf((float)c->index_heads));

    for (uint32_t h = 0; h < c->index_heads; h++) {
        float *q = batch->iq + ((size_t)t * c->index_heads + h) * dim;
        cpu_rotate(batch, batch->rope_yarn + (size_t)t * 2 * c->rope_dim, q, dim, false);
        cpu_key_round(batch, q);
        batch->iw[(size_t)t * c->index_heads + h] *= scale;
    }
}

static void rotate_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                        struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg;
    const float *ropes = c->ratio[layer] == 0 ? batch->rope_plain : batch->rope_yarn;
    const size_t width = (size_t)c->heads * c->head_dim;

    for (uint32_t t = first; t < last; t++) {
        for (uint32_t h = 0; h < c->heads; h++)
            cpu_rotate(batch, ropes + (size_t)t * 2 * c->rope_dim,
                       batch->q + t * width + (size_t)h * c->head_dim, c->head_dim, false);
        if (batch->draft_ids == NULL && eng_config_owns_list(c, layer))
            rotate_index_queries(batch, t);
    }
}

void cpu_attention(struct cpu_batch *batch, uint32_t layer, bool write_rows)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const bool is_draft = batch->draft_ids != NULL;
    const bool rows = !is_draft && write_rows && eng_config_owns_rows(c, layer);
    const bool list = !is_draft && eng_config_owns_list(c, layer);
    struct cpu_products products = {.count = 0};

    cpu_product(batch, &products, &weights->wq_a, batch->packed_xq, batch->count, batch->qr, true);
    cpu_product(batch, &products, &weights->wkv, batch->packed_xq, batch->count, batch->kv_raw,
                true);
    if (rows) cpu_rows_products(batch, layer, &products);
    if (list)
        cpu_product(batch, &products, &weights->ix_proj, batch->packed_x, batch->count, batch->iw,
                    true);
    cpu_products_run(batch, &products);
    cpu_each(batch, batch->count, ENG_PACK_ROWS, norm_rows, &layer);
    cpu_product(batch, &products, &weights->wq_b, batch->packed_qr, batch->count, batch->q, true);
    if (list)
        cpu_product(batch, &products, &weights->ix_wq_b, batch->packed_qr, batch->count, batch->iq,
                    true);
    cpu_products_run(batch, &products);
    cpu_each(batch, batch->count, ENG_PACK_ROWS, rotate_rows, &layer);
    if (is_draft) {
        cpu_draft_attend(batch, layer);
    } else {
        if (rows) cpu_write_rows(batch, layer);
        if (list) cpu_publish_list(batch, layer);
        attend(batch, layer);
    }
    project_out(batch, weights);
}
