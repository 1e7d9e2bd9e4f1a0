/*
 * The inner loops for AVX2.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET __attribute__((target("avx2")))
#define ENG_NAME(x) x##_avx2
#define ENG_ELEMENTWISE_NAME "avx2"

#define ENG_ROUNDED 1

#include "engine/backend/kernels/elementwise_body.inc"

#undef ENG_NAME
#undef ENG_ROUNDED
#define ENG_NAME(x) x##_avx2_unrounded
#define ENG_ROUNDED 0

#include "engine/backend/kernels/elementwise_body.inc"
