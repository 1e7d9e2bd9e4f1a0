/*
 * Attention of one layer (the model's specification, section 2.3).
 *
 * The window rows a span can see (those before it from the ring, its own as they are made) are
 * decoded once into consecutive floats before the ring is written, so a span may be longer than
 * what the ring has to spare.  Every row then attends over its own slice: the result is that of
 * tokens processed one by one.  Spans are taken in groups whose windows fit into scratch.
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

static void load_window(struct cpu_batch *batch, const struct cpu_span *span, uint32_t layer)
{
    const uint32_t dim = batch->config->head_dim;
    float *window = batch->window + (size_t)span->window_at * dim;
    uint32_t p = span->window_base;

    for (; p < span->first; p++, window += dim)
        cpu_window_decode(batch, eng_ring_row(span->session, layer, p), window);
    for (; p < span->first + span->count; p++, window += dim) {
        uint8_t *row = eng_ring_row(span->session, layer, p);
        cpu_window_encode(batch, batch->kv + (size_t)(span->row + p - span->first) * dim, row);
        cpu_window_decode(batch, row, window);
        show_window_row(batch, span, layer, p, row);
    }
}

/* Oldest position a query may see: `window` back, and no further than what the session has. */
static uint32_t window_first(const struct cpu_batch *batch, const struct cpu_span *span,
                             uint32_t layer, uint32_t position)
{
    const uint32_t back = batch->config->window - 1;
    const uint32_t reach = position >= back ? position - back : 0;
    return KV_MAX(reach, KV_MIN(eng_layer_first(span->session, layer), span->first));
}

/* Loads windows of the spans from `first` on, as many as fit; returns where the next group begins.
 */
static uint32_t load_group(struct cpu_batch *batch, uint32_t first, uint32_t layer)
{
    const uint32_t room = CPU_WINDOW_SPANS * batch->config->window + batch->owner->pass_rows;
    uint32_t used = 0, i = first;

    for (; i < batch->span_count; i++) {
        struct cpu_span *span = &batch->spans[i];
        const uint32_t base = window_first(batch, span, layer, span->first);
        const uint32_t rows = span->first + span->count - base;
        if (used + rows > room) break;
        span->window_base = base;
        span->window_at = used;
        used += rows;
        load_window(batch, span, layer);
    }
    assert(i > first);
    return i;
}

static uint32_t load_selected(struct cpu_batch *batch, uint32_t layer, uint32_t t)
{
    const struct eng_config *c = batch->config;
    const uint32_t *list = batch->list + (size_t)t * c->index_topk;

    if (c->ratio[layer] == 0) return 0;
    for (uint32_t i = 0; i < batch->list_count[t]; i++)
        cpu_main_decode(batch,
                        cpu_entry_row(batch->rows[t].session, c->rows_source[layer], list[i], true),
                        batch->selected + (size_t)i * c->head_dim);
    return batch->list_count[t];
}

static void attend_row(struct cpu_batch *batch, uint32_t layer, uint32_t t)
{
    const struct eng_config *c = batch->config;
    const struct cpu_row *row = &batch->rows[t];
    const struct cpu_span *span = &batch->spans[row->span];
    const uint32_t dim = c->head_dim;
    const size_t width = (size_t)c->heads * dim;
    const uint32_t from = window_first(batch, span, layer, row->position);
    const size_t window_row = span->window_at + (from - span->window_base);

    const uint32_t selected = load_selected(batch, layer, t);
    batch->kernels->attend(&(struct eng_attend_args){
        .q = batch->q + t * width,
        .heads = c->heads,
        .dim = dim,
        .scale = 1.0f / sqrtf((float)dim),
        .sink = batch->model->weights.layers[layer].sink,
        .window = batch->window + window_row * dim,
        .window_valid = row->position + 1 - from,
        .window_columns = c->window,
        .compressed = batch->selected,
        .compressed_count = selected,
        .o = batch->o + t * width,
    });
}

