/*
 * The free-page bitmap of the SSD tier.
 *
 * First fit from below: adjacent pages make one sequential read, and filling from the bottom leaves
 * high segments empty, where they can be given back one day.  When no run is long enough the lowest
 * single pages serve: a put never fails while enough pages are free.
 *
 * Cost: a search looks at one word per 64 pages from the lowest free page on.  1 TiB in pages of
 * 400 KiB is 42,000 words, some 20 us in the worst case.
 */

#include "kvstore/tier/ssd_space.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>

/* Of what the segments could have: the manifest writes a log and tables anew beside them, 8 MiB
 * each, before it deletes the old ones.  Of a very small file system it gets a quarter. */
#define RESERVE_PART 16u
#define RESERVE_MIN (24ull << 20)
#define RESERVE_MIN_PART 4u
#define RESERVE_MAX (1ull << 30)

uint64_t kv_ssd_reserve(uint64_t total_bytes)
{
    const uint64_t least = KV_MIN(RESERVE_MIN, total_bytes / RESERVE_MIN_PART);
    return KV_MIN(KV_MAX(total_bytes / RESERVE_PART, least), RESERVE_MAX);
}

uint32_t kv_ssd_segments_allowed(uint64_t bytes_max, uint64_t segment_bytes, uint32_t segment_count,
                                 uint64_t room_bytes)
{
    const uint64_t configured = bytes_max / segment_bytes;
    const uint64_t reserve = kv_ssd_reserve(segment_count * segment_bytes + room_bytes);
    const uint64_t more = (room_bytes - KV_MIN(reserve, room_bytes)) / segment_bytes;
    return (uint32_t)KV_MIN(configured, segment_count + more);
}

static bool bit_get(const uint64_t *bits, uint32_t page)
{
    return bits[page / 64] >> (page % 64) & 1;
}

static void bit_set(uint64_t *bits, uint32_t page)
{
    bits[page / 64] |= 1ull << (page % 64);
}

static void bit_clear(uint64_t *bits, uint32_t page)
{
    bits[page / 64] &= ~(1ull << (page % 64));
}

kv_status kv_ssd_space_init(struct kv_ssd_space *space, uint32_t page_max)
{
    const size_t words = (size_t)page_max / 64 + 1;
    *space = (struct kv_ssd_space){.page_max = page_max, .lowest = page_max};
    space->taken = malloc(words * sizeof(uint64_t));
    space->idle = calloc(words, sizeof(uint64_t));
    space->present = calloc(words, sizeof(uint64_t));
    space->soiled = calloc(words, sizeof(uint64_t));
    if (space->taken == NULL || space->present == NULL || space->idle == NULL ||
        space->soiled == NULL) {
        kv_ssd_space_fini(space);
        return KV_NOMEM;
    }
    memset(space->taken, 0xff, words * sizeof(uint64_t));
    return KV_OK;
}

void kv_ssd_space_fini(struct kv_ssd_space *space)
{
    free(space->taken);
    free(space->present);
    free(space->idle);
    free(space->soiled);
    free(space->bad);
    space->taken = space->present = space->idle = space->soiled = space->bad = NULL;
}

/* One more is free, or one less. */
static void count_free(struct kv_ssd_space *space, uint32_t page, bool more)
{
    const uint32_t by = more ? 1 : UINT32_MAX;
    space->free_count += by;
    if (bit_get(space->soiled, page)) space->soiled_free += by;
}

void kv_ssd_space_add(struct kv_ssd_space *space, uint32_t first, uint32_t count, bool soiled)
{
    assert(first <= space->page_max);
    assert(count <= space->page_max - first);
    for (uint32_t page = first; page < first + count; page++) {
        assert(!bit_get(space->present, page));
        bit_set(space->present, page);
        if (soiled) bit_set(space->soiled, page);
        if (kv_ssd_space_quarantined(space, page)) {
            space->bad_count++;
            continue;
        }
        bit_clear(space->taken, page);
        count_free(space, page, true);
    }
    space->lowest = KV_MIN(space->lowest, first);
}

