#pragma once

/*
 * Window images in RAM: a slab of equal slots.  Owned by: shard.
 *
 * Whoever wants to find an image again embeds a struct kv_pool_ref; the pool clears it, with the
 * cause, when it takes the slot back (expiry, or the oldest making room).  A slot handed to the
 * worker for writing, or read by a job, is pinned and is never taken.  Order of victims: demoted
 * first, then least recently used.  Life: ttl from the last commit or touch; enforced on every get,
 * not only by the tick.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/reason.h"

#include <stdbool.h>
#include <stdint.h>

#define KV_POOL_SLOT_NONE UINT32_MAX

struct kv_pool;

struct kv_pool_ref {
    uint32_t slot; /* KV_POOL_SLOT_NONE: no image. */
    uint64_t generation;
    enum kv_reason lost; /* Why none: NEVER_STORED, EXPIRED, CAPACITY, CORRUPT, LOST_NODE. */
};

struct kv_pool_options {
    uint64_t bytes;       /* Budget; slots = bytes / slot_bytes, at least 1. */
    uint32_t image_bytes; /* Rounded up to 4096 for the slot. */
    uint64_t ttl_ns;
    uint64_t generation_base; /* First generation to hand out; grows by one a commit. */
};

/* Memory is mapped here, zero pages until used (huge pages asked for, not required). */
kv_status kv_pool_create(const struct kv_pool_options *options, struct kv_pool **ret_pool,
                         struct kv_error *err) KV_MUST_CHECK;
void kv_pool_destroy(struct kv_pool *pool);

/* A pinned, empty slot to write into.  Evicts the first victim if none is free (its ref: CAPACITY).
 * KV_BUSY: every slot is pinned. */
kv_status kv_pool_reserve(struct kv_pool *pool, uint64_t now_ns, uint32_t *ret_slot) KV_MUST_CHECK;
uint8_t *kv_pool_bytes(struct kv_pool *pool, uint32_t slot);

/* Makes a reserved slot findable through ref, replacing what ref had.  Unpins.  Returns the
 * generation given to it (write it into the image's header before: kv_pool_next_generation). */
uint64_t kv_pool_next_generation(struct kv_pool *pool);
void kv_pool_commit(struct kv_pool *pool, uint32_t slot, uint64_t generation,
                    struct kv_pool_ref *ref, uint64_t now_ns);
/* Gives a reserved slot back unused. */
void kv_pool_cancel(struct kv_pool *pool, uint32_t slot);

/* The image, pinned, or NULL (expired: ref is cleared with EXPIRED).  Touches it. */
const uint8_t *kv_pool_get(struct kv_pool *pool, struct kv_pool_ref *ref, uint64_t now_ns);
void kv_pool_unpin(struct kv_pool *pool, uint32_t slot);

/* Whether get would succeed; changes nothing but an expired ref. */
bool kv_pool_has(struct kv_pool *pool, struct kv_pool_ref *ref, uint64_t now_ns);
/* Milliseconds to live; 0 when none. */
uint64_t kv_pool_ttl_ms(const struct kv_pool *pool, const struct kv_pool_ref *ref, uint64_t now_ns);

/* It neither expires nor makes room before that time, and is not demoted meanwhile; 0: no longer
 * so.  An image that replaces it is held as well. */
void kv_pool_hold(struct kv_pool *pool, const struct kv_pool_ref *ref, uint64_t until_ns);

/* Forgets the image (zeroes the slot); ref->lost = why.  A pinned slot is freed at unpin. */
void kv_pool_drop(struct kv_pool *pool, struct kv_pool_ref *ref, enum kv_reason why);
/* First in line for eviction from now on; it still serves while there. */
void kv_pool_demote(struct kv_pool *pool, struct kv_pool_ref *ref);
/* The ref's owner moves in memory: from is cleared. */
void kv_pool_move(struct kv_pool *pool, struct kv_pool_ref *from, struct kv_pool_ref *to);

/* Expires up to `max` slots that are past their time. */
uint32_t kv_pool_tick(struct kv_pool *pool, uint64_t now_ns, uint32_t max);

struct kv_pool_usage {
    uint64_t bytes_capacity, bytes_used;
    uint32_t slots, slots_used, slots_pinned;
    uint64_t commits, hits, evicted_capacity, evicted_expired, dropped_corrupt;
};
struct kv_pool_usage kv_pool_usage(const struct kv_pool *pool);
