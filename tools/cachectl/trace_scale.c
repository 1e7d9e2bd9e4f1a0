/*
 * Scaling of a trace.
 *
 * What must survive is where each prompt joins the stored history, and that is a number of whole
 * blocks; so the block tokens shrink and the block ids stay.  The tail tokens are kept as they are,
 * because "the last 2 prompt tokens never come back" is what keeps a checkpoint at the literal end
 * of a prompt from ever matching.  The part of a block before them falls away: a block token stands
 * for it in the next prompt, if anything does.
 */

#include "tools/cachectl/trace_scale.h"

#include <assert.h>

kv_status trace_scale_check(const struct trace_header *header, uint32_t scale, struct kv_error *err)
{
    if (scale == 0 || header->block_tokens % scale != 0)
        return KV_FAIL(err, KV_INVALID, "scale %u does not divide the block length %u", scale,
                       header->block_tokens);
    return KV_OK;
}

void trace_header_scale(struct trace_header *header, uint32_t scale)
{
    assert(scale > 0);
    assert(header->block_tokens % scale == 0);

    header->block_tokens /= scale;
    header->scale *= scale;
}

static uint32_t rest_scaled(const struct trace_header *before, uint32_t scale, uint32_t rest)
{
    /* In a trace without a known tail the part of a block is what remains. */
    return before->tail_tokens > 0 ? before->tail_tokens : (rest + scale - 1) / scale;
}

void trace_turn_scale(const struct trace_header *before, uint32_t scale, struct trace_turn *turn)
{
    const uint32_t kept = trace_turn_kept_blocks(before, turn);
    const uint32_t blocks = kept + turn->ids.block_count;
    const uint32_t block_tokens = before->block_tokens / scale;

    assert(scale > 0);
    assert(before->block_tokens % scale == 0);
    assert((uint64_t)blocks * before->block_tokens <= turn->in_tokens);

    if (scale == 1) return;
    const uint32_t rest = turn->in_tokens - blocks * before->block_tokens;
    turn->keep_tokens = kept * block_tokens;
    turn->in_tokens = blocks * block_tokens + rest_scaled(before, scale, rest);
    turn->out_tokens /= scale;
    if (turn->out_tokens == 0) turn->out_tokens = 1;
    turn->sys_tokens /= scale;
}
