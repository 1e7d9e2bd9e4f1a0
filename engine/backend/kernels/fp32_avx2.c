/*
 * The fp32 family for AVX2.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET __attribute__((target("avx2")))
#define ENG_NAME(x) x##_avx2
#define ENG_ELEMENTWISE eng_elementwise_avx2
#define ENG_ELEMENTWISE_UNROUNDED eng_elementwise_avx2_unrounded

#include "engine/backend/kernels/fp32_body.inc"
