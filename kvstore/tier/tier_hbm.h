#pragma once

/*
 * Pages of rows in the engine's memory: an arena of equal slots (RAM here; device memory with a
 * GPU).  Owned by: shard, which hands slots to the worker by naming them in a job; while a slot is
 * pinned the arena neither moves nor reuses it.
 *
 * A slot is free, pinned, or cached: unpinned but owned by a page of the index (`owner`, any number
 * but KV_HBM_OWNER_NONE), which can be dropped at once because SSD has it.  Victim: the least
 * recently unpinned.  Slots are zeroed when they change owner, but for one that is taken to read a
 * whole page into it.
 */

#include "kvstore/base/status.h"

#include <stdint.h>

#define KV_HBM_SLOT_NONE UINT32_MAX
#define KV_HBM_OWNER_NONE UINT32_MAX

struct kv_hbm;

/* Called when a cached slot is taken back: the owner must forget it. */
typedef void kv_hbm_evict_fn(void *context, uint32_t owner, uint32_t slot);

struct kv_hbm_options {
    uint64_t bytes; /* Slots = bytes / page_bytes, at least 2. */
    uint32_t page_bytes;
    kv_hbm_evict_fn *evicted;
    void *context;
};

kv_status kv_hbm_create(const struct kv_hbm_options *options, struct kv_hbm **ret_hbm,
                        struct kv_error *err) KV_MUST_CHECK;
void kv_hbm_destroy(struct kv_hbm *hbm);

/* One pinned, zeroed slot without owner.  KV_BUSY: everything is pinned. */
kv_status kv_hbm_alloc(struct kv_hbm *hbm, uint32_t *ret_slot) KV_MUST_CHECK;
/* The same, and its bytes are whoever's they were: for a page that is read over all of it, or else
 * given back at once by kv_hbm_unpin(), which wipes it. */
kv_status kv_hbm_alloc_to_read(struct kv_hbm *hbm, uint32_t *ret_slot) KV_MUST_CHECK;
/* Slots that alloc could still give: free + cached. */
uint32_t kv_hbm_available(const struct kv_hbm *hbm);

uint8_t *kv_hbm_bytes(struct kv_hbm *hbm, uint32_t slot);
/* Whole arena, to register with the disk. */
uint8_t *kv_hbm_base(struct kv_hbm *hbm, uint64_t *ret_bytes);

void kv_hbm_pin(struct kv_hbm *hbm, uint32_t slot);
/* Last pin gone: cached if it has an owner, else free. */
void kv_hbm_unpin(struct kv_hbm *hbm, uint32_t slot);
/* The index page that may keep it cached; OWNER_NONE: none (freed at once if unpinned). */
void kv_hbm_set_owner(struct kv_hbm *hbm, uint32_t slot, uint32_t owner);

struct kv_hbm_usage {
    uint64_t bytes_capacity;
    uint32_t slots, pinned, cached, free;
    uint64_t evictions;
};
struct kv_hbm_usage kv_hbm_usage(const struct kv_hbm *hbm);