static void take(struct kv_ssd_space *space, uint32_t page)
{
    bit_set(space->taken, page);
    count_free(space, page, false);
    space->used_count++;
}

kv_status kv_ssd_space_claim(struct kv_ssd_space *space, uint32_t page)
{
    if (page >= space->page_max || !bit_get(space->present, page)) return KV_MISS;
    if (bit_get(space->taken, page)) return KV_CORRUPT;
    take(space, page);
    return KV_OK;
}

bool kv_ssd_space_used(const struct kv_ssd_space *space, uint32_t page)
{
    if (page >= space->page_max) return false;
    return bit_get(space->present, page) && bit_get(space->taken, page) &&
           !bit_get(space->idle, page) && !kv_ssd_space_quarantined(space, page);
}

/* First page >= `page` whose bit equals `want`; page_max when there is none. */
static uint32_t seek(const struct kv_ssd_space *space, uint32_t page, bool want)
{
    const uint64_t flip = want ? 0 : UINT64_MAX;
    while (page < space->page_max) {
        const uint64_t word = (space->taken[page / 64] ^ flip) >> (page % 64);
        if (word != 0) {
            const uint32_t found = page + (uint32_t)__builtin_ctzll(word);
            return KV_MIN(found, space->page_max);
        }
        page += 64 - page % 64;
    }
    return space->page_max;
}

/* First page of the lowest run; page_max when there is none. */
static uint32_t find_run(const struct kv_ssd_space *space, uint32_t count)
{
    uint32_t first = seek(space, space->lowest, false);
    while (first < space->page_max) {
        const uint32_t end = seek(space, first, true);
        if (end - first >= count) return first;
        first = seek(space, end, false);
    }
    return space->page_max;
}

void kv_ssd_space_alloc(struct kv_ssd_space *space, uint32_t count, uint32_t *ret_pages)
{
    assert(count > 0);
    assert(count <= space->free_count);

    const uint32_t run = find_run(space, count);
    const bool adjacent = run < space->page_max;
    uint32_t page = adjacent ? run : seek(space, space->lowest, false);
    for (uint32_t i = 0; i < count; i++) {
        assert(page < space->page_max);
        take(space, page);
        ret_pages[i] = page;
        page = seek(space, page + 1, false);
    }
    /* Single pages were taken from the bottom; a run may have left pages below it. */
    if (!adjacent || run == space->lowest) space->lowest = page;
}

void kv_ssd_space_free(struct kv_ssd_space *space, uint32_t page)
{
    assert(page < space->page_max);
    assert(bit_get(space->present, page));
    assert(bit_get(space->taken, page));
    if (kv_ssd_space_quarantined(space, page)) return;
    assert(!bit_get(space->idle, page));
    space->used_count--;
    if (kv_ssd_space_closed(space, page)) {
        bit_set(space->idle, page);
        space->idle_count++;
        return;
    }
    bit_clear(space->taken, page);
    count_free(space, page, true);
    space->lowest = KV_MIN(space->lowest, page);
}

void kv_ssd_space_soil(struct kv_ssd_space *space, uint32_t page)
{
    assert(page < space->page_max);
    assert(bit_get(space->taken, page) && bit_get(space->present, page));
    bit_set(space->soiled, page);
}

void kv_ssd_space_clean(struct kv_ssd_space *space, uint32_t page)
{
    assert(page < space->page_max);
    assert(bit_get(space->taken, page) && bit_get(space->present, page));
    bit_clear(space->soiled, page);
}

uint32_t kv_ssd_space_next_soiled(const struct kv_ssd_space *space, uint32_t page)
{
    while (page < space->page_max) {
        const uint64_t word = (space->soiled[page / 64] & ~space->taken[page / 64]) >> (page % 64);
        if (word != 0) return page + (uint32_t)__builtin_ctzll(word);
        page += 64 - page % 64;
    }
    return space->page_max;
}

