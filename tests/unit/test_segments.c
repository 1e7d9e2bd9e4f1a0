/*
 * The table of places in use, by segment, and its records.
 */

#include "kvstore/store/segments.h"

#include "kvstore/store/store_internal.h"
#include "tests/harness.h"

enum { PAGES = 11, COUNT = 3 };

static struct kv_store store; /* Nothing but its table. */

static void test_places(void)
{
    struct kv_segments *segments = store.segments;
    EXPECT_EQ_U32(kv_store_segment_pages(&store), PAGES);
    EXPECT_EQ_U32(kv_store_segment_count(&store), COUNT);
    EXPECT_EQ_U32(kv_segments_number(segments, 2 * PAGES), 2);
    for (uint32_t page = 0; page < COUNT * PAGES; page += 2)
        kv_segments_set(segments, page, true);
    kv_segments_set(segments, 0, true); /* Again: nothing changes. */
    for (uint32_t page = 0; page < COUNT * PAGES; page++)
        EXPECT_EQ_U32(kv_store_segment_recorded(&store, page), page % 2 == 0);
    EXPECT(!kv_store_segment_recorded(&store, COUNT * PAGES));
    EXPECT(!kv_store_segment_recorded(&store, UINT32_MAX));
    EXPECT_EQ_U32(kv_store_segment(&store, 0).pages_used, 6);
    EXPECT_EQ_U32(kv_store_segment(&store, 1).pages_used, 5);
    kv_segments_set(segments, 12, false);
    kv_segments_set(segments, 12, false);
    EXPECT_EQ_U32(kv_store_segment(&store, 1).pages_used, 4);
    EXPECT(!kv_store_segment_recorded(&store, 12));
    kv_segments_clear(segments);
    EXPECT_EQ_U32(kv_store_segment(&store, 1).pages_used, 0);
    EXPECT(!kv_store_segment_recorded(&store, 0));
}

/* Up to the next hour; a record is due when it is older than that. */
static void test_use(void)
{
    const uint64_t hour = KV_SEGMENT_USED_STEP_MS;
    uint8_t value[64];
    kv_segments_clear(store.segments);
    EXPECT(kv_segments_touch(store.segments, 1, 5 * hour + 1));
    EXPECT_EQ_U64(kv_store_segment(&store, 1).used_ms, 6 * hour);
    EXPECT(kv_segments_touch(store.segments, 1, 3)); /* Still not posted. */
    (void)kv_segments_encode(store.segments, 1, value);
    EXPECT(!kv_segments_touch(store.segments, 1, 6 * hour));
    EXPECT(!kv_segments_touch(store.segments, 1, 0));
    kv_store_segment_touch(&store, PAGES, 6 * hour + 1); /* A page of it. */
    EXPECT_EQ_U64(kv_store_segment(&store, 1).used_ms, 7 * hour);
    EXPECT(kv_segments_touch(store.segments, 1, 0));
    kv_store_segment_touch(&store, COUNT * PAGES, hour); /* There is none. */
    EXPECT(kv_segments_touch(store.segments, 2, UINT64_MAX - 1));
    EXPECT_EQ_U64(kv_store_segment(&store, 2).used_ms, UINT64_MAX);
    EXPECT_EQ_U64(kv_store_segment(&store, 0).used_ms, 0);
}

static void test_records(void)
{
    struct kv_segments *other;
    uint8_t value[64];
    const uint32_t bytes = kv_record_segment_bytes(PAGES);
    EXPECT(bytes <= sizeof(value));
    kv_segments_clear(store.segments);
    kv_segments_set(store.segments, PAGES + 10, true);
    kv_segments_set(store.segments, PAGES + 3, true);
    (void)kv_segments_touch(store.segments, 1, 1);
    kv_store_segment_set_state(&store, 1, KV_SEGMENT_SEALED);
    EXPECT_EQ_U32(kv_segments_encode(store.segments, 1, value), bytes);

    kv_segments_clear(store.segments);
    EXPECT(kv_segments_decode(store.segments, 2, value, bytes) == KV_OK);
    const struct kv_segment found = kv_store_segment(&store, 2);
    EXPECT_EQ_U32(found.pages_used, 2);
    EXPECT_EQ_U32(found.state, KV_SEGMENT_SEALED);
    EXPECT_EQ_U64(found.used_ms, KV_SEGMENT_USED_STEP_MS);
    EXPECT(kv_store_segment_recorded(&store, 2 * PAGES + 3));
    EXPECT(kv_store_segment_recorded(&store, 2 * PAGES + 10));
    EXPECT(!kv_segments_touch(store.segments, 2, 1)); /* Its record says so. */

    EXPECT(kv_segments_decode(store.segments, COUNT, value, bytes) == KV_MISS);
    value[5] ^= 1;
    EXPECT(kv_segments_decode(store.segments, 0, value, bytes) == KV_CORRUPT);
    value[5] ^= 1;
    EXPECT(kv_segments_create(PAGES + 1, 1, &other) == KV_OK); /* Other segments have more pages. */
    EXPECT(kv_segments_decode(other, 0, value, bytes) == KV_CORRUPT);
    kv_segments_destroy(other);
    kv_segments_clear(store.segments);
    (void)kv_segments_encode(store.segments, 0, value);
    EXPECT(kv_segments_decode(store.segments, COUNT, value, bytes) == KV_OK); /* Nothing in it. */
}

int main(void)
{
    EXPECT(kv_segments_create(PAGES, COUNT, &store.segments) == KV_OK);
    test_places();
    test_use();
    test_records();
    kv_segments_destroy(store.segments);
    HARNESS_END();
}
