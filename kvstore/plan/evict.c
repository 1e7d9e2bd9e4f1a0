/*
 * Which sessions and which of their checkpoints go, and how much.
 *
 * The reserve is a thirty-second part of the tier: at 10 GiB it is 320 MiB, some tenths of a second
 * of a fast device's writes, and deleting records takes milliseconds.
 */

#include "kvstore/plan/evict.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define RESERVE_PART 32u

uint32_t kv_evict_share(uint32_t pages_max, uint32_t users)
{
    return pages_max / KV_MAX(users, 1u);
}

struct kv_evict_rank kv_evict_rank(const struct kv_evict_facts *facts, uint32_t share)
{
    struct kv_evict_rank rank = {.kind = KV_EVICT_NEVER, .used_ms = facts->used_ms};
    if (facts->pages == 0) return rank;
    if (facts->is_in_use && !facts->is_saving) return rank;
    if (facts->is_idle) rank.held = 1;
    if (facts->is_saving) rank.held = 2;
    if (facts->is_expired && !facts->is_saving)
        rank.kind = KV_EVICT_EXPIRED;
    else
        rank.kind = facts->user_pages > share ? KV_EVICT_ABOVE_SHARE : KV_EVICT_OTHER;
    return rank;
}

bool kv_evict_before(const struct kv_evict_rank *a, const struct kv_evict_rank *b)
{
    if (a->kind != b->kind) return a->kind < b->kind;
    if (a->held != b->held) return a->held < b->held;
    return a->used_ms < b->used_ms;
}

void kv_evict_offer(struct kv_evict_list *list, const struct kv_evict_rank *rank,
                    const struct kv_session_id *session)
{
    if (rank->kind == KV_EVICT_NEVER) return;
    uint32_t at = list->count;
    while (at > 0 && kv_evict_before(rank, &list->candidates[at - 1].rank))
        at--;
    if (at == KV_EVICT_CANDIDATES_MAX) return;
    if (list->count < KV_EVICT_CANDIDATES_MAX) list->count++;
    memmove(&list->candidates[at + 1], &list->candidates[at],
            sizeof(list->candidates[0]) * (list->count - 1 - at));
    list->candidates[at] = (struct kv_evict_candidate){.rank = *rank, .session = *session};
}

bool kv_evict_leaf_before(const struct kv_evict_leaf *a, const struct kv_evict_leaf *b)
{
    if (a->is_kept || b->is_kept) return !a->is_kept;
    if (a->used_ms != b->used_ms) return a->used_ms < b->used_ms;
    return a->tokens > b->tokens;
}

uint32_t kv_evict_reserve(uint32_t limit)
{
    return limit / RESERVE_PART;
}

uint32_t kv_evict_need(const struct kv_evict_space *space)
{
    const uint32_t reserve = kv_evict_reserve(space->limit);
    const uint64_t low = (uint64_t)reserve + space->waiting;
    const uint64_t high = low + reserve / 2;
    const uint64_t kept = space->used - KV_MIN(space->freeing, space->used);
    const uint64_t have = space->limit - KV_MIN(kept, (uint64_t)space->limit);
    /* A file system that others fill can leave the tier with less than it holds. */
    const uint64_t over = kept - KV_MIN(kept, (uint64_t)space->limit);
    if (over == 0 && have >= (space->is_evicting ? high : low)) return 0;
    return (uint32_t)KV_MIN(high - KV_MIN(have, high) + over, kept);
}
