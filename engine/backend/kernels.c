/*
 * Instantiates the inner loops for AVX-512, AVX2 and plain x86-64 (or whatever the compiler's
 * default is) and picks at run time.
 *
 * All variants come from one body of 16-lane vector code without fused multiply-add, so they give
 * the same bits (unit test) and a session may move between machines.  Dispatch is a table handed to
 * the caller and not an ifunc: it works under sanitizers and tests can name each variant.
 */

#include "engine/backend/kernels.h"

#include "engine/model/quant.h"

#include <math.h>
#include <string.h>

#define ENG_ATTEND_BLOCK 64u

typedef float vec __attribute__((vector_size(64)));
typedef float vec_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vec_bits __attribute__((vector_size(64)));

/* Nearest even to bf16, in place. */
#define ENG_ROUND(v)                                                                               \
    do {                                                                                           \
        vec_bits bits_ = (vec_bits)(v);                                                            \
        bits_ = (bits_ + 0x7fffu + ((bits_ >> 16) & 1u)) & 0xffff0000u;                            \
        (v) = (vec)bits_;                                                                          \
    } while (0)

/* Cody-Waite reduction and a degree-6 polynomial: about 1 ulp, no fused operations. */
static inline __attribute__((always_inline)) float exp_inline(float x)
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

float eng_exp(float x)
{
    return exp_inline(x);
}

#if defined(__x86_64__)
#define ENG_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define ENG_NAME(x) x##_avx512
#define ENG_KERNELS_NAME "avx512"
#include "engine/backend/kernels_body.inc"
#undef ENG_TARGET
#undef ENG_NAME
#undef ENG_KERNELS_NAME

#define ENG_TARGET __attribute__((target("avx2")))
#define ENG_NAME(x) x##_avx2
#define ENG_KERNELS_NAME "avx2"
#include "engine/backend/kernels_body.inc"
#undef ENG_TARGET
#undef ENG_NAME
#undef ENG_KERNELS_NAME
#endif

#define ENG_TARGET
#define ENG_NAME(x) x##_base
#define ENG_KERNELS_NAME "base"
#include "engine/backend/kernels_body.inc"

const struct eng_kernels *eng_kernels_at(unsigned index)
{
    unsigned at = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && at++ == index)
        return &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && at++ == index) return &kernels_avx2;
#endif
    return at == index ? &kernels_base : NULL;
}

const struct eng_kernels *eng_kernels_best(void)
{
    return eng_kernels_at(0);
}
