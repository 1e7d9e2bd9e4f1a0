/*
 * The slab of window images: who is found, who expires, who makes room.
 *
 * Every committed slot stands on the age list, ordered by its last commit or touch.  The life of an
 * image is the same for all, so the oldest is always the first to expire: a tick looks at the head
 * only.  Demoted slots stand on a second list as well and are taken first when room is needed.
 * A free slot is all zeros: images are wiped when they are let go, so no user's window waits in
 * memory for the next tenant.
 *
 * An image that is dropped while a job reads it loses its ref at once and its bytes at the last
 * unpin: it is not found any more, yet the reader never sees it change.
 */

#include "kvstore/tier/tier_pool.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum slot_state {
    SLOT_FREE,
    SLOT_RESERVED, /* Being written. */
    SLOT_LIVE,     /* Found through its ref. */
    SLOT_DYING,    /* Dropped, still read by somebody. */
};

enum list_name { LIST_AGE, LIST_DEMOTED, LIST_COUNT };

struct links {
    uint32_t next;
    uint32_t prev;
};

struct slot {
    enum slot_state state;
    uint32_t pins;
    bool demoted;
    struct links links[LIST_COUNT]; /* LIST_AGE.next also links the free slots. */
    uint64_t generation;
    uint64_t used_ns;
    uint64_t held_ns; /* Until then it neither expires nor makes room. */
    struct kv_pool_ref *ref;
};

struct list {
    uint32_t first;
    uint32_t last;
};

/* Owned by: shard. */
struct kv_pool {
    uint8_t *base;
    uint64_t slot_bytes;
    uint64_t ttl_ns;
    uint64_t generation;
    uint32_t slot_count;
    struct slot *slots;
    uint32_t free_top;
    uint32_t free_count;
    uint32_t pinned_count; /* Slots with at least one pin. */
    struct list lists[LIST_COUNT];
    uint64_t commits, hits, evicted_capacity, evicted_expired, dropped_corrupt;
};

static void list_append(struct kv_pool *pool, enum list_name name, uint32_t slot)
{
    struct list *list = &pool->lists[name];
    pool->slots[slot].links[name] = (struct links){.next = KV_POOL_SLOT_NONE, .prev = list->last};
    if (list->last == KV_POOL_SLOT_NONE) {
        list->first = slot;
    } else {
        pool->slots[list->last].links[name].next = slot;
    }
    list->last = slot;
}

static void list_remove(struct kv_pool *pool, enum list_name name, uint32_t slot)
{
    struct list *list = &pool->lists[name];
    const struct links gone = pool->slots[slot].links[name];
    if (gone.prev == KV_POOL_SLOT_NONE) {
        list->first = gone.next;
    } else {
        pool->slots[gone.prev].links[name].next = gone.next;
    }
    if (gone.next == KV_POOL_SLOT_NONE) {
        list->last = gone.prev;
    } else {
        pool->slots[gone.next].links[name].prev = gone.prev;
    }
}

static void push_free(struct kv_pool *pool, uint32_t slot)
{
    struct slot *freed = &pool->slots[slot];
    *freed = (struct slot){.state = SLOT_FREE};
    freed->links[LIST_AGE].next = pool->free_top;
    pool->free_top = slot;
    pool->free_count++;
}

static kv_status map_slab(struct kv_pool *pool, struct kv_error *err)
{
    const uint64_t bytes = pool->slot_count * pool->slot_bytes;
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return KV_FAIL_ERRNO(err, KV_NOMEM, "pool: map %llu bytes", (unsigned long long)bytes);
    pool->base = base;
    /* Both are advice: without huge pages it is slower, without DONTDUMP a core file is bigger
     * (core files are off by default). */
    (void)madvise(base, bytes, MADV_HUGEPAGE);
    (void)madvise(base, bytes, MADV_DONTDUMP);
    return KV_OK;
}

