/*
 * The arena of pages of rows, and who may lose one.
 *
 * Every slot is in exactly one state, told by its pins and its owner: pinned (pins > 0), cached
 * (no pin, an owner; on the list, least recently unpinned first) or free (neither; on the stack of
 * free slots).  A free slot is all zeros: bytes are wiped when a slot is freed or evicted and not
 * when it is handed out, so no user's rows wait in memory for the next tenant, and alloc is cheap
 * while free slots last.  One that is evicted for a page about to be read is not wiped: nobody but
 * the reader knows the slot until the page in it was verified, and what is given back unread is
 * wiped then.  All memory is mapped at creation.
 */

#include "kvstore/tier/tier_hbm.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct slot {
    uint32_t pins;
    uint32_t owner;
    uint32_t next; /* On the list of cached slots, or on the stack of free ones. */
    uint32_t prev; /* Cached only. */
    bool free;
};

/* Owned by: shard. */
struct kv_hbm {
    uint8_t *base;
    uint64_t map_bytes;
    uint32_t page_bytes;
    uint32_t slot_count;
    struct slot *slots;
    uint32_t free_top;
    uint32_t cached_first; /* The next victim. */
    uint32_t cached_last;
    uint32_t free_count;
    uint32_t cached_count;
    uint64_t evictions;
    kv_hbm_evict_fn *evicted;
    void *context;
};