uint32_t kv_ssd_space_count(const struct kv_ssd_space *space, uint32_t first, uint32_t count)
{
    uint32_t used = 0;
    for (uint32_t page = first; page < first + count;) {
        const uint32_t bits = KV_MIN(64 - page % 64, first + count - page);
        const uint64_t mask = bits == 64 ? UINT64_MAX : ((1ull << bits) - 1) << (page % 64);
        const uint64_t word = space->taken[page / 64] & space->present[page / 64] &
                              ~space->idle[page / 64] &
                              (space->bad == NULL ? UINT64_MAX : ~space->bad[page / 64]);
        used += (uint32_t)__builtin_popcountll(word & mask);
        page += bits;
    }
    return used;
}

bool kv_ssd_space_closed(const struct kv_ssd_space *space, uint32_t page)
{
    for (uint32_t i = 0; i < space->closed_count; i++) {
        if (page >= space->closed[i].first &&
            page - space->closed[i].first < space->closed[i].count)
            return true;
    }
    return false;
}

void kv_ssd_space_close(struct kv_ssd_space *space, uint32_t first, uint32_t count)
{
    assert(space->closed_count < KV_SSD_CLOSED_MAX);
    space->closed[space->closed_count].first = first;
    space->closed[space->closed_count++].count = count;
    for (uint32_t page = first; page < first + count; page++) {
        assert(bit_get(space->present, page));
        if (bit_get(space->taken, page)) continue;
        bit_set(space->taken, page);
        bit_set(space->idle, page);
        count_free(space, page, false);
        space->idle_count++;
    }
}

void kv_ssd_space_open(struct kv_ssd_space *space)
{
    for (uint32_t i = 0; i < space->closed_count; i++) {
        const uint32_t first = space->closed[i].first;
        for (uint32_t page = first; page < first + space->closed[i].count; page++) {
            if (!bit_get(space->idle, page)) continue;
            bit_clear(space->idle, page);
            bit_clear(space->taken, page);
            space->idle_count--;
            count_free(space, page, true);
            space->lowest = KV_MIN(space->lowest, page);
        }
    }
    space->closed_count = 0;
}

bool kv_ssd_space_quarantined(const struct kv_ssd_space *space, uint32_t page)
{
    return space->bad != NULL && page < space->page_max && bit_get(space->bad, page);
}

kv_status kv_ssd_space_quarantine(struct kv_ssd_space *space, uint32_t page)
{
    if (page >= space->page_max) return KV_MISS;
    if (kv_ssd_space_quarantined(space, page)) return KV_OK;
    if (space->bad == NULL) space->bad = calloc((size_t)space->page_max / 64 + 1, sizeof(uint64_t));
    if (space->bad == NULL) return KV_NOMEM;
    bit_set(space->bad, page);
    if (!bit_get(space->present, page)) return KV_OK;
    if (bit_get(space->idle, page)) {
        bit_clear(space->idle, page);
        space->idle_count--;
    } else if (bit_get(space->taken, page)) {
        space->used_count--;
    } else {
        count_free(space, page, false);
    }
    bit_set(space->taken, page);
    space->bad_count++;
    return KV_OK;
}

bool kv_ssd_space_present(const struct kv_ssd_space *space, uint32_t page)
{
    return page < space->page_max && bit_get(space->present, page);
}

void kv_ssd_space_release(struct kv_ssd_space *space, uint32_t page)
{
    assert(kv_ssd_space_quarantined(space, page) && kv_ssd_space_present(space, page));
    bit_clear(space->bad, page);
    bit_clear(space->soiled, page);
    space->bad_count--;
    space->used_count++; /* As if somebody had it, who gives it back. */
    kv_ssd_space_free(space, page);
}
