/* Which segments to empty, least used first, while the others have room for what lives in them. */

#include "kvstore/plan/compact.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

static bool is_candidate(const struct kv_compact_segment *segment,
                         const struct kv_compact_options *options)
{
    if (segment->is_filling || segment->used == 0) return false;
    return (uint64_t)segment->used * 1000 < (uint64_t)segment->pages * options->below_thousandths;
}

static bool is_chosen(const uint32_t *numbers, uint32_t count, uint32_t number)
{
    for (uint32_t i = 0; i < count; i++)
        if (numbers[i] == number) return true;
    return false;
}

/* The least used one that was not chosen before; of equals the highest, so that files become empty
 * from the top. NULL: none. */
static const struct kv_compact_segment *next_best(const struct kv_compact_segment *segments,
                                                  uint32_t count,
                                                  const struct kv_compact_options *options,
                                                  const uint32_t *numbers, uint32_t chosen)
{
    const struct kv_compact_segment *best = NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (!is_candidate(&segments[i], options)) continue;
        if (is_chosen(numbers, chosen, segments[i].number)) continue;
        if (best == NULL || segments[i].used < best->used ||
            (segments[i].used == best->used && segments[i].number > best->number))
            best = &segments[i];
    }
    return best;
}

uint32_t kv_compact_choose(const struct kv_compact_segment *segments, uint32_t count,
                           const struct kv_compact_options *options,
                           uint32_t ret_numbers[KV_COMPACT_SEGMENTS_MAX])
{
    uint64_t room = 0, moved = 0;
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < count; i++) {
        assert(segments[i].used <= segments[i].pages);
        room += segments[i].pages - segments[i].used;
    }
    while (chosen < KV_COMPACT_SEGMENTS_MAX) {
        const struct kv_compact_segment *best =
            next_best(segments, count, options, ret_numbers, chosen);
        if (best == NULL) break;
        const uint32_t own = best->pages - best->used;
        if (moved + best->used + options->reserve > room - own) break;
        room -= own;
        moved += best->used;
        ret_numbers[chosen++] = best->number;
    }
    return chosen;
}

bool kv_compact_expired(uint64_t used_ms, uint64_t life_ms, uint64_t now_ms)
{
    return now_ms > used_ms && now_ms - used_ms > life_ms;
}

uint64_t kv_compact_next_ns(uint64_t next_ns, uint64_t now_ns, uint64_t bytes,
                            uint64_t bytes_per_second)
{
    assert(bytes_per_second > 0);
    const double ns = (double)bytes * 1e9 / (double)bytes_per_second;
    return KV_MAX(next_ns, now_ns) + (uint64_t)ns;
}
