/*
 * The inner loops for whatever the compiler aims at by default; the only ones that must exist.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET
#define ENG_NAME(x) x##_base
#define ENG_KERNELS_NAME "portable"

#include "engine/backend/kernels_body.inc"
