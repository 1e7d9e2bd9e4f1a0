/*
 * The pace of work in the background.
 *
 * Goal: over any second no more than the rate, and no less when units are always at hand; a loop
 * that looks once a millisecond keeps it; one that slept does not make up for it in one go.
 */

#include "kvstore/plan/pace.h"

#include "kvstore/base/limits.h"
#include "tests/harness.h"

#define MIB (1ull << 20)
#define MS 1000000ull
#define SECOND (1000 * MS)

/* Bytes started from `from` on, looking every `step`. */
static uint64_t run(struct kv_pace *pace, uint64_t from, uint64_t ns, uint64_t step, uint32_t unit)
{
    uint64_t bytes = 0;
    for (uint64_t now = from; now < from + ns; now += step)
        while (kv_pace_take(pace, now, unit))
            bytes += unit;
    return bytes;
}

static void test_rate(void)
{
    static const uint32_t units[] = {20480, 114688, 409600};
    static const uint64_t rates[] = {MIB, 200 * MIB, 3000 * MIB, KV_SCRUB_RATE_MAX};
    for (unsigned u = 0; u < 3; u++) {
        for (unsigned r = 0; r < 4; r++) {
            struct kv_pace pace = {.rate_bytes = rates[r]};
            (void)run(&pace, 5 * SECOND, SECOND, MS, units[u]); /* It has begun. */
            const uint64_t got = run(&pace, 6 * SECOND, 4 * SECOND, MS, units[u]);
            const uint64_t want = 4 * rates[r];
            EXPECT(got + units[u] + want / 1000 >= want);
            EXPECT(got <= want + units[u] + want / 1000);
        }
    }
}

static void test_catching_up(void)
{
    struct kv_pace pace = {.rate_bytes = 100 * MIB};
    EXPECT(kv_pace_take(&pace, 0, 4096)); /* At the start of time as well. */
    (void)run(&pace, 1 * SECOND, SECOND, MS, 20480);
    /* An hour later: 20 ms worth at once, not an hour's. */
    const uint64_t now = 3600 * SECOND;
    uint64_t burst = 0;
    while (kv_pace_take(&pace, now, 20480))
        burst += 20480;
    EXPECT(burst >= 2 * MIB - 20480);
    EXPECT(burst <= 2 * MIB + 2 * 20480);
}

static void test_wait(void)
{
    struct kv_pace pace = {.rate_bytes = MIB};
    const uint64_t now = 10 * SECOND;
    EXPECT_EQ_U64(kv_pace_wait_ns(&pace, now), 0);
    while (kv_pace_take(&pace, now, 20480)) {
    }
    const uint64_t wait = kv_pace_wait_ns(&pace, now);
    EXPECT(wait > 0 && wait <= 20480 * SECOND / MIB);
    EXPECT(!kv_pace_take(&pace, now + wait - 1, 20480));
    EXPECT_EQ_U64(kv_pace_wait_ns(&pace, now + wait), 0);
    EXPECT(kv_pace_take(&pace, now + wait, 20480));
}

static void test_depth(void)
{
    EXPECT_EQ_U32(kv_pace_depth(32, 0), 32);
    EXPECT_EQ_U32(kv_pace_depth(32, 1), KV_PACE_DEPTH_BUSY);
    EXPECT_EQ_U32(kv_pace_depth(1, 9), 1);
}

int main(void)
{
    test_rate();
    test_catching_up();
    test_wait();
    test_depth();
    HARNESS_END();
}
