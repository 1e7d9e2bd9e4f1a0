/* How far ahead of its use space on SSD is made. */

#include "kvstore/plan/prewrite.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

enum kv_prewrite_step kv_prewrite_next(const struct kv_prewrite *state)
{
    assert(state->written <= state->free);
    assert(state->segment_pages > 0);
    const uint64_t most = (uint64_t)KV_PREWRITE_SEGMENTS * state->segment_pages;
    const uint64_t wanted = KV_MIN(KV_MAX(state->used, state->least), most);
    if (state->written < KV_MIN(wanted, (uint64_t)state->free)) return KV_PREWRITE_PAGES;
    if (state->free < wanted && state->may_make) return KV_PREWRITE_SEGMENT;
    return KV_PREWRITE_NOTHING;
}