static void attend(struct cpu_batch *batch, uint32_t layer)
{
    for (uint32_t first = 0; first < batch->span_count;) {
        const uint32_t end = load_group(batch, first, layer);
        const struct cpu_span *last = &batch->spans[end - 1];
        for (uint32_t t = batch->spans[first].row; t < last->row + last->count; t++)
            attend_row(batch, layer, t);
        first = end;
    }
}

/* The inverse rotation of what each row has read, and the way back to the streams. */
static void project_out(struct cpu_batch *batch, const struct eng_layer *weights,
                        const float *ropes)
{
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)c->heads * c->head_dim;
    const size_t rank = (size_t)c->o_groups * c->o_lora;
    const uint32_t group_width = (uint32_t)(width / c->o_groups);

    for (uint32_t t = 0; t < batch->count; t++) {
        float *o = batch->o + t * width;
        for (size_t i = 0; i < width; i++)
            o[i] = eng_bf16_round(o[i]);
        for (uint32_t h = 0; h < c->heads; h++)
            cpu_rotate(batch, ropes + (size_t)t * c->rope_dim, o + (size_t)h * c->head_dim,
                       c->head_dim, true);
    }
    for (uint32_t g = 0; g < c->o_groups; g++) {
        const struct eng_matrix group = {
            .packed = weights->wo_a.packed + (size_t)g * c->o_lora * group_width,
            .n = c->o_lora,
            .k = group_width,
        };
        cpu_linear(batch, &group, batch->o + (size_t)g * group_width, width, batch->count,
                   batch->oz + (size_t)g * c->o_lora, rank, true);
    }
    cpu_quantize(batch, batch->oz, batch->count * rank, batch->oz);
    cpu_linear(batch, &weights->wo_b, batch->oz, rank, batch->count, batch->sub, c->hidden, true);
}

static void make_queries(struct cpu_batch *batch, const struct eng_layer *weights,
                         const float *ropes)
{
    const struct eng_config *c = batch->config;
    const uint32_t count = batch->count;
    const size_t width = (size_t)c->heads * c->head_dim;

    cpu_quantize(batch, batch->x, (size_t)count * c->hidden, batch->xq);
    cpu_linear(batch, &weights->wq_a, batch->xq, c->hidden, count, batch->qrq, c->q_lora, true);
    cpu_linear(batch, &weights->wkv, batch->xq, c->hidden, count, batch->q, c->head_dim, true);
    for (uint32_t t = 0; t < count; t++) {
        float *kv = batch->kv + (size_t)t * c->head_dim;
        batch->kernels->rms(batch->qrq + (size_t)t * c->q_lora, weights->q_norm, c->q_lora,
                            c->rms_eps, batch->qr + (size_t)t * c->q_lora);
        batch->kernels->rms(batch->q + (size_t)t * c->head_dim, weights->kv_norm, c->head_dim,
                            c->rms_eps, kv);
        cpu_rotate(batch, ropes + (size_t)t * c->rope_dim, kv, c->head_dim, false);
    }
    cpu_quantize(batch, batch->qr, (size_t)count * c->q_lora, batch->qrq);
    cpu_linear(batch, &weights->wq_b, batch->qrq, c->q_lora, count, batch->q, width, true);
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t h = 0; h < c->heads; h++)
            cpu_rotate(batch, ropes + (size_t)t * c->rope_dim,
                       batch->q + t * width + (size_t)h * c->head_dim, c->head_dim, false);
}

void cpu_attention(struct cpu_batch *batch, uint32_t layer, bool write_rows)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];

    const float *ropes = c->ratio[layer] == 0 ? batch->rope_plain : batch->rope_yarn;

    make_queries(batch, weights, ropes);
    if (batch->draft_ids != NULL) {
        cpu_draft_attend(batch, layer);
    } else {
        if (write_rows && eng_config_owns_rows(c, layer)) cpu_write_rows(batch, layer);
        if (eng_config_owns_list(c, layer)) cpu_publish_list(batch, layer);
        attend(batch, layer);
    }
    project_out(batch, weights, ropes);
}
