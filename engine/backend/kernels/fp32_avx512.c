/*
 * The fp32 family for AVX-512: one vector register per 16 outputs.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define ENG_NAME(x) x##_avx512
#define ENG_ELEMENTWISE eng_elementwise_avx512
#define ENG_ELEMENTWISE_UNROUNDED eng_elementwise_avx512_unrounded

#include "engine/backend/kernels/fp32_body.inc"
