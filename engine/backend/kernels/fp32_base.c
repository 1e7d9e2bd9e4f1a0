/*
 * The fp32 family for whatever the compiler aims at by default; the only one that must exist.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET
#define ENG_NAME(x) x##_base
#define ENG_ELEMENTWISE eng_elementwise_base
#define ENG_ELEMENTWISE_UNROUNDED eng_elementwise_base_unrounded

#include "engine/backend/kernels/fp32_body.inc"