kv_status kv_pool_create(const struct kv_pool_options *options, struct kv_pool **ret_pool,
                         struct kv_error *err)
{
    assert(options->image_bytes > 0);
    const uint64_t slot_bytes = kv_round_up(options->image_bytes, KV_IO_ALIGN);
    const uint64_t slots = options->bytes / slot_bytes;
    if (slots < 1 || slots >= KV_POOL_SLOT_NONE)
        return KV_FAIL(err, KV_INVALID,
                       "pool: %llu bytes are %llu images of %llu bytes, at least 1",
                       (unsigned long long)options->bytes, (unsigned long long)slots,
                       (unsigned long long)slot_bytes);

    struct kv_pool *pool = calloc(1, sizeof(*pool));
    if (pool == NULL) return KV_FAIL(err, KV_NOMEM, "pool: out of memory");
    kv_status status = KV_OK;
    pool->slot_bytes = slot_bytes;
    pool->slot_count = (uint32_t)slots;
    pool->ttl_ns = options->ttl_ns;
    pool->generation = options->generation_base;
    pool->free_top = KV_POOL_SLOT_NONE;
    for (int i = 0; i < LIST_COUNT; i++)
        pool->lists[i] = (struct list){KV_POOL_SLOT_NONE, KV_POOL_SLOT_NONE};
    pool->slots = calloc(slots, sizeof(*pool->slots));
    if (pool->slots == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "pool: table of %llu slots", (unsigned long long)slots);
        goto fail;
    }
    status = map_slab(pool, err);
    if (status != KV_OK) goto fail;
    /* Lowest slot on top, so that a small load touches little memory. */
    for (uint32_t slot = pool->slot_count; slot-- > 0;)
        push_free(pool, slot);
    *ret_pool = pool;
    return KV_OK;

fail:
    kv_pool_destroy(pool);
    return status;
}

void kv_pool_destroy(struct kv_pool *pool)
{
    if (pool == NULL) return;
    if (pool->base != NULL) (void)munmap(pool->base, pool->slot_count * pool->slot_bytes);
    free(pool->slots);
    free(pool);
}

static struct slot *slot_at(struct kv_pool *pool, uint32_t slot)
{
    assert(slot < pool->slot_count);
    return &pool->slots[slot];
}

uint8_t *kv_pool_bytes(struct kv_pool *pool, uint32_t slot)
{
    assert(slot < pool->slot_count);
    return pool->base + slot * pool->slot_bytes;
}

static void wipe_and_free(struct kv_pool *pool, uint32_t slot)
{
    explicit_bzero(kv_pool_bytes(pool, slot), pool->slot_bytes);
    push_free(pool, slot);
}

/* The live slot behind a ref.  A ref that names a slot which does not name it back is a bug of
 * whoever moved it without kv_pool_move. */
static struct slot *slot_of(struct kv_pool *pool, const struct kv_pool_ref *ref)
{
    struct slot *slot = slot_at(pool, ref->slot);
    assert(slot->state == SLOT_LIVE);
    assert(slot->ref == ref);
    assert(slot->generation == ref->generation);
    return slot;
}

/* Takes the image away from its ref; the bytes go now, or with the last reader. */
static void let_go(struct kv_pool *pool, struct kv_pool_ref *ref, enum kv_reason why)
{
    const uint32_t index = ref->slot;
    struct slot *slot = slot_of(pool, ref);

    list_remove(pool, LIST_AGE, index);
    if (slot->demoted) list_remove(pool, LIST_DEMOTED, index);
    *ref = (struct kv_pool_ref){.slot = KV_POOL_SLOT_NONE, .lost = why};
    if (slot->pins > 0) {
        slot->state = SLOT_DYING;
        slot->ref = NULL;
    } else {
        wipe_and_free(pool, index);
    }
}

static bool is_expired(const struct kv_pool *pool, const struct slot *slot, uint64_t now_ns)
{
    if (now_ns < slot->held_ns) return false;
    return now_ns > slot->used_ns && now_ns - slot->used_ns >= pool->ttl_ns;
}

