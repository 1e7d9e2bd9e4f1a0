/*
 * Histograms.
 *
 * Goal: the bucket of every value is the one its edge says, the error of a quantile is at most a
 * quarter, and the ends of uint64_t do not wrap.
 */

#include "kvstore/base/metric.h"
#include "tests/harness.h"

static uint64_t edge_of(uint64_t value)
{
    struct kv_histogram histogram = {0};
    kv_histogram_add(&histogram, value);
    histogram.max = UINT64_MAX; /* Do not let the largest value cut the edge. */
    return kv_histogram_quantile(&histogram, 0.5);
}

static void test_edges(void)
{
    EXPECT_EQ_U64(edge_of(0), 0);
    EXPECT_EQ_U64(edge_of(3), 3);
    EXPECT_EQ_U64(edge_of(4), 4);
    EXPECT_EQ_U64(edge_of(7), 7);
    EXPECT_EQ_U64(edge_of(8), 9);
    EXPECT_EQ_U64(edge_of(10), 11);
    EXPECT_EQ_U64(edge_of(16), 19);
    EXPECT_EQ_U64(edge_of(1000000), 1048575);
    EXPECT_EQ_U64(edge_of(UINT64_MAX), UINT64_MAX);
    EXPECT_EQ_U64(edge_of(1ull << 63), (1ull << 63) + (1ull << 61) - 1);
    for (uint64_t value = 1; value < UINT64_MAX / 3; value = value * 3 / 2 + 1) {
        const uint64_t edge = edge_of(value);
        EXPECT(edge >= value);
        EXPECT(edge - value <= value / 4);
        EXPECT_EQ_U64(edge_of(edge), edge);
        EXPECT(edge_of(edge + 1) > edge);
    }
}

static void test_quantiles(void)
{
    struct kv_histogram histogram = {0};
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 0.99), 0);
    for (uint64_t value = 1; value <= 1000; value++)
        kv_histogram_add(&histogram, value);
    EXPECT_EQ_U64(histogram.count, 1000);
    EXPECT_EQ_U64(histogram.sum, 500500);
    EXPECT_EQ_U64(histogram.max, 1000);
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 0.0), 1);
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 0.5), 511);
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 0.99), 1000);
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 1.0), 1000);

    histogram = (struct kv_histogram){0};
    for (int i = 0; i < 99; i++)
        kv_histogram_add(&histogram, 5);
    kv_histogram_add(&histogram, 1u << 20);
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 0.99), 5);
    EXPECT_EQ_U64(kv_histogram_quantile(&histogram, 0.999), 1u << 20);
}

int main(void)
{
    test_edges();
    test_quantiles();
    HARNESS_END();
}
