/*
 * Attention of one layer over a batch (the model's specification, section 2.3).
 *
 * The window rows a batch can see (those before it from the ring, its own as they are made) are
 * decoded once into consecutive floats before the ring is written, so a batch may be longer than
 * what the ring has to spare.  Every token then attends over its own slice: the result is that of
 * tokens processed one by one.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>

/* Returns the position of row 0 of batch->window. */
static uint32_t load_window(struct eng_session *session, struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const uint32_t dim = c->head_dim;
    const uint32_t reach = batch->first >= c->window - 1 ? batch->first - (c->window - 1) : 0;
    const uint32_t base = KV_MIN(KV_MAX(reach, eng_layer_first(session, layer)), batch->first);

    for (uint32_t p = base; p < batch->first; p++)
        eng_window_row_decode(eng_ring_row(session, layer, p), dim,
                              batch->window + (size_t)(p - base) * dim);
    for (uint32_t t = 0; t < batch->count; t++) {
        uint8_t *row = eng_ring_row(session, layer, batch->first + t);
        eng_window_row_encode(batch->kv + (size_t)t * dim, dim, row);
        eng_window_row_decode(row, dim, batch->window + (size_t)(batch->first + t - base) * dim);
    }
    return base;
}

static void attend(struct eng_session *session, struct cpu_batch *batch, uint32_t layer,
                   uint32_t base)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t dim = c->head_dim;
    const size_t width = (size_t)c->heads * dim;
    const float *rope = c->ratio[layer] == 0 ? batch->rope_plain : batch->rope_yarn;

    for (uint32_t t = 0; t < batch->count; t++) {
        const uint32_t position = batch->first + t;
        const uint32_t reach = position >= c->window - 1 ? position - (c->window - 1) : 0;
        const uint32_t from = KV_MAX(reach, base);
        float *o = batch->o + t * width;
        batch->kernels->attend(&(struct eng_attend_args){
            .q = batch->q + t * width,
            .heads = c->heads,
            .dim = dim,
            .scale = 1.0f / sqrtf((float)dim),
            .sink = weights->sink,
            .window = batch->window + (size_t)(from - base) * dim,
            .window_valid = position + 1 - from,
            .window_columns = c->window,
            .compressed = batch->selected + (size_t)t * c->index_topk * dim,
            .compressed_count = c->ratio[layer] == 0 ? 0 : batch->list_count[t],
            .o = o,
        });
        for (size_t i = 0; i < width; i++)
            o[i] = eng_bf16_round(o[i]);
        for (uint32_t h = 0; h < c->heads; h++)
            cpu_rotate(batch, rope, t + 1, o + (size_t)h * dim, dim, true);
    }
}

static void project_out(struct cpu_batch *batch, const struct eng_layer *weights)
{
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)c->heads * c->head_dim;
    const size_t rank = (size_t)c->o_groups * c->o_lora;
    const uint32_t group_width = (uint32_t)(width / c->o_groups);

    for (uint32_t g = 0; g < c->o_groups; g++) {
        const struct eng_matrix group = {
            .packed = weights->wo_a.packed + (size_t)g * c->o_lora * group_width,
            .n = c->o_lora,
            .k = group_width,
        };
        cpu_linear(batch, &group, batch->o + (size_t)g * group_width, width,
                   batch->oz + (size_t)g * c->o_lora, rank, true);
    }
    cpu_quantize(batch, batch->oz, rank, batch->oz);
    cpu_linear(batch, &weights->wo_b, batch->oz, rank, batch->sub, c->hidden, true);
}

void cpu_attention(struct eng_session *session, struct cpu_batch *batch, uint32_t layer,
                   bool write_rows)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const float *rope = c->ratio[layer] == 0 ? batch->rope_plain : batch->rope_yarn;
    const size_t width = (size_t)c->heads * c->head_dim;

    cpu_quantize(batch, batch->x, c->hidden, batch->xq);
    cpu_linear(batch, &weights->wq_a, batch->xq, c->hidden, batch->qrq, c->q_lora, true);
    cpu_linear(batch, &weights->wkv, batch->xq, c->hidden, batch->q, c->head_dim, true);
    for (uint32_t t = 0; t < batch->count; t++) {
        float *kv = batch->kv + (size_t)t * c->head_dim;
        batch->kernels->rms(batch->qrq + (size_t)t * c->q_lora, weights->q_norm, c->q_lora,
                            c->rms_eps, batch->qr + (size_t)t * c->q_lora);
        batch->kernels->rms(batch->q + (size_t)t * c->head_dim, weights->kv_norm, c->head_dim,
                            c->rms_eps, kv);
        cpu_rotate(batch, rope, t + 1, kv, c->head_dim, false);
    }
    cpu_quantize(batch, batch->qr, c->q_lora, batch->qrq);
    cpu_linear(batch, &weights->wq_b, batch->qrq, c->q_lora, batch->q, width, true);
    for (uint32_t t = 0; t < batch->count; t++)
        for (uint32_t h = 0; h < c->heads; h++)
            cpu_rotate(batch, rope, t + 1, batch->q + t * width + (size_t)h * c->head_dim,
                       c->head_dim, false);

    if (write_rows && eng_config_owns_rows(c, layer)) cpu_write_rows(session, batch, layer);
    if (eng_config_owns_list(c, layer)) cpu_publish_list(session, batch, layer);
    attend(session, batch, layer, load_window(session, batch, layer));
    project_out(batch, weights);
}
