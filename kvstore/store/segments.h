#pragma once

/*
 * What the records say of each segment: which of its pages they name, since when none of them was
 * used, and whether it takes more.  Owned by: shard.
 *
 * A place is recorded from the moment a batch that names it is posted, and not any more from the
 * moment a batch is posted that frees it: batches become durable in that order, and each carries
 * the segment records (docs/format.md, `G`) of the segments it touches as they are with it.  What
 * the allocator gave out and no batch names yet is in use and not recorded.
 *
 * Memory: a bit a page and 24 B a segment.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/manifest_record.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_store;

/* Times of use are kept in steps, rounded up, so that a segment's record is written for use alone
 * once an hour at most. */
#define KV_SEGMENT_USED_STEP_MS 3600000ull

struct kv_segment {
    enum kv_segment_state state;
    uint64_t used_ms;    /* Wall time: no checkpoint that needs a page of it was used later. */
    uint32_t pages_used; /* Recorded. */
};

/* Pages of each segment, and how many numbers there can be. */
uint32_t kv_store_segment_pages(const struct kv_store *store);
uint32_t kv_store_segment_count(const struct kv_store *store);
/* number < count.  A segment without a file is open and has no pages in use. */
struct kv_segment kv_store_segment(const struct kv_store *store, uint32_t number);
/* Whether a record names the page. */
bool kv_store_segment_recorded(const struct kv_store *store, uint32_t ssd_page);
/* A checkpoint that needs the page was used (kv_store_renew(), the records of a checkpoint).  In
 * memory; durable with the records of a checkpoint on the same pages. */
void kv_store_segment_touch(struct kv_store *store, uint32_t ssd_page, uint64_t used_ms);
/* In memory at once; durable with the next batch that touches it. */
void kv_store_segment_set_state(struct kv_store *store, uint32_t number,
                                enum kv_segment_state state);
