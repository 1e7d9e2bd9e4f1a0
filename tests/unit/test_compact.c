/*
 * Which segments compaction empties, and its pace.
 *
 * Goal: the least used ones below the threshold, never more than the others have room for, never
 * the one being filled; a pace that holds over any stretch of time. Method: a table, random tiers
 * against the rules one by one, and a played hour.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/plan/compact.h"
#include "tests/driver/random.h"
#include "tests/harness.h"

#define PAGES 100u
#define NONE UINT32_MAX

static void test_table(void)
{
    const struct {
        const char *what;
        uint32_t used[6]; /* Of 100; NONE: no such file. */
        uint32_t filling, below, reserve;
        uint32_t want[6]; /* NONE: the end. */
    } cases[] = {
        {"all full", {100, 100, 100, 100, NONE, NONE}, 9, 500, 0, {NONE}},
        {"one alone", {5, NONE, NONE, NONE, NONE, NONE}, 9, 500, 0, {NONE}},
        {"the one being filled", {100, 5, NONE, NONE, NONE, NONE}, 1, 500, 0, {NONE}},
        {"two halves become one", {40, 45, NONE, NONE, NONE, NONE}, 0, 500, 0, {1, NONE}},
        {"no room elsewhere", {80, 30, NONE, NONE, NONE, NONE}, 0, 500, 0, {NONE}},
        {"the reserve stays", {40, 45, NONE, NONE, NONE, NONE}, 0, 500, 16, {NONE}},
        {"the least used first", {60, 30, 10, 20, NONE, NONE}, 0, 500, 0, {2, 3, NONE}},
        {"of equals the highest", {20, 30, 30, 30, NONE, NONE}, 0, 500, 0, {3, 2, NONE}},
        {"at the threshold is not below", {10, 50, NONE, NONE, NONE, NONE}, 0, 500, 0, {NONE}},
        {"switched off", {0, 1, 1, 1, 1, 1}, 0, 0, 0, {NONE}},
        {"empty ones have nothing to move", {50, 0, 0, NONE, NONE, NONE}, 0, 500, 0, {NONE}},
        {"into empty ones", {100, 0, 10, NONE, NONE, NONE}, 1, 500, 50, {2, NONE}},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(cases); i++) {
        struct kv_compact_segment segments[6] = {0};
        uint32_t numbers[KV_COMPACT_SEGMENTS_MAX];
        const struct kv_compact_options options = {cases[i].below, cases[i].reserve};
        for (uint32_t n = 0; n < 6; n++) {
            const bool is_there = cases[i].used[n] != NONE;
            segments[n] = (struct kv_compact_segment){.number = n,
                                                      .pages = is_there ? PAGES : 0,
                                                      .used = is_there ? cases[i].used[n] : 0,
                                                      .is_filling = n == cases[i].filling};
        }
        (void)printf("  %s\n", cases[i].what);
        const uint32_t count = kv_compact_choose(segments, 6, &options, numbers);
        uint32_t want = 0;
        while (want < 6 && cases[i].want[want] != NONE)
            want++;
        EXPECT_EQ_U32(count, want);
        for (uint32_t n = 0; n < count; n++)
            EXPECT_EQ_U32(numbers[n], cases[i].want[n]);
    }
}

static void test_random(void)
{
    enum { SEGMENTS = 40 };
    struct ex_random random = {.state = 7};
    uint64_t chosen_total = 0;
    for (uint32_t round = 0; round < 5000; round++) {
        struct kv_compact_segment segments[SEGMENTS];
        uint32_t numbers[KV_COMPACT_SEGMENTS_MAX];
        const struct kv_compact_options options = {ex_random_below(&random, 1001),
                                                   ex_random_below(&random, 200)};
        const uint32_t most = 1 + ex_random_below(&random, PAGES);
        for (uint32_t n = 0; n < SEGMENTS; n++)
            segments[n] = (struct kv_compact_segment){
                .number = n, .pages = PAGES, .used = ex_random_below(&random, most + 1)};
        segments[ex_random_below(&random, SEGMENTS)].is_filling = true;
        const uint32_t count = kv_compact_choose(segments, SEGMENTS, &options, numbers);
        uint32_t moved = 0, room = 0;
        for (uint32_t i = 0; i < count; i++) {
            const struct kv_compact_segment *segment = &segments[numbers[i]];
            EXPECT(!segment->is_filling && segment->used > 0);
            EXPECT(segment->used * 1000 < segment->pages * options.below_thousandths);
            moved += segment->used;
            for (uint32_t k = 0; k < i; k++)
                EXPECT(numbers[k] != numbers[i] && segments[numbers[k]].used <= segment->used);
        }
        for (uint32_t n = 0; n < SEGMENTS; n++) {
            bool is_emptied = false;
            for (uint32_t i = 0; i < count; i++)
                is_emptied |= numbers[i] == n;
            if (!is_emptied) room += segments[n].pages - segments[n].used;
        }
        if (count > 0) EXPECT(moved + options.reserve <= room);
        chosen_total += count;
    }
    EXPECT(chosen_total > 5000);
}

static void test_pace(void)
{
    const uint64_t rate = 32u << 20, page = 114688;
    struct ex_random random = {.state = 3};
    uint64_t now = 5000000000u, next = 0, bytes = 0;
    const uint64_t begun = now;
    while (now - begun < 3600000000000u) {
        if (now >= next) {
            const uint64_t part = page * (1 + ex_random_below(&random, 32));
            next = kv_compact_next_ns(next, now, part, rate);
            bytes += part;
        }
        now += 1 + ex_random_below(&random, 60000000);
        if (ex_random_below(&random, 1000) == 0) now += 20000000000u; /* Nothing to do. */
        EXPECT((double)bytes <= (double)(now - begun) / 1e9 * (double)rate + 32.0 * (double)page);
    }
    EXPECT(bytes > 0);
    /* Busy all the time it comes to the whole rate. */
    for (now = begun, next = 0, bytes = 0; now - begun < 10000000000u; now += 1000000) {
        while (now >= next) {
            next = kv_compact_next_ns(next, now, page, rate);
            bytes += page;
        }
    }
    EXPECT(bytes >= 10 * rate * 3 / 4);
}

static void test_expired(void)
{
    const struct {
        uint64_t used_ms, life_ms, now_ms;
        bool want;
    } cases[] = {
        {1000, 500, 1000, false}, {1000, 500, 1500, false}, {1000, 500, 1501, true},
        {2000, 500, 1000, false}, /* The clock went back. */
        {0, 0, 0, false},         {0, 0, 1, true},          {5, UINT64_MAX, 9, false},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(cases); i++)
        EXPECT(kv_compact_expired(cases[i].used_ms, cases[i].life_ms, cases[i].now_ms) ==
               cases[i].want);
}

int main(void)
{
    test_expired();
    test_table();
    test_random();
    test_pace();
    HARNESS_END();
}
