/*
 * The inner loops for whatever the compiler aims at by default; the only ones that must exist.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET
#define ENG_NAME(x) x##_base
#define ENG_ELEMENTWISE_NAME "portable"

#define ENG_ROUNDED 1

#include "engine/backend/kernels/elementwise_body.inc"

#undef ENG_NAME
#undef ENG_ROUNDED
#define ENG_NAME(x) x##_base_unrounded
#define ENG_ROUNDED 0

#include "engine/backend/kernels/elementwise_body.inc"
