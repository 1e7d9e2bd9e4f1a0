#pragma once

/* What the times of pairs say: decisions of the benchmarks, without any measuring. */

#include <stdbool.h>
#include <stdint.h>

#define BENCH_PAIRS_MAX 64u

/* Median of the pairs' ratios, and their ends.  Not measurable when a time is not above 0: what was
 * timed is a difference then, and the noise of one pair is larger than it. */
struct bench_ratio {
    double median, min, max;
    bool measurable;
};

/* Of `count` values, 1 to BENCH_PAIRS_MAX. */
double bench_median(const double *values, uint32_t count);

/* `ratios` of pairs that took `seconds` and `anchor_seconds`; count as above. */
struct bench_ratio bench_ratio_of(const double *ratios, const double *seconds,
                                  const double *anchor_seconds, uint32_t count);

/* Never, where it is not measurable. */
bool bench_ratio_met(const struct bench_ratio *ratio, double target, bool at_least);

/* "met", "missed", "not measurable in this run"; "" without a target (0). */
const char *bench_ratio_verdict(const struct bench_ratio *ratio, double target, bool at_least);
