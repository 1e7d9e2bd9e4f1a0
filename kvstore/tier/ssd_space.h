#pragma once

/* Which pages of the SSD tier are free: a bitmap in RAM.  A page is absent (its segment is not
 * there), free, used or quarantined: there, but given to nobody any more.  Owned by: shard. */

#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stdint.h>

/* How many segment files the tier may have: as many as bytes_max holds, and no more than leave on
 * their file system, of which room_bytes are free, a reserve for the manifest.  What is there
 * already counts as allowed as far as bytes_max goes. */
uint32_t kv_ssd_segments_allowed(uint64_t bytes_max, uint64_t segment_bytes, uint32_t segment_count,
                                 uint64_t room_bytes);
/* Bytes of the file system that segments leave free, where they could have total_bytes of it. */
uint64_t kv_ssd_reserve(uint64_t total_bytes);

/* Ranges that can be closed at a time. */
#define KV_SSD_CLOSED_MAX 8u

struct kv_ssd_space {
    uint64_t *taken;   /* Bit set: used, absent, quarantined, or free in a closed range. */
    uint64_t *idle;    /* Bit set: free in a closed range. */
    uint64_t *present; /* Bit set: not absent. */
    uint64_t *soiled;  /* Bit set: may hold what was stored in it, not only zeros. */
    uint64_t *bad;     /* Bit set: quarantined, or will be when its segment is there; NULL: none. */
    uint32_t page_max;
    uint32_t free_count;
    uint32_t used_count;
    uint32_t idle_count;
    uint32_t soiled_free; /* Free and soiled. */
    uint32_t bad_count;   /* Quarantined and present. */
    uint32_t lowest;      /* No page below it is free. */
    struct {
        uint32_t first, count;
    } closed[KV_SSD_CLOSED_MAX];
    uint32_t closed_count;
};

/* All pages absent. */
kv_status kv_ssd_space_init(struct kv_ssd_space *space, uint32_t page_max) KV_MUST_CHECK;
void kv_ssd_space_fini(struct kv_ssd_space *space);

/* Pages first .. first + count - 1, all absent, become free, soiled or not; those marked as bad
 * quarantined. */
void kv_ssd_space_add(struct kv_ssd_space *space, uint32_t first, uint32_t count, bool soiled);

/* KV_MISS: absent or no such page; KV_CORRUPT: used already, or quarantined. */
kv_status kv_ssd_space_claim(struct kv_ssd_space *space, uint32_t page) KV_MUST_CHECK;

/* Whether the page is there, used and not quarantined. */
bool kv_ssd_space_used(const struct kv_ssd_space *space, uint32_t page);

/* Asserts count <= free_count.  The lowest run of `count` adjacent free pages, else the lowest
 * free pages; in rising order. */
void kv_ssd_space_alloc(struct kv_ssd_space *space, uint32_t count, uint32_t *ret_pages);

/* Asserts that the page is used or quarantined; a quarantined one stays so. */
void kv_ssd_space_free(struct kv_ssd_space *space, uint32_t page);

/* Asserts that the page is neither free nor absent: something is stored in it from now on, or it is
 * all zeros. */
void kv_ssd_space_soil(struct kv_ssd_space *space, uint32_t page);
void kv_ssd_space_clean(struct kv_ssd_space *space, uint32_t page);
/* The first page from `page` on that is free and soiled; page_max: there is none. */
uint32_t kv_ssd_space_next_soiled(const struct kv_ssd_space *space, uint32_t page);

/* Pages that are used, of a range. */
uint32_t kv_ssd_space_count(const struct kv_ssd_space *space, uint32_t first, uint32_t count);
/* Nothing of the range, which is present, is given out before all are opened again. */
void kv_ssd_space_close(struct kv_ssd_space *space, uint32_t first, uint32_t count);
void kv_ssd_space_open(struct kv_ssd_space *space); /* All ranges. */
bool kv_ssd_space_closed(const struct kv_ssd_space *space, uint32_t page);
/* The page is never given out again, whoever has it now.  Again: nothing.  KV_MISS: no such page;
 * KV_NOMEM. */
kv_status kv_ssd_space_quarantine(struct kv_ssd_space *space, uint32_t page) KV_MUST_CHECK;
/* Asserts that the page is quarantined and present: it is free again, and all zeros. */
void kv_ssd_space_release(struct kv_ssd_space *space, uint32_t page);
bool kv_ssd_space_present(const struct kv_ssd_space *space, uint32_t page);
bool kv_ssd_space_quarantined(const struct kv_ssd_space *space, uint32_t page);
