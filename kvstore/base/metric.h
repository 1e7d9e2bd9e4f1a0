#pragma once

/* Histogram of durations or sizes with power-of-two-ish buckets.  Owned by one thread; a reader on
 * another thread asks the owner by message.  Counters are plain uint64_t fields of their owner. */

#include <stdint.h>

#define KV_HISTOGRAM_BUCKETS 256u

struct kv_histogram {
    uint64_t counts[KV_HISTOGRAM_BUCKETS]; /* 4 buckets per power of two. */
    uint64_t count;
    uint64_t sum;
    uint64_t max;
};

void kv_histogram_add(struct kv_histogram *histogram, uint64_t value);

/* Upper edge of the bucket that holds quantile q (0..1); 0 when empty. */
uint64_t kv_histogram_quantile(const struct kv_histogram *histogram, double q);
