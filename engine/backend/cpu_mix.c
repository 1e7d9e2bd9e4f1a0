/*
 * Single-pass hyper-connections (the model's specification, section 2.1): how a sublayer reads from
 * and writes to the four residual streams.
 *
 * A sublayer reads with the pre-mix the sublayer before it produced; its own mixes write its output
 * and hand on the next pre-mix.  comb is contracted over its first index.  All of it is per token
 * and stays fp32 until the two roundings of collapse and expand.
 */

#include "engine/backend/cpu.h"

#include <string.h>

static float sigmoid(float x)
{
    return 1.0f / (1.0f + eng_exp(-x));
}

/* Rows then columns alternate; the last step is columns. */
static void sinkhorn(float m[16], float eps, uint32_t iterations)
{
    for (uint32_t n = 0; n < iterations; n++) {
        if (n > 0)
            for (int i = 0; i < 4; i++) {
                float *row = m + 4 * i;
                const float sum = row[0] + row[1] + row[2] + row[3] + eps;
                for (int j = 0; j < 4; j++)
                    row[j] /= sum;
            }
        float sums[4];
        for (int j = 0; j < 4; j++)
            sums[j] = m[j] + m[4 + j] + m[8 + j] + m[12 + j] + eps;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++)
                m[4 * i + j] /= sums[j];
    }
}

static void finish_mix(const struct eng_hc *hc, const float *fn, float inverse, float eps,
                       uint32_t iterations, struct cpu_mix *mix)
{
    float z[24];
    for (int i = 0; i < 24; i++)
        z[i] = fn[i] * inverse * hc->scale[i < 4 ? 0 : (i < 8 ? 1 : 2)] + hc->base[i];
    for (int i = 0; i < 4; i++) {
        mix->pre[i] = sigmoid(z[i]) + eps;
        mix->post[i] = 2.0f * sigmoid(z[4 + i]);
    }
    for (int i = 0; i < 4; i++) {
        const float *row = z + 8 + 4 * i;
        float top = row[0];
        for (int j = 1; j < 4; j++)
            top = row[j] > top ? row[j] : top;
        float e[4], sum = 0;
        for (int j = 0; j < 4; j++) {
            e[j] = eng_exp(row[j] - top);
            sum += e[j];
        }
        for (int j = 0; j < 4; j++)
            mix->comb[4 * i + j] = e[j] / sum + eps;
    }
    sinkhorn(mix->comb, eps, iterations);
}

void cpu_mix(struct cpu_batch *batch, const struct eng_hc *hc)
{
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)ENG_STREAMS * c->hidden;

    cpu_linear(batch, &hc->fn, batch->streams, width, batch->count, batch->z, 32, false);
    for (uint32_t t = 0; t < batch->count; t++) {
        const float inverse =
            batch->kernels->rms_inverse(batch->streams + t * width, width, c->rms_eps);
        finish_mix(hc, batch->z + (size_t)t * 32, inverse, c->hc_eps, c->sinkhorn_iters,
                   &batch->mix[t]);
    }
}

void cpu_collapse(struct cpu_batch *batch, const float *norm)
{
    const struct eng_config *c = batch->config;
    for (uint32_t t = 0; t < batch->count; t++) {
        batch->kernels->collapse(batch->streams + (size_t)t * ENG_STREAMS * c->hidden,
                                 batch->g + (size_t)t * ENG_STREAMS, c->hidden, batch->scratch);
        batch->kernels->rms(batch->scratch, norm, c->hidden, c->rms_eps,
                            batch->x + (size_t)t * c->hidden);
    }
}

void cpu_expand(struct cpu_batch *batch)
{
    const size_t hidden = batch->config->hidden;
    for (uint32_t t = 0; t < batch->count; t++)
        batch->kernels->expand(batch->streams + t * ENG_STREAMS * hidden, batch->sub + t * hidden,
                               batch->mix[t].post, batch->mix[t].comb, hidden);
}

void cpu_hand_on(struct cpu_batch *batch)
{
    for (uint32_t t = 0; t < batch->count; t++)
        memcpy(batch->g + ENG_STREAMS * (size_t)t, batch->mix[t].pre, sizeof(batch->mix[t].pre));
}
