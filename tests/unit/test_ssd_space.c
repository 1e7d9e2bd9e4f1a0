/*
 * The free-page bitmap of the SSD tier.
 *
 * Goal: no page is ever given twice, adjacency and order are as promised, counts always agree.
 * Method: named cases, then random allocations and frees against a plain array of bytes.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/tier/ssd_space.h"
#include "tests/harness.h"

#define PAGES 1000u

static void expect_pages(const uint32_t *got, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        EXPECT_EQ_U32(got[i], first + i);
}

static void test_named_cases(void)
{
    struct kv_ssd_space space;
    uint32_t pages[PAGES];
    EXPECT(kv_ssd_space_init(&space, 200) == KV_OK);
    EXPECT(kv_ssd_space_claim(&space, 0) == KV_MISS); /* Absent. */
    kv_ssd_space_add(&space, 0, 100, false);
    EXPECT_EQ_U32(space.free_count, 100);

    EXPECT(kv_ssd_space_claim(&space, 3) == KV_OK);
    EXPECT(kv_ssd_space_claim(&space, 3) == KV_CORRUPT);
    EXPECT(kv_ssd_space_used(&space, 3));
    EXPECT(!kv_ssd_space_used(&space, 4));
    EXPECT(!kv_ssd_space_used(&space, 100)); /* Absent. */
    EXPECT(!kv_ssd_space_used(&space, 200));
    EXPECT(kv_ssd_space_claim(&space, 100) == KV_MISS);
    EXPECT(kv_ssd_space_claim(&space, 200) == KV_MISS);
    EXPECT(kv_ssd_space_claim(&space, UINT32_MAX) == KV_MISS);

    kv_ssd_space_alloc(&space, 4, pages); /* 0..2 is too short a run. */
    expect_pages(pages, 4, 4);
    kv_ssd_space_alloc(&space, 1, pages); /* Lowest first. */
    expect_pages(pages, 0, 1);
    kv_ssd_space_alloc(&space, 2, pages);
    expect_pages(pages, 1, 2);
    kv_ssd_space_alloc(&space, 92, pages); /* All that is left, across words. */
    expect_pages(pages, 8, 92);
    EXPECT_EQ_U32(space.free_count, 0);
    EXPECT_EQ_U32(space.used_count, 100);

    /* No run of three: single pages, rising. */
    kv_ssd_space_free(&space, 70);
    kv_ssd_space_free(&space, 10);
    kv_ssd_space_free(&space, 64);
    kv_ssd_space_alloc(&space, 3, pages);
    EXPECT_EQ_U32(pages[0], 10);
    EXPECT_EQ_U32(pages[1], 64);
    EXPECT_EQ_U32(pages[2], 70);

    /* A later segment, with a hole of absent pages between. */
    kv_ssd_space_add(&space, 150, 50, false);
    kv_ssd_space_alloc(&space, 50, pages);
    expect_pages(pages, 150, 50);
    kv_ssd_space_add(&space, 100, 50, false);
    kv_ssd_space_alloc(&space, 2, pages);
    expect_pages(pages, 100, 2);
    kv_ssd_space_fini(&space);
}

static void expect_counts(const struct kv_ssd_space *space, uint32_t free, uint32_t used,
                          uint32_t bad)
{
    EXPECT_EQ_U32(space->free_count, free);
    EXPECT_EQ_U32(space->used_count, used);
    EXPECT_EQ_U32(space->bad_count, bad);
}

