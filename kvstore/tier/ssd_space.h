#pragma once

/* Which pages of the SSD tier are free: a bitmap in RAM.  A page is absent (its segment is not
 * there), free, used or quarantined: there, but given to nobody any more.  Owned by: shard. */

#include "kvstore/base/status.h"

#include <stdint.h>

struct kv_ssd_space {
    uint64_t *taken;   /* Bit set: used or absent. */
    uint64_t *present; /* Bit set: not absent. */
    uint64_t *bad;     /* Bit set: quarantined, or will be when its segment is there; NULL: none. */
    uint32_t page_max;
    uint32_t free_count;
    uint32_t used_count;
    uint32_t bad_count; /* Quarantined and present. */
    uint32_t lowest;    /* No page below it is free. */
};

/* All pages absent. */
kv_status kv_ssd_space_init(struct kv_ssd_space *space, uint32_t page_max) KV_MUST_CHECK;
void kv_ssd_space_fini(struct kv_ssd_space *space);

/* Pages first .. first + count - 1, all absent, become free; those marked as bad quarantined. */
void kv_ssd_space_add(struct kv_ssd_space *space, uint32_t first, uint32_t count);

/* KV_MISS: absent or no such page; KV_CORRUPT: used already, or quarantined. */
kv_status kv_ssd_space_claim(struct kv_ssd_space *space, uint32_t page) KV_MUST_CHECK;

/* Whether the page is there, used and not quarantined. */
bool kv_ssd_space_used(const struct kv_ssd_space *space, uint32_t page);

/* Asserts count <= free_count.  The lowest run of `count` adjacent free pages, else the lowest
 * free pages; in rising order. */
void kv_ssd_space_alloc(struct kv_ssd_space *space, uint32_t count, uint32_t *ret_pages);

/* Asserts that the page is used or quarantined; a quarantined one stays so. */
void kv_ssd_space_free(struct kv_ssd_space *space, uint32_t page);

/* The page is never given out again, whoever has it now.  Again: nothing.  KV_MISS: no such page;
 * KV_NOMEM. */
kv_status kv_ssd_space_quarantine(struct kv_ssd_space *space, uint32_t page) KV_MUST_CHECK;
bool kv_ssd_space_quarantined(const struct kv_ssd_space *space, uint32_t page);
