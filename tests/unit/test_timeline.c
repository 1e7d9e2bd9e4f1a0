/*
 * The store's own time.
 *
 * Goal: whatever the wall clock does, nothing gets older than the time since boot says, a clock
 * that stays is believed after the grace and not before, and rows of either side of a jump count as
 * used then.  Method: clocks moved by hand, for jumps of minutes to 56 years, both ways.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/plan/timeline.h"
#include "tests/harness.h"

#define NS 1000000ull
#define MINUTE (60ull * 1000)
#define DAY (24ull * 3600 * 1000)
#define YEAR (365 * DAY)

struct clocks {
    struct kv_timeline line;
    uint64_t wall_ms, mono_ns;
};

static struct clocks fresh(uint64_t last_ms, uint64_t wall_ms)
{
    struct clocks c = {.wall_ms = wall_ms, .mono_ns = 1234567};
    kv_timeline_begin(&c.line, c.wall_ms, c.mono_ns, 0, 0);
    if (last_ms > 0) kv_timeline_saw(&c.line, last_ms);
    return c;
}

static enum kv_timeline_event pass(struct clocks *c, uint64_t ms)
{
    c->wall_ms += ms;
    c->mono_ns += ms * NS;
    return kv_timeline_look(&c->line, c->wall_ms, c->mono_ns);
}

static uint64_t now(const struct clocks *c)
{
    return kv_timeline_now_ms(&c->line, c->mono_ns);
}

static const uint64_t T = 56 * YEAR;

static void test_small_steps_are_followed(void)
{
    struct clocks c = fresh(T - DAY, T);
    EXPECT(kv_timeline_judge(&c.line) == KV_TIMELINE_NONE);
    c.wall_ms += 5 * MINUTE;
    EXPECT(pass(&c, 0) == KV_TIMELINE_NONE);
    EXPECT_EQ_U64(now(&c), T + 5 * MINUTE);
    c.wall_ms -= 5 * MINUTE;
    EXPECT(pass(&c, 10) == KV_TIMELINE_NONE);
    EXPECT_EQ_U64(now(&c), T + 10);
    EXPECT_EQ_U64(c.line.jumps, 0);
    /* A machine that slept: both clocks went on. */
    EXPECT(pass(&c, 400 * DAY) == KV_TIMELINE_NONE);
    EXPECT_EQ_U64(now(&c), T + 400 * DAY + 10);
}

static void test_jump(int64_t by_ms)
{
    struct clocks c = fresh(T - DAY, T);
    EXPECT(kv_timeline_judge(&c.line) == KV_TIMELINE_NONE);
    c.wall_ms += (uint64_t)by_ms;
    EXPECT(pass(&c, 1000) == KV_TIMELINE_JUMPED);
    EXPECT_EQ_U64(now(&c), T + 1000);
    EXPECT_EQ_I64(c.line.off_ms, by_ms);
    /* Time goes on as since boot, however often one looks. */
    for (uint32_t i = 0; i < 59 * 60; i++)
        EXPECT(pass(&c, 1000) == KV_TIMELINE_NONE);
    EXPECT_EQ_U64(now(&c), T + 1000 + 59 * MINUTE);
    EXPECT_EQ_U64(c.line.floor_ms, 0);

    struct clocks back = c; /* Put right in time: as if nothing had been. */
    back.wall_ms -= (uint64_t)by_ms;
    EXPECT(pass(&back, 1000) == KV_TIMELINE_BACK);
    EXPECT_EQ_U64(now(&back), T + 2000 + 59 * MINUTE);
    EXPECT(back.line.off_ms == 0 && back.line.floor_ms == 0);

    EXPECT(pass(&c, 2 * MINUTE) == KV_TIMELINE_BELIEVED);
    EXPECT_EQ_U64(now(&c), c.wall_ms);
    EXPECT_EQ_U64(c.line.floor_ms, c.wall_ms);
    EXPECT(c.line.off_ms == 0 && c.line.jumps == 1);
    /* Of both sides: used then. */
    EXPECT_EQ_U64(kv_timeline_used_ms(&c.line, T - DAY), c.wall_ms);
    EXPECT_EQ_U64(kv_timeline_used_ms(&c.line, T), c.wall_ms);
    EXPECT_EQ_U64(kv_timeline_used_ms(&c.line, c.wall_ms + 1), c.wall_ms + 1);
    EXPECT(pass(&c, MINUTE) == KV_TIMELINE_NONE);
}

static void test_jumps(void)
{
    static const int64_t by[] = {6 * 60 * 1000,      80 * 3600 * 1000ll, 5 * (int64_t)YEAR,
                                 10 * (int64_t)YEAR, -6 * 60 * 1000,     -80 * 3600 * 1000ll,
                                 -5 * (int64_t)YEAR, -55 * (int64_t)YEAR}; /* 1971 */
    for (size_t i = 0; i < KV_ARRAY_COUNT(by); i++)
        test_jump(by[i]);
}

