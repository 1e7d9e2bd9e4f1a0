/*
 * Verdicts of benchmarks.
 *
 * Goal: a ratio meets its target by its median, and a line in which a time was not above 0 (a
 * difference of two times that noise turned around) is never told as met.
 * Method: lists of pairs with known medians.  A negative time used to give a ratio below any bound.
 */

#include "tools/cachectl/bench_ratio.h"

#include "kvstore/base/bytes.h"
#include "tests/harness.h"

static struct bench_ratio ratio_of(const double *seconds, const double *anchor, uint32_t count)
{
    double ratios[BENCH_PAIRS_MAX];
    for (uint32_t i = 0; i < count; i++)
        ratios[i] = seconds[i] / anchor[i];
    return bench_ratio_of(ratios, seconds, anchor, count);
}

static void test_the_median_decides(void)
{
    const double seconds[] = {5, 1, 2, 3}, anchor[] = {1, 1, 1, 1};
    const struct bench_ratio four = ratio_of(seconds, anchor, 4);
    EXPECT(four.measurable && four.median > 2.49 && four.median < 2.51);
    EXPECT(four.min == 1 && four.max == 5);
    EXPECT(bench_ratio_met(&four, 2.6, false) && !bench_ratio_met(&four, 2.4, false));
    EXPECT(bench_ratio_met(&four, 2.4, true) && !bench_ratio_met(&four, 2.6, true));
    EXPECT_EQ_STR(bench_ratio_verdict(&four, 2.6, false), "met");
    EXPECT_EQ_STR(bench_ratio_verdict(&four, 2.6, true), "missed");
    EXPECT_EQ_STR(bench_ratio_verdict(&four, 0, false), "");
    const struct bench_ratio one = ratio_of(seconds, anchor, 1);
    EXPECT(one.median == 5 && one.min == 5 && one.max == 5);
}

static void test_noise_is_no_ratio(void)
{
    static const double cases[][2][3] = {
        {{-0.001, -0.002, 0.001}, {1, 1, 1}},                          /* Most are noise. */
        {{0.001, -0.002, 0.001}, {1, 1, 1}},                           /* One is. */
        {{0.001, 0, 0.001}, {1, 1, 1}},       {{1, 1, 1}, {1, -1, 1}}, /* Of the anchor. */
        {{-1, -1, -1}, {-1, -1, -1}},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(cases); i++) {
        const struct bench_ratio ratio = ratio_of(cases[i][0], cases[i][1], 3);
        EXPECT(!ratio.measurable);
        EXPECT(!bench_ratio_met(&ratio, 1.1, false) && !bench_ratio_met(&ratio, 0.1, true));
        EXPECT_EQ_STR(bench_ratio_verdict(&ratio, 1.1, false), "not measurable in this run");
        EXPECT_EQ_STR(bench_ratio_verdict(&ratio, 0, false), "not measurable in this run");
    }
}

int main(void)
{
    test_the_median_decides();
    test_noise_is_no_ratio();
    HARNESS_END();
}
