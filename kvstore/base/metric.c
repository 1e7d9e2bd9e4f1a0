/*
 * Histogram with four buckets per power of two: any quantile is known to within 25 %, over the
 * whole range of uint64_t, in 2 KiB.
 *
 * Values 0..3 have a bucket each.  From 4 on, with 2^e <= value < 2^(e+1), the bucket is
 * 4 * (e - 1) + (the two bits below the leading one): 4 -> 4, 5 -> 5, 8..9 -> 8, 10..11 -> 9, ...,
 * 2^63 + 3 * 2^61 and up -> 251.
 */

#include "kvstore/base/metric.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdbool.h>

static uint32_t bucket_of(uint64_t value)
{
    if (value < 4) return (uint32_t)value;
    const uint32_t exponent = 63u - (uint32_t)__builtin_clzll(value);
    const uint32_t below = (uint32_t)(value >> (exponent - 2)) & 3u;
    return 4u * (exponent - 1u) + below;
}

/* Largest value of a bucket.  Bucket 251: 8 << 61 wraps to 0 and the edge is UINT64_MAX. */
static uint64_t bucket_edge(uint32_t bucket)
{
    if (bucket < 4) return bucket;
    const uint32_t exponent = bucket / 4u + 1u;
    return ((4u + (uint64_t)(bucket % 4u) + 1u) << (exponent - 2u)) - 1u;
}

void kv_histogram_add(struct kv_histogram *histogram, uint64_t value)
{
    histogram->counts[bucket_of(value)]++;
    histogram->count++;
    histogram->sum += value;
    histogram->max = KV_MAX(histogram->max, value);
}

uint64_t kv_histogram_quantile(const struct kv_histogram *histogram, double q)
{
    assert(q >= 0.0 && q <= 1.0);
    if (histogram->count == 0) return 0;

    /* The rank is 1..count: q = 0 is the smallest value, q = 1 the largest. */
    uint64_t rank = (uint64_t)(q * (double)histogram->count);
    if ((double)rank < q * (double)histogram->count) rank++;
    rank = KV_MIN(KV_MAX(rank, 1u), histogram->count);

    uint64_t seen = 0;
    for (uint32_t bucket = 0; bucket < KV_HISTOGRAM_BUCKETS; bucket++) {
        seen += histogram->counts[bucket];
        /* No value of the top bucket is above max, so max is its edge. */
        if (seen >= rank) return KV_MIN(bucket_edge(bucket), histogram->max);
    }
    assert(false);
    return histogram->max;
}
