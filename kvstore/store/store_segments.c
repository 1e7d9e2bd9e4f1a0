/*
 * Which pages records name, by segment: the table in memory and its records.
 *
 * The table is what a start reads instead of the trees, so it must say of every place the same as
 * the page records do, in every state that a crash can leave.  That holds because the two change in
 * one batch, and the table in memory changes in the order in which batches are posted, never when
 * they are filled: a batch that is filled first and posted second carries what the other one did.
 * After a failed batch the manifest takes no other one, so a table that is ahead of the disk stays
 * in memory; where it goes on (a file system that was full), the table is put back, and the first
 * batch it takes has the next start count anew.
 */

#include "kvstore/store/segments.h"

#include "kvstore/base/bytes.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct kv_segment now;
    uint64_t posted_ms; /* used_ms as in the last record posted. */
};

struct kv_segments {
    uint32_t pages, count; /* Pages of each; numbers. */
    uint32_t bits_bytes;   /* Of each. */
    uint8_t *bits;
    struct entry *entries;
};

kv_status kv_segments_create(uint32_t pages, uint32_t count, struct kv_segments **ret_segments)
{
    struct kv_segments *segments = calloc(1, sizeof(*segments));
    if (segments == NULL) return KV_NOMEM;
    segments->pages = pages;
    segments->count = count;
    segments->bits_bytes = kv_record_segment_bits(pages);
    segments->bits = calloc(KV_MAX(count, 1u), segments->bits_bytes);
    segments->entries = calloc(KV_MAX(count, 1u), sizeof(*segments->entries));
    if (segments->bits == NULL || segments->entries == NULL) {
        kv_segments_destroy(segments);
        return KV_NOMEM;
    }
    kv_segments_clear(segments);
    *ret_segments = segments;
    return KV_OK;
}

void kv_segments_destroy(struct kv_segments *segments)
{
    if (segments == NULL) return;
    free(segments->bits);
    free(segments->entries);
    free(segments);
}

void kv_segments_clear(struct kv_segments *segments)
{
    memset(segments->bits, 0, (size_t)segments->count * segments->bits_bytes);
    for (uint32_t i = 0; i < segments->count; i++)
        segments->entries[i] = (struct entry){.now = {.state = KV_SEGMENT_OPEN}};
}

static uint8_t *bits_of(const struct kv_segments *segments, uint32_t number)
{
    assert(number < segments->count);
    return segments->bits + (size_t)number * segments->bits_bytes;
}

uint32_t kv_segments_number(const struct kv_segments *segments, uint32_t ssd_page)
{
    return ssd_page / segments->pages;
}

bool kv_segments_has(const struct kv_segments *segments, uint32_t ssd_page)
{
    const uint32_t number = ssd_page / segments->pages, at = ssd_page % segments->pages;
    if (number >= segments->count) return false;
    return (bits_of(segments, number)[at / 8] >> (at % 8) & 1) != 0;
}

void kv_segments_set(struct kv_segments *segments, uint32_t ssd_page, bool used)
{
    const uint32_t number = ssd_page / segments->pages, at = ssd_page % segments->pages;
    const uint8_t bit = (uint8_t)(1u << (at % 8));
    uint8_t *byte = &bits_of(segments, number)[at / 8];
    if (((*byte & bit) != 0) == used) return;
    *byte ^= bit;
    segments->entries[number].now.pages_used += used ? 1 : UINT32_MAX;
}

bool kv_segments_touch(struct kv_segments *segments, uint32_t number, uint64_t used_ms)
{
    struct entry *entry = &segments->entries[number];
    const uint64_t step = KV_SEGMENT_USED_STEP_MS;
    if (used_ms > entry->now.used_ms)
        entry->now.used_ms = used_ms > UINT64_MAX - step ? UINT64_MAX : (used_ms / step + 1) * step;
    return entry->now.used_ms > entry->posted_ms;
}

uint32_t kv_segments_encode(struct kv_segments *segments, uint32_t number, uint8_t *value)
{
    struct entry *entry = &segments->entries[number];
    const struct kv_record_segment record = {
        .state = (uint8_t)entry->now.state,
        .used_ms = entry->now.used_ms,
        .pages = segments->pages,
        .bits = bits_of(segments, number),
    };
    entry->posted_ms = entry->now.used_ms;
    return kv_record_segment_encode(&record, value);
}

kv_status kv_segments_decode(struct kv_segments *segments, uint32_t number, const uint8_t *value,
                             uint32_t bytes)
{
    struct kv_record_segment record;
    if (kv_record_segment_decode(value, bytes, &record) != KV_OK) return KV_CORRUPT;
    if (record.pages != segments->pages) return KV_CORRUPT;
    uint32_t used = 0;
    for (uint32_t i = 0; i < segments->bits_bytes; i++)
        used += (uint32_t)__builtin_popcount(record.bits[i]);
    if (number >= segments->count) return used == 0 ? KV_OK : KV_MISS;
    memcpy(bits_of(segments, number), record.bits, segments->bits_bytes);
    segments->entries[number] = (struct entry){
        .now = {.state = record.state, .used_ms = record.used_ms, .pages_used = used},
        .posted_ms = record.used_ms,
    };
    return KV_OK;
}

/* ---- for everybody ---- */

uint32_t kv_store_segment_pages(const struct kv_store *store)
{
    return store->segments->pages;
}

uint32_t kv_store_segment_count(const struct kv_store *store)
{
    return store->segments->count;
}

struct kv_segment kv_store_segment(const struct kv_store *store, uint32_t number)
{
    assert(number < store->segments->count);
    return store->segments->entries[number].now;
}

bool kv_store_segment_recorded(const struct kv_store *store, uint32_t ssd_page)
{
    return kv_segments_has(store->segments, ssd_page);
}

void kv_store_segment_touch(struct kv_store *store, uint32_t ssd_page, uint64_t used_ms)
{
    const uint32_t number = ssd_page / store->segments->pages;
    if (number < store->segments->count) (void)kv_segments_touch(store->segments, number, used_ms);
}

void kv_store_segment_set_state(struct kv_store *store, uint32_t number,
                                enum kv_segment_state state)
{
    assert(number < store->segments->count);
    store->segments->entries[number].now.state = state;
}
