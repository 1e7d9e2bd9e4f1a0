/*
 * Ratios of pairs and whether they keep a target.
 *
 * A median ratio of a difference that was negative in some pair looks better than any target; so
 * such a line gets no verdict but "not measurable".
 */

#include "tools/cachectl/bench_ratio.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_median(const double *values, uint32_t count)
{
    double sorted[BENCH_PAIRS_MAX];
    assert(count >= 1 && count <= BENCH_PAIRS_MAX);
    memcpy(sorted, values, count * sizeof(*values));
    qsort(sorted, count, sizeof(*sorted), compare);
    return count % 2 == 1 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

struct bench_ratio bench_ratio_of(const double *ratios, const double *seconds,
                                  const double *anchor_seconds, uint32_t count)
{
    struct bench_ratio ratio = {.median = bench_median(ratios, count),
                                .min = ratios[0],
                                .max = ratios[0],
                                .measurable = true};
    for (uint32_t i = 0; i < count; i++) {
        ratio.min = KV_MIN(ratio.min, ratios[i]);
        ratio.max = KV_MAX(ratio.max, ratios[i]);
        ratio.measurable = ratio.measurable && seconds[i] > 0 && anchor_seconds[i] > 0;
    }
    return ratio;
}

bool bench_ratio_met(const struct bench_ratio *ratio, double target, bool at_least)
{
    if (!ratio->measurable) return false;
    return at_least ? ratio->median >= target : ratio->median <= target;
}

const char *bench_ratio_verdict(const struct bench_ratio *ratio, double target, bool at_least)
{
    if (!ratio->measurable) return "not measurable in this run";
    if (!(target > 0)) return "";
    return bench_ratio_met(ratio, target, at_least) ? "met" : "missed";
}
