/*
 * Mixture of experts (the model's specification, section 2.7).
 *
 * Rows of a pass are gathered by expert so that each expert's weights are read once; a row's sum
 * still runs over its experts in ascending number, the shared expert last, so who else is in the
 * pass does not show.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"

#include <math.h>
#include <string.h>

static float sqrt_softplus(float x)
{
    const double v = (double)x;
    const double softplus = v > 0 ? v + log1p(exp(-v)) : log1p(exp(v));
    return sqrtf((float)softplus);
}

/* The experts of one token, ascending, with their weights. */
static void route(const struct eng_config *c, uint32_t layer, const float *bias, float *scores,
                  uint32_t *chosen, float *weights)
{
    const uint32_t experts = cpu_experts(c, layer), active = cpu_experts_active(c, layer);
    float sum = 0;
    bool taken[1024] = {false};

    for (uint32_t e = 0; e < experts; e++)
        scores[e] = sqrt_softplus(scores[e]);
    for (uint32_t n = 0; n < active; n++) {
        uint32_t best = experts;
        for (uint32_t e = 0; e < experts; e++)
            if (!taken[e] && (best == experts || scores[e] + bias[e] > scores[best] + bias[best]))
                best = e;
        taken[best] = true;
    }
    uint32_t count = 0;
    for (uint32_t e = 0; e < experts; e++)
        if (taken[e]) {
            chosen[count] = e;
            weights[count++] = scores[e];
            sum += scores[e];
        }
    for (uint32_t n = 0; n < count; n++) {
        if (active > 1) weights[n] /= sum + 1e-20f;
        weights[n] *= c->route_scale;
    }
}

/* expert_y = expert(x) for `count` rows whose x is already quantized. */
static void run_expert(struct cpu_batch *batch, const struct eng_expert *expert, const float *x,
                       uint32_t count)
{
    const struct eng_config *c = batch->config;
    const uint32_t width = c->moe_width;

    cpu_linear(batch, &expert->w1, x, c->hidden, count, batch->expert_a, width, true);
    cpu_linear(batch, &expert->w3, x, c->hidden, count, batch->expert_b, width, true);
    for (uint32_t n = 0; n < count; n++)
        batch->kernels->gate(batch->expert_a + (size_t)n * width,
                             batch->expert_b + (size_t)n * width, width, c->swiglu_limit,
                             batch->expert_scale[n], batch->expert_h + (size_t)n * width);
    cpu_quantize(batch, batch->expert_h, (size_t)count * width, batch->expert_h);
    cpu_linear(batch, &expert->w2, batch->expert_h, width, count, batch->expert_y, c->hidden, true);
}

static void add_to(float *sum, const float *y, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        sum[i] += y[i];
}

/* Slots of `chosen` by expert; within one, rows ascend. */
static void sort_by_expert(struct cpu_batch *batch, uint32_t layer)
{
    const uint32_t experts = cpu_experts(batch->config, layer);
    const uint32_t slots = batch->count * cpu_experts_active(batch->config, layer);
    uint32_t *first = batch->expert_first;
    uint32_t at = 0;

    memset(first, 0, (experts + 1) * sizeof(*first));
    for (uint32_t i = 0; i < slots; i++)
        first[batch->chosen[i]]++;
    for (uint32_t e = 0; e <= experts; e++) {
        const uint32_t count = first[e];
        first[e] = at;
        at += count;
    }
    for (uint32_t i = 0; i < slots; i++)
        batch->expert_slot[first[batch->chosen[i]]++] = i;
    /* Each now holds where the next one begins. */
    memmove(first + 1, first, experts * sizeof(*first));
    first[0] = 0;
}

static void run_routed(struct cpu_batch *batch, uint32_t layer, uint32_t e)
{
    const struct eng_config *c = batch->config;
    const struct eng_expert *expert = &batch->model->weights.layers[layer].experts[e];
    const uint32_t active = cpu_experts_active(c, layer);
    const uint32_t *slots = batch->expert_slot + batch->expert_first[e];
    const uint32_t count = batch->expert_first[e + 1] - batch->expert_first[e];

    if (count == 0) return;
    for (uint32_t n = 0; n < count; n++) {
        const size_t row = slots[n] / active;
        memcpy(batch->expert_x + (size_t)n * c->hidden, batch->xq + row * c->hidden,
               c->hidden * sizeof(float));
        batch->expert_scale[n] = batch->chosen_weight[slots[n]];
    }
    run_expert(batch, expert, batch->expert_x, count);
    for (uint32_t n = 0; n < count; n++)
        add_to(batch->sub + (size_t)(slots[n] / active) * c->hidden,
               batch->expert_y + (size_t)n * c->hidden, c->hidden);
}

static void choose_experts(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const struct eng_probe *probe = batch->owner->probe;
    const uint32_t active = cpu_experts_active(c, layer);
    const size_t padded = eng_pad_lanes(cpu_experts(c, layer));

    cpu_linear(batch, &weights->gate, batch->x, c->hidden, batch->count, batch->gate, padded,
               false);
    for (uint32_t t = 0; t < batch->count; t++) {
        const bool image = batch->draft_ids == NULL && cpu_row_id(batch, t) == c->image_id;
        route(c, layer, image ? weights->gate_bias_vl : weights->gate_bias,
              batch->gate + t * padded, batch->chosen + (size_t)t * active,
              batch->chosen_weight + (size_t)t * active);
    }
    for (uint32_t i = 0; probe != NULL && probe->experts != NULL && i < batch->span_count; i++) {
        const struct cpu_span *span = &batch->spans[i];
        const struct eng_probe_rows rows = cpu_probe_rows(span, layer);
        const size_t at = (size_t)span->row * active;
        probe->experts(probe->context, &rows, batch->chosen + at, batch->chosen_weight + at);
    }
}

void cpu_moe(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const size_t total = (size_t)batch->count * c->hidden;

    choose_experts(batch, layer);
    sort_by_expert(batch, layer);
    cpu_quantize(batch, batch->x, total, batch->xq);
    memset(batch->sub, 0, total * sizeof(float));
    for (uint32_t e = 0; e < cpu_experts(c, layer); e++)
        run_routed(batch, layer, e);
    for (uint32_t t = 0; t < batch->count; t++)
        batch->expert_scale[t] = 1.0f;
    run_expert(batch, &weights->shared, batch->xq, batch->count);
    for (size_t i = 0; i < total; i++)
        batch->sub[i] = eng_bf16_round(batch->sub[i] + batch->expert_y[i]);
}
