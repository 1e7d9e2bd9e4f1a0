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

/* The streams of rows [first, last) as products take them, and their rms. */
static void pack_streams(struct cpu_batch *batch, uint32_t first, uint32_t last)
{
    const uint32_t width = ENG_STREAMS * batch->config->hidden;
    const struct eng_pack_args packing = cpu_packing(batch, batch->streams, width, batch->count,
                                                     width, false, batch->packed_streams);
    for (uint32_t t = first; t < last; t++)
        batch->inverse[t] = batch->kernels->rms_inverse(batch->streams + (size_t)t * width, width,
                                                        batch->config->rms_eps);
    cpu_pack_rows(batch, &packing, first, last);
}

static void prepare_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                         struct cpu_thread *thread)
{
    pack_streams(batch, first, last);
}

struct reading {
    const struct eng_hc *hc;
    const float *norm;
};

static void read_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                      struct cpu_thread *thread)
{
    const struct reading *reading = arg;
    const struct eng_config *c = batch->config;
    const struct eng_pack_args plain =
        cpu_packing(batch, batch->x, c->hidden, batch->count, c->hidden, false, batch->packed_x);
    const struct eng_pack_args quantized =
        cpu_packing(batch, batch->x, c->hidden, batch->count, c->hidden, true, batch->packed_xq);

    for (uint32_t t = first; t < last; t++) {
        if (reading->hc != NULL)
            finish_mix(reading->hc, batch->z + (size_t)t * 24, batch->inverse[t], c->hc_eps,
                       c->sinkhorn_iters, &batch->mix[t]);
        batch->kernels->collapse(batch->streams + (size_t)t * ENG_STREAMS * c->hidden,
                                 batch->g + (size_t)t * ENG_STREAMS, c->hidden, thread->row);
        batch->kernels->rms(thread->row, reading->norm, c->hidden, c->rms_eps,
                            batch->x + (size_t)t * c->hidden);
    }
    cpu_pack_rows(batch, &plain, first, last);
    cpu_pack_rows(batch, &quantized, first, last);
}

void cpu_read(struct cpu_batch *batch, const struct eng_hc *hc, const float *norm)
{
    const struct reading reading = {hc, norm};
    struct cpu_products products = {.count = 0};

    if (hc != NULL) {
        if (!batch->is_packed) cpu_each(batch, batch->count, ENG_PACK_ROWS, prepare_rows, NULL);
        cpu_product(batch, &products, &hc->fn, batch->packed_streams, batch->count, batch->z,
                    false);
        cpu_products_run(batch, &products);
    }
    cpu_each(batch, batch->count, ENG_PACK_ROWS, read_rows, &reading);
}

static void write_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                       struct cpu_thread *thread)
{
    const bool moe = *(const bool *)arg;
    const uint32_t hidden = batch->config->hidden;

    for (uint32_t t = first; t < last; t++) {
        float *sub = moe ? thread->row : batch->sub + (size_t)t * hidden;
        if (moe) cpu_moe_sum(batch, t, sub);
        batch->kernels->expand(batch->streams + (size_t)t * ENG_STREAMS * hidden, sub,
                               batch->mix[t].post, batch->mix[t].comb, hidden);
        memcpy(batch->g + ENG_STREAMS * (size_t)t, batch->mix[t].pre, sizeof(batch->mix[t].pre));
    }
    pack_streams(batch, first, last);
}

void cpu_write(struct cpu_batch *batch, bool moe)
{
    cpu_each(batch, batch->count, ENG_PACK_ROWS, write_rows, &moe);
    batch->is_packed = true;
}
