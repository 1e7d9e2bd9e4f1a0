#pragma once

/* GetStats: fetching it, and sums over its counters. */

#include "tools/cachectl/ctl.h"

/* 0 and *ret_stats (give to client_free), or the exit code with the sentence printed. */
int stats_fetch(struct client *client, Cached__Admin__V1__GetStatsResponse **ret_stats);

/* Sum of all counters of that name whose labels contain `label` (NULL: all). */
double stats_sum(const Cached__Admin__V1__GetStatsResponse *stats, const char *name,
                 const char *label);

typedef int (*stats_json)(const Cached__Admin__V1__GetStatsResponse *stats); /* An exit code. */
typedef void (*stats_text)(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *stats);

/* A command without flags of its own that fetches the statistics and prints them one way or the
 * other, as --json says.  The exit code. */
int stats_run(struct ctl *ctl, const struct command *command, int argc, char **argv,
              stats_json json, stats_text text);
