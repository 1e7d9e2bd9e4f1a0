#pragma once

/* Making a trace smaller while its turns keep their classes: `scale` recorded tokens become one.
 *
 * With block 64 and scale 64 a prompt of `in` tokens becomes floor(in / 64) block tokens and the
 * tail tokens after them, its answer max(1, floor(out / 64)).  Pure; any thread. */

#include "tools/cachectl/trace_file.h"

/* KV_INVALID unless the scale divides the block length. */
KV_MUST_CHECK kv_status trace_scale_check(const struct trace_header *header, uint32_t scale,
                                          struct kv_error *err);

/* The header of the trace after scaling. */
void trace_header_scale(struct trace_header *header, uint32_t scale);

/* `before` is the header of the trace the turn is from. */
void trace_turn_scale(const struct trace_header *before, uint32_t scale, struct trace_turn *turn);
