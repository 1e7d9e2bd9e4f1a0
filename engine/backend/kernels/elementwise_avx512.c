/*
 * The inner loops for AVX-512: one vector register per 16 outputs.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define ENG_NAME(x) x##_avx512
#define ENG_ELEMENTWISE_NAME "avx512"

#define ENG_ROUNDED 1

#include "engine/backend/kernels/elementwise_body.inc"

#undef ENG_NAME
#undef ENG_ROUNDED
#define ENG_NAME(x) x##_avx512_unrounded
#define ENG_ROUNDED 0

#include "engine/backend/kernels/elementwise_body.inc"
