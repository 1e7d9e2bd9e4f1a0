#pragma once

/* GetStats: fetching it, and sums over its counters. */

#include "tools/cachectl/ctl.h"

/* 0 and *ret_stats (give to client_free), or the exit code with the sentence printed. */
int stats_fetch(struct client *client, Cached__Admin__V1__GetStatsResponse **ret_stats);

/* Sum of all counters of that name whose labels contain `label` (NULL: all). */
double stats_sum(const Cached__Admin__V1__GetStatsResponse *stats, const char *name,
                 const char *label);
