/*
 * Admission to the engine's live slots: fewest slots first, then users in turn.
 *
 * The round needs no list of users: all waiting calls of one user carry the same number, given out
 * when the first of them came, and a higher one each time one of them is served.
 */

#include "kvstore/plan/admission.h"

#include <assert.h>
#include <string.h>

static bool goes_before(const struct kv_waiting *a, const struct kv_waiting *b)
{
    if (a->in_use != b->in_use) return a->in_use < b->in_use;
    return a->turn < b->turn;
}

uint32_t kv_admission_next(const struct kv_waiting *waiting, uint32_t count)
{
    uint32_t next = 0;
    assert(count >= 1);
    for (uint32_t i = 1; i < count; i++) {
        if (goes_before(&waiting[i], &waiting[next])) next = i;
    }
    return next;
}

static uint32_t count_of(const struct kv_waiting_queue *queue, const struct kv_user_id *user)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < queue->count; i++)
        count += kv_id_equal(queue->waiting[i].user.bytes, user->bytes) != 0;
    return count;
}

struct kv_admission kv_admission_enter(const struct kv_waiting_queue *queue,
                                       const struct kv_user_id *user)
{
    const uint32_t own = count_of(queue, user);
    uint32_t most = 0, newest = 0;

    if (own >= KV_LIVE_WAITING_PER_USER_MAX)
        return (struct kv_admission){.kind = KV_ADMISSION_USER_FULL};
    if (queue->count < KV_LIVE_WAITING_MAX) return (struct kv_admission){.kind = KV_ADMISSION_WAIT};
    for (uint32_t i = 0; i < queue->count; i++) {
        const uint32_t count = count_of(queue, &queue->waiting[i].user);
        if (count < most) continue;
        most = count;
        newest = i;
    }
    /* By two: else the one that left could come back and push this one out. */
    if (most < own + 2) return (struct kv_admission){.kind = KV_ADMISSION_FULL};
    return (struct kv_admission){.kind = KV_ADMISSION_REPLACE, .at = newest};
}

void kv_waiting_push(struct kv_waiting_queue *queue, const struct kv_user_id *user, void *call)
{
    assert(queue->count < KV_LIVE_WAITING_MAX);
    struct kv_waiting *last = &queue->waiting[queue->count];
    *last = (struct kv_waiting){.user = *user, .call = call};
    for (uint32_t i = 0; i < queue->count; i++) {
        if (kv_id_equal(queue->waiting[i].user.bytes, user->bytes))
            last->turn = queue->waiting[i].turn;
    }
    if (last->turn == 0) last->turn = ++queue->turns;
    queue->count++;
}

void *kv_waiting_take(struct kv_waiting_queue *queue, uint32_t at, bool is_served)
{
    assert(at < queue->count);
    const struct kv_waiting taken = queue->waiting[at];
    queue->count--;
    memmove(&queue->waiting[at], &queue->waiting[at + 1],
            sizeof(queue->waiting[0]) * (queue->count - at));
    if (!is_served) return taken.call;
    queue->turns++;
    for (uint32_t i = 0; i < queue->count; i++) {
        if (kv_id_equal(queue->waiting[i].user.bytes, taken.user.bytes))
            queue->waiting[i].turn = queue->turns;
    }
    return taken.call;
}

uint32_t kv_waiting_find(const struct kv_waiting_queue *queue, const void *call)
{
    uint32_t at = 0;
    while (at < queue->count && queue->waiting[at].call != call)
        at++;
    return at;
}
