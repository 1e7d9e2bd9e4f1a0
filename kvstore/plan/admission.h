#pragma once

/*
 * Admission: who gets the next live slot of the engine, and who may wait for one.
 *
 * Calls that find every slot in use wait in one bounded queue.  A slot goes to the user whose calls
 * hold the fewest; between equals, users take turns; a user's own calls go in the order they came.
 * So what one user sends, however fast, costs another at most its place behind one call of each
 * other user.
 *
 * The queue has a limit, and one for each user.  Where the whole queue is full, a call of a user
 * who has clearly fewer in it takes the place of the newest call of the user with the most, so the
 * limit keeps nobody out for what others do.
 *
 * Pure: no I/O, no clock, no allocation.  Owned by: whoever owns the slots.
 */

#include "kvstore/base/limits.h"
#include "kvstore/format/ids.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_waiting {
    struct kv_user_id user;
    uint64_t turn; /* Place of its user in the round: lower is earlier, equal for all its calls. */
    uint32_t
        in_use; /* Slots its user's calls hold; set by the caller before it asks who is next. */
    void *call;
};

/* In the order of arrival.  Starts as zeros. */
struct kv_waiting_queue {
    struct kv_waiting waiting[KV_LIVE_WAITING_MAX];
    uint32_t count;
    uint64_t turns; /* The last one given out. */
};

/* Index of the call that gets the next slot; count >= 1. */
uint32_t kv_admission_next(const struct kv_waiting *waiting, uint32_t count);

enum kv_admission_kind {
    KV_ADMISSION_WAIT,      /* There is room. */
    KV_ADMISSION_REPLACE,   /* The call at `at` has to leave, then there is. */
    KV_ADMISSION_USER_FULL, /* KV_LIVE_WAITING_PER_USER_MAX of this user wait. */
    KV_ADMISSION_FULL,      /* KV_LIVE_WAITING_MAX wait, and no other user has clearly more. */
};

struct kv_admission {
    enum kv_admission_kind kind;
    uint32_t at;
};

/* Whether one more call of this user may wait. */
struct kv_admission kv_admission_enter(const struct kv_waiting_queue *queue,
                                       const struct kv_user_id *user);

/* Behind all others, its user at the end of the round unless it is in it; there must be room. */
void kv_waiting_push(struct kv_waiting_queue *queue, const struct kv_user_id *user, void *call);
/* Returns the call at `at` and removes it.  is_served: it got a slot, so its user's others wait for
 * the next round. */
void *kv_waiting_take(struct kv_waiting_queue *queue, uint32_t at, bool is_served);
/* Its index; queue->count: it does not wait. */
uint32_t kv_waiting_find(const struct kv_waiting_queue *queue, const void *call);