static kv_status map_arena(struct kv_hbm *hbm, struct kv_error *err)
{
    void *base =
        mmap(NULL, hbm->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return KV_FAIL_ERRNO(err, KV_NOMEM,
                             "hbm.bytes: no memory for %llu bytes; set a smaller one",
                             (unsigned long long)hbm->map_bytes);
    hbm->base = base;
    /* Both are advice: without huge pages it is slower, without DONTDUMP a core file is bigger
     * (core files are off by default). */
    (void)madvise(base, hbm->map_bytes, MADV_HUGEPAGE);
    (void)madvise(base, hbm->map_bytes, MADV_DONTDUMP);
    return KV_OK;
}

static void push_free(struct kv_hbm *hbm, uint32_t slot)
{
    hbm->slots[slot] = (struct slot){
        .owner = KV_HBM_OWNER_NONE,
        .next = hbm->free_top,
        .prev = KV_HBM_SLOT_NONE,
        .free = true,
    };
    hbm->free_top = slot;
    hbm->free_count++;
}

kv_status kv_hbm_create(const struct kv_hbm_options *options, struct kv_hbm **ret_hbm,
                        struct kv_error *err)
{
    assert(options->page_bytes > 0);
    const uint64_t slots = options->bytes / options->page_bytes;
    if (slots < 2 || slots >= KV_HBM_SLOT_NONE)
        return KV_FAIL(err, KV_INVALID, "hbm: %llu bytes are %llu pages of %u bytes, at least 2",
                       (unsigned long long)options->bytes, (unsigned long long)slots,
                       options->page_bytes);

    struct kv_hbm *hbm = calloc(1, sizeof(*hbm));
    if (hbm == NULL) return KV_FAIL(err, KV_NOMEM, "hbm: out of memory");
    kv_status status = KV_OK;
    hbm->page_bytes = options->page_bytes;
    hbm->slot_count = (uint32_t)slots;
    hbm->map_bytes = slots * options->page_bytes;
    hbm->evicted = options->evicted;
    hbm->context = options->context;
    hbm->free_top = KV_HBM_SLOT_NONE;
    hbm->cached_first = KV_HBM_SLOT_NONE;
    hbm->cached_last = KV_HBM_SLOT_NONE;
    hbm->slots = calloc(slots, sizeof(*hbm->slots));
    if (hbm->slots == NULL) {
        status =
            KV_FAIL(err, KV_NOMEM,
                    "hbm.bytes = %llu: no memory for the table of its %llu pages (%llu bytes); "
                    "set a smaller one",
                    (unsigned long long)options->bytes, (unsigned long long)slots,
                    (unsigned long long)(slots * sizeof(*hbm->slots)));
        goto fail;
    }
    status = map_arena(hbm, err);
    if (status != KV_OK) goto fail;
    /* Lowest slot on top, so that a small load touches little memory. */
    for (uint32_t slot = hbm->slot_count; slot-- > 0;)
        push_free(hbm, slot);
    *ret_hbm = hbm;
    return KV_OK;

fail:
    kv_hbm_destroy(hbm);
    return status;
}

void kv_hbm_destroy(struct kv_hbm *hbm)
{
    if (hbm == NULL) return;
    if (hbm->base != NULL) (void)munmap(hbm->base, hbm->map_bytes);
    free(hbm->slots);
    free(hbm);
}

static bool is_cached(const struct slot *slot)
{
    return !slot->free && slot->pins == 0;
}

static void cached_append(struct kv_hbm *hbm, uint32_t slot)
{
    hbm->slots[slot].prev = hbm->cached_last;
    hbm->slots[slot].next = KV_HBM_SLOT_NONE;
    if (hbm->cached_last == KV_HBM_SLOT_NONE) {
        hbm->cached_first = slot;
    } else {
        hbm->slots[hbm->cached_last].next = slot;
    }
    hbm->cached_last = slot;
    hbm->cached_count++;
}

static void cached_remove(struct kv_hbm *hbm, uint32_t slot)
{
    const struct slot *gone = &hbm->slots[slot];
    if (gone->prev == KV_HBM_SLOT_NONE) {
        hbm->cached_first = gone->next;
    } else {
        hbm->slots[gone->prev].next = gone->next;
    }
    if (gone->next == KV_HBM_SLOT_NONE) {
        hbm->cached_last = gone->prev;
    } else {
        hbm->slots[gone->next].prev = gone->prev;
    }
    hbm->cached_count--;
}

static void wipe_and_free(struct kv_hbm *hbm, uint32_t slot)
{
    explicit_bzero(kv_hbm_bytes(hbm, slot), hbm->page_bytes);
    push_free(hbm, slot);
}

static void evict_first(struct kv_hbm *hbm, bool wipe)
{
    const uint32_t slot = hbm->cached_first;
    const uint32_t owner = hbm->slots[slot].owner;

    cached_remove(hbm, slot);
    if (wipe)
        wipe_and_free(hbm, slot);
    else
        push_free(hbm, slot); /* Taken from there at once. */
    hbm->evictions++;
    if (hbm->evicted != NULL) hbm->evicted(hbm->context, owner, slot);
}

static kv_status alloc(struct kv_hbm *hbm, bool wipe, uint32_t *ret_slot)
{
    if (hbm->free_count == 0) {
        if (hbm->cached_count == 0) return KV_BUSY;
        evict_first(hbm, wipe);
    }
    const uint32_t slot = hbm->free_top;
    assert(hbm->slots[slot].free);

    hbm->free_top = hbm->slots[slot].next;
    hbm->free_count--;
    hbm->slots[slot] = (struct slot){
        .pins = 1,
        .owner = KV_HBM_OWNER_NONE,
        .next = KV_HBM_SLOT_NONE,
        .prev = KV_HBM_SLOT_NONE,
    };
    *ret_slot = slot;
    return KV_OK;
}

kv_status kv_hbm_alloc(struct kv_hbm *hbm, uint32_t *ret_slot)
{
    return alloc(hbm, true, ret_slot);
}

kv_status kv_hbm_alloc_to_read(struct kv_hbm *hbm, uint32_t *ret_slot)
{
    return alloc(hbm, false, ret_slot);
}

uint32_t kv_hbm_available(const struct kv_hbm *hbm)
{
    return hbm->free_count + hbm->cached_count;
}

uint8_t *kv_hbm_bytes(struct kv_hbm *hbm, uint32_t slot)
{
    assert(slot < hbm->slot_count);
    return hbm->base + (uint64_t)slot * hbm->page_bytes;
}

uint8_t *kv_hbm_base(struct kv_hbm *hbm, uint64_t *ret_bytes)
{
    *ret_bytes = hbm->map_bytes;
    return hbm->base;
}

void kv_hbm_pin(struct kv_hbm *hbm, uint32_t slot)
{
    assert(slot < hbm->slot_count);
    struct slot *pinned = &hbm->slots[slot];
    assert(!pinned->free);
    assert(pinned->pins < UINT32_MAX);

    if (is_cached(pinned)) cached_remove(hbm, slot);
    pinned->pins++;
}

void kv_hbm_unpin(struct kv_hbm *hbm, uint32_t slot)
{
    assert(slot < hbm->slot_count);
    struct slot *pinned = &hbm->slots[slot];
    assert(!pinned->free);
    assert(pinned->pins > 0);

    pinned->pins--;
    if (pinned->pins > 0) return;
    if (pinned->owner == KV_HBM_OWNER_NONE) {
        wipe_and_free(hbm, slot);
    } else {
        cached_append(hbm, slot);
    }
}

void kv_hbm_set_owner(struct kv_hbm *hbm, uint32_t slot, uint32_t owner)
{
    assert(slot < hbm->slot_count);
    struct slot *owned = &hbm->slots[slot];
    assert(!owned->free);

    owned->owner = owner;
    if (owner == KV_HBM_OWNER_NONE && is_cached(owned)) {
        cached_remove(hbm, slot);
        wipe_and_free(hbm, slot);
    }
}

struct kv_hbm_usage kv_hbm_usage(const struct kv_hbm *hbm)
{
    return (struct kv_hbm_usage){
        .bytes_capacity = hbm->map_bytes,
        .slots = hbm->slot_count,
        .pinned = hbm->slot_count - hbm->free_count - hbm->cached_count,
        .cached = hbm->cached_count,
        .free = hbm->free_count,
        .evictions = hbm->evictions,
    };
}