/* A clock that never rests is never believed. */
static void test_jumps_again_and_again(void)
{
    struct clocks c = fresh(0, T);
    EXPECT(kv_timeline_judge(&c.line) == KV_TIMELINE_NONE);
    for (uint32_t i = 0; i < 100; i++) {
        c.wall_ms += DAY;
        EXPECT(pass(&c, 50 * MINUTE) == KV_TIMELINE_JUMPED);
    }
    EXPECT_EQ_U64(now(&c), T + 5000 * MINUTE);
    EXPECT_EQ_U64(c.line.jumps, 100);
    EXPECT_EQ_U64(c.line.floor_ms, 0);
}

static void test_start(void)
{
    static const struct {
        uint64_t last_ms, wall_ms;
        bool jumped;
    } starts[] = {
        {0, T, false}, /* Nothing on record. */
        {T, T + 29 * DAY, false},
        {T, T - 4 * MINUTE, false},
        {T, T + 31 * DAY, true},
        {T, T + 5 * YEAR, true},
        {T, T - 6 * MINUTE, true},
        {T, T - 5 * YEAR, true},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(starts); i++) {
        struct clocks c = fresh(starts[i].last_ms, starts[i].wall_ms);
        const bool jumped = kv_timeline_judge(&c.line) == KV_TIMELINE_JUMPED;
        EXPECT(jumped == starts[i].jumped);
        EXPECT_EQ_U64(now(&c), jumped ? T : starts[i].wall_ms);
        EXPECT(pass(&c, 1) == KV_TIMELINE_NONE);
        EXPECT_EQ_U64(c.line.jumps, jumped);
        if (!jumped) continue;
        EXPECT(pass(&c, 61 * MINUTE) == KV_TIMELINE_BELIEVED);
        EXPECT_EQ_U64(kv_timeline_used_ms(&c.line, T), c.wall_ms);
    }
}

/* What was written while the clock was ahead does not make every later start one with a jump, and
 * does not live until that time comes. */
static void test_start_after_a_wrong_future(void)
{
    struct kv_timeline line;
    kv_timeline_begin(&line, T + DAY, 0, T, T + 5 * YEAR);
    kv_timeline_saw(&line, T + 5 * YEAR);
    kv_timeline_saw(&line, T + DAY / 2);
    EXPECT(kv_timeline_judge(&line) == KV_TIMELINE_NONE);
    EXPECT_EQ_U64(kv_timeline_used_ms(&line, T + 5 * YEAR), T + DAY);
    EXPECT_EQ_U64(kv_timeline_used_ms(&line, T - 1), T);
    EXPECT_EQ_U64(kv_timeline_used_ms(&line, T + DAY / 2), T + DAY / 2);
}

/* Of a jump ahead that was believed the uses before it are old, and the clock is right. */
static void test_start_after_a_jump_ahead(void)
{
    struct kv_timeline line;
    kv_timeline_begin(&line, T + DAY, 0, T, T - 5 * YEAR);
    kv_timeline_saw(&line, T - 5 * YEAR);
    EXPECT(kv_timeline_judge(&line) == KV_TIMELINE_NONE);
    EXPECT_EQ_U64(kv_timeline_used_ms(&line, T - 5 * YEAR), T);
    /* And one that is set back again is not. */
    kv_timeline_begin(&line, T - 5 * YEAR, 0, T, T - 5 * YEAR);
    EXPECT(kv_timeline_judge(&line) == KV_TIMELINE_JUMPED);
    EXPECT_EQ_U64(line.now_ms, T);
}

/* A wrong clock was believed for years it never saw; rows of its time are young when it is right.
 */
static void test_start_after_a_jump_back(void)
{
    struct kv_timeline line;
    kv_timeline_begin(&line, T + DAY, 0, T - 5 * YEAR, T);
    kv_timeline_saw(&line, T - DAY);
    kv_timeline_saw(&line, T);
    kv_timeline_saw(&line, T - 5 * YEAR + DAY);
    EXPECT(kv_timeline_judge(&line) == KV_TIMELINE_JUMPED);
    EXPECT_EQ_U64(line.now_ms, T - 5 * YEAR + DAY);
    EXPECT_EQ_U64(kv_timeline_used_ms(&line, T - DAY), line.begun_ms);
}

int main(void)
{
    test_small_steps_are_followed();
    test_jumps();
    test_jumps_again_and_again();
    test_start();
    test_start_after_a_wrong_future();
    test_start_after_a_jump_ahead();
    test_start_after_a_jump_back();
    HARNESS_END();
}
