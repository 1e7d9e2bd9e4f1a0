/*
 * Mixture of experts (the model's specification, section 2.7).
 *
 * Tokens of a batch are gathered by expert so that each expert's weights are read once; a token's
 * sum still runs over its experts in ascending number, the shared expert last, so who else is in
 * the batch does not show.
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
static void route(const struct eng_config *c, const float *bias, float *scores, uint32_t *chosen,
                  float *weights)
{
    float sum = 0;
    bool taken[1024] = {false};

    for (uint32_t e = 0; e < c->experts; e++)
        scores[e] = sqrt_softplus(scores[e]);
    for (uint32_t n = 0; n < c->experts_active; n++) {
        uint32_t best = c->experts;
        for (uint32_t e = 0; e < c->experts; e++)
            if (!taken[e] &&
                (best == c->experts || scores[e] + bias[e] > scores[best] + bias[best]))
                best = e;
        taken[best] = true;
    }
    uint32_t count = 0;
    for (uint32_t e = 0; e < c->experts; e++)
        if (taken[e]) {
            chosen[count] = e;
            weights[count++] = scores[e];
            sum += scores[e];
        }
    for (uint32_t n = 0; n < count; n++) {
        if (c->experts_active > 1) weights[n] /= sum + 1e-20f;
        weights[n] *= c->route_scale;
    }
}

/* expert_y = expert(expert_x) for `count` gathered tokens whose x is already quantized. */
static void run_expert(struct cpu_batch *batch, const struct eng_expert *expert, const float *x,
                       uint32_t count)
{
    const struct eng_config *c = batch->config;
    const struct eng_kernels *k = batch->kernels;
    struct eng_matmul_args args = {
        .packed = expert->w1.packed,
        .n = c->moe_width,
        .k = c->hidden,
        .x = x,
        .x_stride = c->hidden,
        .y = batch->expert_a,
        .y_stride = c->moe_width,
        .count = count,
        .round_bf16 = true,
    };
    k->matmul(&args);
    args.packed = expert->w3.packed;
    args.y = batch->expert_b;
    k->matmul(&args);
    for (uint32_t n = 0; n < count; n++)
        k->gate(batch->expert_a + (size_t)n * c->moe_width,
                batch->expert_b + (size_t)n * c->moe_width, c->moe_width, c->swiglu_limit,
                batch->expert_scale[n], batch->expert_h + (size_t)n * c->moe_width);
    k->quantize(batch->expert_h, (size_t)count * c->moe_width, batch->expert_h);
    k->matmul(&(struct eng_matmul_args){
        .packed = expert->w2.packed,
        .n = c->hidden,
        .k = c->moe_width,
        .x = batch->expert_h,
        .x_stride = c->moe_width,
        .y = batch->expert_y,
        .y_stride = c->hidden,
        .count = count,
        .round_bf16 = true,
    });
}

static void add_expert(struct cpu_batch *batch, uint32_t count)
{
    const uint32_t hidden = batch->config->hidden;
    for (uint32_t n = 0; n < count; n++) {
        float *sum = batch->sub + (size_t)batch->expert_token[n] * hidden;
        const float *y = batch->expert_y + (size_t)n * hidden;
        for (uint32_t i = 0; i < hidden; i++)
            sum[i] += y[i];
    }
}

static uint32_t gather(struct cpu_batch *batch, uint32_t expert)
{
    const struct eng_config *c = batch->config;
    uint32_t count = 0;
    for (uint32_t t = 0; t < batch->count; t++)
        for (uint32_t n = 0; n < c->experts_active; n++) {
            const size_t at = (size_t)t * c->experts_active + n;
            if (batch->chosen[at] != expert) continue;
            memcpy(batch->expert_x + (size_t)count * c->hidden, batch->xq + (size_t)t * c->hidden,
                   c->hidden * sizeof(float));
            batch->expert_token[count] = t;
            batch->expert_scale[count++] = batch->chosen_weight[at];
        }
    return count;
}

void cpu_moe(struct eng_session *session, struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const size_t padded = eng_pad_lanes(c->experts);
    const size_t total = (size_t)batch->count * c->hidden;

    cpu_linear(batch, &weights->gate, batch->x, c->hidden, batch->gate, padded, false);
    for (uint32_t t = 0; t < batch->count; t++) {
        const bool image = eng_run_id(session, batch->first + t) == c->image_id;
        route(c, image ? weights->gate_bias_vl : weights->gate_bias, batch->gate + t * padded,
              batch->chosen + (size_t)t * c->experts_active,
              batch->chosen_weight + (size_t)t * c->experts_active);
    }
    cpu_quantize(batch, batch->x, c->hidden, batch->xq);
    memset(batch->sub, 0, total * sizeof(float));
    for (uint32_t e = 0; e < c->experts; e++) {
        const uint32_t count = gather(batch, e);
        if (count == 0) continue;
        run_expert(batch, &weights->experts[e], batch->expert_x, count);
        add_expert(batch, count);
    }
    for (uint32_t t = 0; t < batch->count; t++) {
        batch->expert_token[t] = t;
        batch->expert_scale[t] = 1.0f;
    }
    run_expert(batch, &weights->shared, batch->xq, batch->count);
    add_expert(batch, batch->count);
    for (size_t i = 0; i < total; i++)
        batch->sub[i] = eng_bf16_round(batch->sub[i]);
}
