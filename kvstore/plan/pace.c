/*
 * Pace of work in the background: the time of the next unit, moved on by what each unit costs.
 */

#include "kvstore/plan/pace.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

#define SECOND_NS 1000000000ull

bool kv_pace_take(struct kv_pace *pace, uint64_t now_ns, uint32_t bytes)
{
    assert(pace->rate_bytes > 0);
    if (now_ns < pace->next_ns) return false;
    const uint64_t oldest = now_ns < KV_PACE_CATCH_UP_NS ? 0 : now_ns - KV_PACE_CATCH_UP_NS;
    pace->next_ns = KV_MAX(pace->next_ns, oldest) + bytes * SECOND_NS / pace->rate_bytes;
    return true;
}

uint64_t kv_pace_wait_ns(const struct kv_pace *pace, uint64_t now_ns)
{
    return now_ns < pace->next_ns ? pace->next_ns - now_ns : 0;
}

uint32_t kv_pace_depth(uint32_t depth_max, uint32_t others)
{
    return others == 0 ? depth_max : KV_MIN(depth_max, KV_PACE_DEPTH_BUSY);
}