/* Used, free and absent pages in quarantine: none is given out, and the counts are always all. */
static void test_quarantine(void)
{
    struct kv_ssd_space space;
    uint32_t pages[100];
    EXPECT(kv_ssd_space_init(&space, 200) == KV_OK);
    EXPECT(!kv_ssd_space_quarantined(&space, 5));
    EXPECT(kv_ssd_space_quarantine(&space, 200) == KV_MISS);
    EXPECT(kv_ssd_space_quarantine(&space, 105) == KV_OK); /* Absent. */
    expect_counts(&space, 0, 0, 0);
    kv_ssd_space_add(&space, 0, 100, false);
    EXPECT(kv_ssd_space_claim(&space, 3) == KV_OK);
    EXPECT(kv_ssd_space_claim(&space, 4) == KV_OK);
    expect_counts(&space, 98, 2, 0);

    EXPECT(kv_ssd_space_quarantine(&space, 3) == KV_OK);
    EXPECT(kv_ssd_space_quarantine(&space, 3) == KV_OK); /* Again. */
    EXPECT(kv_ssd_space_quarantine(&space, 0) == KV_OK); /* Free. */
    expect_counts(&space, 97, 1, 2);
    EXPECT(!kv_ssd_space_used(&space, 3) && kv_ssd_space_used(&space, 4));
    EXPECT(kv_ssd_space_quarantined(&space, 3));
    EXPECT(kv_ssd_space_claim(&space, 3) == KV_CORRUPT);
    EXPECT(kv_ssd_space_claim(&space, 0) == KV_CORRUPT);
    kv_ssd_space_free(&space, 3); /* Whoever had it lets go. */
    expect_counts(&space, 97, 1, 2);

    kv_ssd_space_add(&space, 100, 100, false);
    expect_counts(&space, 196, 1, 3);
    for (uint32_t left = 196; left > 0; left -= 98) {
        kv_ssd_space_alloc(&space, 98, pages);
        for (uint32_t i = 0; i < 98; i++)
            EXPECT(pages[i] != 0 && pages[i] != 3 && pages[i] != 105);
    }
    expect_counts(&space, 0, 197, 3);
    kv_ssd_space_fini(&space);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void test_against_array(void)
{
    static uint8_t used[PAGES];
    struct kv_ssd_space space;
    uint32_t pages[16];
    uint32_t state = 1;
    uint32_t used_count = 0;
    EXPECT(kv_ssd_space_init(&space, PAGES) == KV_OK);
    kv_ssd_space_add(&space, 0, PAGES, false);

    for (uint64_t step = harness_count(20000); step > 0; step--) {
        const uint32_t count = next_random(&state) % 16 + 1;
        if (count <= space.free_count && next_random(&state) % 100 < 55) {
            /* The lowest run by the slow way. */
            uint32_t first = 0;
            for (uint32_t length = 0; first + length < PAGES && length < count;) {
                if (used[first + length] != 0) {
                    first += length + 1;
                    length = 0;
                } else {
                    length++;
                }
            }
            kv_ssd_space_alloc(&space, count, pages);
            if (first + count <= PAGES) expect_pages(pages, first, count);
            for (uint32_t i = 0; i < count; i++) {
                EXPECT(used[pages[i]] == 0);
                if (i > 0) EXPECT(pages[i] > pages[i - 1]);
                used[pages[i]] = 1;
            }
            used_count += count;
        } else {
            const uint32_t page = next_random(&state) % PAGES;
            if (used[page] == 0) continue;
            used[page] = 0;
            used_count--;
            kv_ssd_space_free(&space, page);
        }
        EXPECT_EQ_U32(space.used_count, used_count);
        EXPECT_EQ_U32(space.free_count, PAGES - used_count);
    }
    kv_ssd_space_fini(&space);
}

/* Soiled pages: counted while they are free, and found in order. */
static void test_soiled(void)
{
    enum { FREE, USED, BAD };
    static uint8_t state[PAGES];
    static bool soiled[PAGES];
    struct kv_ssd_space space;
    uint32_t random = 3, page;
    EXPECT(kv_ssd_space_init(&space, PAGES) == KV_OK);
    kv_ssd_space_add(&space, 0, PAGES / 2, true);
    kv_ssd_space_add(&space, PAGES / 2, PAGES / 2, false);
    for (uint32_t i = 0; i < PAGES / 2; i++)
        soiled[i] = true;
    for (uint64_t step = harness_count(20000); step > 0; step--) {
        page = next_random(&random) % PAGES;
        const uint32_t dice = next_random(&random) % 100;
        if (step % 50 == 0) { /* Closed and open again, in the middle. */
            kv_ssd_space_close(&space, 100, 100);
            if (state[150] == USED) {
                kv_ssd_space_free(&space, 150);
                state[150] = FREE;
            }
            EXPECT(kv_ssd_space_next_soiled(&space, 100) >= 200);
            kv_ssd_space_open(&space);
        }
        if (state[page] == FREE && dice < 60) {
            EXPECT(kv_ssd_space_claim(&space, page) == KV_OK);
            state[page] = USED;
        } else if (state[page] == USED && dice < 50) {
            soiled[page] = dice < 25;
            if (soiled[page])
                kv_ssd_space_soil(&space, page);
            else
                kv_ssd_space_clean(&space, page);
        } else if (state[page] == USED) {
            kv_ssd_space_free(&space, page);
            state[page] = FREE;
        } else if (dice == 99) {
            EXPECT(kv_ssd_space_quarantine(&space, page) == KV_OK);
            state[page] = BAD;
        }
        uint32_t count = 0, next = 0;
        for (uint32_t i = 0; i < PAGES; i++) {
            if (state[i] != FREE || !soiled[i]) continue;
            next = kv_ssd_space_next_soiled(&space, next);
            EXPECT_EQ_U32(next++, i);
            count++;
        }
        EXPECT_EQ_U32(kv_ssd_space_next_soiled(&space, next), PAGES);
        EXPECT_EQ_U32(space.soiled_free, count);
    }
    EXPECT_EQ_U32(kv_ssd_space_next_soiled(&space, UINT32_MAX), PAGES);
    kv_ssd_space_fini(&space);
}

static void test_segments_allowed(void)
{
    const uint64_t mib = 1u << 20, gib = 1u << 30;
    const struct {
        const char *what;
        uint64_t bytes_max, segment_bytes;
        uint32_t count;
        uint64_t room;
        uint32_t want;
    } cases[] = {
        {"as configured", 10 * gib, 64 * mib, 0, 100 * gib, 160},
        {"the part of a segment does not count", 10 * gib + 63 * mib, 64 * mib, 0, 100 * gib, 160},
        {"1 GiB: all but 64 MiB", 10 * gib, 64 * mib, 0, gib, 15},
        {"what is there counts", 10 * gib, 64 * mib, 15, 64 * mib, 15},
        {"others took the reserve", 10 * gib, 64 * mib, 15, 0, 15},
        {"others gave back", 10 * gib, 64 * mib, 8, 512 * mib, 15},
        {"192 MiB: 24 MiB stay", 10 * gib, 8 * mib, 0, 192 * mib, 21},
        {"16 MiB: a quarter stays", gib, mib, 0, 16 * mib, 12},
        {"1 TiB: 1 GiB stays", 2048 * gib, gib, 0, 1024 * gib, 1023},
        {"more files than configured", 2 * mib, mib, 5, 100 * mib, 2},
        {"nothing", gib, mib, 0, 0, 0},
        {"nobody knows", gib, mib, 3, UINT64_MAX / 2, 1024},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(cases); i++) {
        (void)printf("  %s\n", cases[i].what);
        EXPECT_EQ_U32(kv_ssd_segments_allowed(cases[i].bytes_max, cases[i].segment_bytes,
                                              cases[i].count, cases[i].room),
                      cases[i].want);
    }
}

int main(void)
{
    test_named_cases();
    test_quarantine();
    test_against_array();
    test_soiled();
    test_segments_allowed();
    HARNESS_END();
}