/* Clears an expired ref.  Returns whether an image is left. */
static bool check_life(struct kv_pool *pool, struct kv_pool_ref *ref, uint64_t now_ns)
{
    if (ref->slot == KV_POOL_SLOT_NONE) return false;
    if (!is_expired(pool, slot_of(pool, ref), now_ns)) return true;
    let_go(pool, ref, KV_REASON_EXPIRED);
    pool->evicted_expired++;
    return false;
}

static uint32_t first_unpinned(const struct kv_pool *pool, enum list_name name, uint64_t now_ns)
{
    uint32_t slot = pool->lists[name].first;
    while (slot != KV_POOL_SLOT_NONE &&
           (pool->slots[slot].pins > 0 || now_ns < pool->slots[slot].held_ns))
        slot = pool->slots[slot].links[name].next;
    return slot;
}

static bool make_room(struct kv_pool *pool, uint64_t now_ns)
{
    /* Expired ones go first, under their own cause.  One that is still read frees nothing yet. */
    while (pool->free_count == 0)
        if (kv_pool_tick(pool, now_ns, 1) == 0) break;
    if (pool->free_count > 0) return true;

    uint32_t victim = first_unpinned(pool, LIST_DEMOTED, now_ns);
    if (victim == KV_POOL_SLOT_NONE) victim = first_unpinned(pool, LIST_AGE, now_ns);
    if (victim == KV_POOL_SLOT_NONE) return false;
    let_go(pool, pool->slots[victim].ref, KV_REASON_CAPACITY);
    pool->evicted_capacity++;
    return true;
}

kv_status kv_pool_reserve(struct kv_pool *pool, uint64_t now_ns, uint32_t *ret_slot)
{
    if (pool->free_count == 0 && !make_room(pool, now_ns)) return KV_BUSY;

    const uint32_t index = pool->free_top;
    struct slot *slot = slot_at(pool, index);
    assert(slot->state == SLOT_FREE);
    pool->free_top = slot->links[LIST_AGE].next;
    pool->free_count--;
    pool->pinned_count++;
    slot->state = SLOT_RESERVED;
    slot->pins = 1;
    *ret_slot = index;
    return KV_OK;
}

uint64_t kv_pool_next_generation(struct kv_pool *pool)
{
    return pool->generation++;
}

void kv_pool_commit(struct kv_pool *pool, uint32_t slot, uint64_t generation,
                    struct kv_pool_ref *ref, uint64_t now_ns)
{
    struct slot *written = slot_at(pool, slot);
    assert(written->state == SLOT_RESERVED);

    if (ref->slot != KV_POOL_SLOT_NONE) {
        written->held_ns = slot_of(pool, ref)->held_ns;
        let_go(pool, ref, KV_REASON_NONE);
    }
    written->state = SLOT_LIVE;
    written->pins = 0;
    written->generation = generation;
    written->used_ns = now_ns;
    written->ref = ref;
    pool->pinned_count--;
    pool->commits++;
    list_append(pool, LIST_AGE, slot);
    *ref = (struct kv_pool_ref){.slot = slot, .generation = generation, .lost = KV_REASON_NONE};
}

void kv_pool_cancel(struct kv_pool *pool, uint32_t slot)
{
    assert(slot_at(pool, slot)->state == SLOT_RESERVED);
    pool->pinned_count--;
    wipe_and_free(pool, slot);
}

const uint8_t *kv_pool_get(struct kv_pool *pool, struct kv_pool_ref *ref, uint64_t now_ns)
{
    if (!check_life(pool, ref, now_ns)) return NULL;

    struct slot *slot = slot_of(pool, ref);
    assert(slot->pins < UINT32_MAX);
    if (slot->pins == 0) pool->pinned_count++;
    slot->pins++;
    slot->used_ns = KV_MAX(slot->used_ns, now_ns);
    list_remove(pool, LIST_AGE, ref->slot);
    list_append(pool, LIST_AGE, ref->slot);
    if (slot->demoted) {
        list_remove(pool, LIST_DEMOTED, ref->slot);
        list_append(pool, LIST_DEMOTED, ref->slot);
    }
    pool->hits++;
    return kv_pool_bytes(pool, ref->slot);
}

