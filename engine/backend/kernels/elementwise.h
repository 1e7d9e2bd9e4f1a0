#pragma once

/*
 * The element-wise loops, once per instruction set, all with the same bits.
 *
 * Every output element is one sum in one fixed order without fused multiply-add, so neither the
 * number of tokens in a call nor the vector width shows in a result.  Pure; any thread.
 */

#include "engine/model/quant.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENG_LANES 16u

/* One query against its keys (the model's specification, section 2.3).  Columns stand in blocks of
 * 64; a key is `dim` floats and serves as its value. */
struct eng_attend_args {
    const float *q; /* heads x dim */
    uint32_t heads;
    uint32_t dim; /* multiple of 16 */
    float scale;
    const float *sink;   /* heads */
    const float *window; /* window_valid rows, columns 0.. */
    uint32_t window_valid;
    uint32_t window_columns; /* Compressed rows begin at this column. */
    const float *compressed;
    uint32_t compressed_count;
    float *o; /* heads x dim, fp32 */
};

struct eng_elementwise_ops {
    const char *name;
    void (*attend)(const struct eng_attend_args *args);
    /* Round trip through FP8 in groups of 32 (count is a multiple of 32). */
    void (*quantize)(const float *x, size_t count, float *y);
    /* y = bf16(w x / rms(x)). */
    void (*rms)(const float *x, const float *w, size_t count, float eps, float *y);
    /* 1 / rms of x, fp32. */
    float (*rms_inverse)(const float *x, size_t count, float eps);
    /* y = bf16(sum of g[i] x[i]), 4 streams of `dim`. */
    void (*collapse)(const float *x, const float *g, size_t dim, float *y);
    /* x[j] = bf16(post[j] o + sum over i of comb[4 i + j] x[i]), in place. */
    void (*expand)(float *x, const float *o, const float *post, const float *comb, size_t dim);
    /* h = bf16(silu(min(a, limit)) clamp(b, limit) weight). */
    void (*gate)(const float *a, const float *b, size_t count, float limit, float weight, float *h);
    /* Pairs of the `count` values v, in place: rotation holds count cosines, each twice, and count
     * sines, each as -sin, sin. */
    void (*rotate)(float *v, const float *rotation, size_t count, bool inverse);
    /* x = bf16(x). */
    void (*round)(float *x, size_t count);
    /* Packed rows (quant.h). */
    void (*window_row)(const float *values, size_t count, uint8_t *row);
    void (*main_row)(const float *values, size_t count, uint8_t *row);
    void (*index_row)(const float *values, size_t count, uint8_t *row);
};

extern const struct eng_elementwise_ops eng_elementwise_avx512;
extern const struct eng_elementwise_ops eng_elementwise_avx2;
extern const struct eng_elementwise_ops eng_elementwise_base;
/* The same without a rounding anywhere: bf16(x) is x, rows are the values themselves, four bytes
 * each.  For the reference mode (eng_options.quant_off). */
extern const struct eng_elementwise_ops eng_elementwise_avx512_unrounded;
extern const struct eng_elementwise_ops eng_elementwise_avx2_unrounded;
extern const struct eng_elementwise_ops eng_elementwise_base_unrounded;

/* exp with multiply and add only, so the same bits on every machine: Cody-Waite reduction and a
 * degree-6 polynomial, about 1 ulp; 0 below -87. */
static inline __attribute__((always_inline)) float eng_exp(float x)
{
    const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    const float n = (clamped * 0x1.715476p0f + 0x1.8p23f) - 0x1.8p23f;
    const float r = (clamped - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    float p = 0x1.6c16c2p-10f;
    p = p * r + 0x1.111112p-7f;
    p = p * r + 0x1.555556p-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const float y = p * eng_float_of((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : y;
}
