/*
 * Real and virtual clocks.
 *
 * Goal: the virtual clock stands still but for advance, and moves both times by the same; the real
 * clock follows the kernel and never steps back.
 */

#include "kvstore/base/clock.h"
#include "tests/harness.h"

#include <unistd.h>

static void test_virtual(void)
{
    struct kv_clock *real = kv_clock_create_real();
    struct kv_clock *clock = kv_clock_create_virtual();
    const uint64_t wall_ms = kv_clock_wall_ms(clock);
    const uint64_t mono_ns = kv_clock_mono_ns(clock);
    EXPECT(kv_clock_is_virtual(clock));
    EXPECT(kv_clock_wall_ms(real) - wall_ms < 5000); /* It starts at today's time. */

    (void)usleep(3000);
    EXPECT_EQ_U64(kv_clock_wall_ms(clock), wall_ms);
    EXPECT_EQ_U64(kv_clock_mono_ns(clock), mono_ns);

    kv_clock_advance(clock, 72ull * 3600 * 1000000000);
    EXPECT_EQ_U64(kv_clock_wall_ms(clock), wall_ms + 72ull * 3600 * 1000);
    EXPECT_EQ_U64(kv_clock_mono_ns(clock), mono_ns + 72ull * 3600 * 1000000000);

    /* Parts of a ms add up: nothing is lost by rounding. */
    for (int i = 0; i < 1000; i++)
        kv_clock_advance(clock, 999);
    kv_clock_advance(clock, 1000);
    EXPECT_EQ_U64(kv_clock_wall_ms(clock), wall_ms + 72ull * 3600 * 1000 + 1);
    kv_clock_destroy(clock);
    kv_clock_destroy(real);
    kv_clock_destroy(NULL);
}

static void test_real(void)
{
    struct kv_clock *clock = kv_clock_create_real();
    EXPECT(!kv_clock_is_virtual(clock));
    EXPECT(kv_clock_wall_ms(clock) > 1577836800000u); /* Later than 2020. */
    uint64_t last = kv_clock_mono_ns(clock);
    uint64_t watch = kv_clock_stopwatch_ns();
    for (int i = 0; i < 1000; i++) {
        const uint64_t now = kv_clock_mono_ns(clock);
        EXPECT(now >= last);
        last = now;
    }
    EXPECT(kv_clock_stopwatch_ns() > watch);
    watch = kv_clock_stopwatch_ns();
    (void)usleep(2000);
    EXPECT(kv_clock_stopwatch_ns() - watch >= 2000000);
    EXPECT(kv_clock_mono_ns(clock) - last >= 2000000);
    kv_clock_destroy(clock);
}

int main(void)
{
    test_virtual();
    test_real();
    HARNESS_END();
}