void kv_pool_unpin(struct kv_pool *pool, uint32_t slot)
{
    struct slot *pinned = slot_at(pool, slot);
    assert(pinned->state == SLOT_LIVE || pinned->state == SLOT_DYING);
    assert(pinned->pins > 0);

    pinned->pins--;
    if (pinned->pins > 0) return;
    pool->pinned_count--;
    if (pinned->state == SLOT_DYING) wipe_and_free(pool, slot);
}

bool kv_pool_has(struct kv_pool *pool, struct kv_pool_ref *ref, uint64_t now_ns)
{
    return check_life(pool, ref, now_ns);
}

uint64_t kv_pool_ttl_ms(const struct kv_pool *pool, const struct kv_pool_ref *ref, uint64_t now_ns)
{
    if (ref->slot == KV_POOL_SLOT_NONE) return 0;
    assert(ref->slot < pool->slot_count);
    const struct slot *slot = &pool->slots[ref->slot];
    const uint64_t age_ns = now_ns > slot->used_ns ? now_ns - slot->used_ns : 0;
    const uint64_t held_ns = slot->held_ns > now_ns ? slot->held_ns - now_ns : 0;
    const uint64_t left_ns = age_ns < pool->ttl_ns ? pool->ttl_ns - age_ns : 0;
    return KV_MAX(left_ns, held_ns) / 1000000u;
}

void kv_pool_hold(struct kv_pool *pool, const struct kv_pool_ref *ref, uint64_t until_ns)
{
    if (ref->slot != KV_POOL_SLOT_NONE) slot_of(pool, ref)->held_ns = until_ns;
}

void kv_pool_drop(struct kv_pool *pool, struct kv_pool_ref *ref, enum kv_reason why)
{
    if (ref->slot == KV_POOL_SLOT_NONE) {
        ref->lost = why;
        return;
    }
    let_go(pool, ref, why);
    if (why == KV_REASON_CORRUPT) pool->dropped_corrupt++;
}

void kv_pool_demote(struct kv_pool *pool, struct kv_pool_ref *ref)
{
    if (ref->slot == KV_POOL_SLOT_NONE) return;
    struct slot *slot = slot_of(pool, ref);
    if (slot->demoted || slot->held_ns > slot->used_ns) return;
    slot->demoted = true;
    list_append(pool, LIST_DEMOTED, ref->slot);
}

void kv_pool_move(struct kv_pool *pool, struct kv_pool_ref *from, struct kv_pool_ref *to)
{
    if (from->slot != KV_POOL_SLOT_NONE) slot_of(pool, from)->ref = to;
    *to = *from;
    *from = (struct kv_pool_ref){.slot = KV_POOL_SLOT_NONE, .lost = KV_REASON_NEVER_STORED};
}

uint32_t kv_pool_tick(struct kv_pool *pool, uint64_t now_ns, uint32_t max)
{
    uint32_t count = 0;
    uint32_t oldest = pool->lists[LIST_AGE].first;
    while (count < max && oldest != KV_POOL_SLOT_NONE) {
        struct slot *slot = &pool->slots[oldest];
        oldest = slot->links[LIST_AGE].next;
        if (now_ns < slot->held_ns) continue; /* Few are. */
        if (check_life(pool, slot->ref, now_ns)) break;
        count++;
    }
    return count;
}

struct kv_pool_usage kv_pool_usage(const struct kv_pool *pool)
{
    const uint32_t used = pool->slot_count - pool->free_count;
    return (struct kv_pool_usage){
        .bytes_capacity = pool->slot_count * pool->slot_bytes,
        .bytes_used = used * pool->slot_bytes,
        .slots = pool->slot_count,
        .slots_used = used,
        .slots_pinned = pool->pinned_count,
        .commits = pool->commits,
        .hits = pool->hits,
        .evicted_capacity = pool->evicted_capacity,
        .evicted_expired = pool->evicted_expired,
        .dropped_corrupt = pool->dropped_corrupt,
    };
}
