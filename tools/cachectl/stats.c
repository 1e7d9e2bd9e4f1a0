/*
 * `cachectl stats`: every number the daemon keeps, with what it means.  Names and units are those
 * of the metrics, so a number seen here can be looked up there.
 */

#include "tools/cachectl/stats.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

int stats_fetch(struct client *client, Cached__Admin__V1__GetStatsResponse **ret_stats)
{
    Cached__Admin__V1__GetStatsRequest request = CACHED__ADMIN__V1__GET_STATS_REQUEST__INIT;
    struct client_failure failure;

    if (client_call(client, CLIENT_GET_STATS, &request.base, ret_stats, &failure)) return 0;
    return ctl_failure(&failure);
}

double stats_sum(const Cached__Admin__V1__GetStatsResponse *stats, const char *name,
                 const char *label)
{
    double sum = 0;

    for (size_t i = 0; i < stats->n_counters; i++) {
        const Cached__Admin__V1__Counter *counter = stats->counters[i];
        if (strcmp(counter->name, name) != 0) continue;
        if (label && !strstr(counter->labels, label)) continue;
        sum += counter->value;
    }
    return sum;
}

static int print_json(const Cached__Admin__V1__GetStatsResponse *stats)
{
    json_t *counters = json_array();
    json_t *latencies = json_array();

    for (size_t i = 0; i < stats->n_counters; i++) {
        const Cached__Admin__V1__Counter *c = stats->counters[i];
        (void)json_array_append_new(counters,
                                    json_pack("{s:s, s:s, s:f, s:s}", "name", c->name, "labels",
                                              c->labels, "value", c->value, "help", c->help));
    }
    for (size_t i = 0; i < stats->n_latencies; i++) {
        const Cached__Admin__V1__LatencyStats *l = stats->latencies[i];
        (void)json_array_append_new(latencies,
                                    json_pack("{s:s, s:I, s:f, s:f, s:f}", "name", l->name, "count",
                                              (json_int_t)l->count, "p50_ms", l->p50_ms, "p99_ms",
                                              l->p99_ms, "max_ms", l->max_ms));
    }
    return out_json_take(json_pack("{s:o, s:o}", "counters", counters, "latencies", latencies));
}

static void print_table(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *stats)
{
    static const char *const counter_names[] = {"COUNTER", "LABELS", "VALUE", "HELP"};
    static const char *const latency_names[] = {"LATENCY", "COUNT", "P50_MS", "P99_MS", "MAX_MS"};
    struct out_table table;

    out_table_init(&table, counter_names, KV_ARRAY_COUNT(counter_names), 1u << 2);
    for (size_t i = 0; i < stats->n_counters; i++) {
        const Cached__Admin__V1__Counter *c = stats->counters[i];
        const bool whole = c->value == (double)(int64_t)c->value;
        out_table_cell(&table, "%s", c->name);
        out_table_cell(&table, "%s", c->labels);
        out_table_cell(&table, "%.*f", whole ? 0 : 6, c->value);
        out_table_cell(&table, "%s", c->help);
    }
    out_table_print(ctl, &table);
    if (stats->n_latencies == 0) return;

    (void)putchar('\n');
    out_table_init(&table, latency_names, KV_ARRAY_COUNT(latency_names), 0x1e);
    for (size_t i = 0; i < stats->n_latencies; i++) {
        const Cached__Admin__V1__LatencyStats *l = stats->latencies[i];
        out_table_cell(&table, "%s", l->name);
        out_table_cell(&table, "%" PRIu64, l->count);
        out_table_cell(&table, "%.3f", l->p50_ms);
        out_table_cell(&table, "%.3f", l->p99_ms);
        out_table_cell(&table, "%.3f", l->max_ms);
    }
    out_table_print(ctl, &table);
}

int stats_run(struct ctl *ctl, const struct command *command, int argc, char **argv,
              stats_json json, stats_text text)
{
    Cached__Admin__V1__GetStatsResponse *stats = NULL;
    struct client *client = NULL;
    int code = 0;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code == 0) code = stats_fetch(client, &stats);
    if (code == 0 && ctl->json) {
        code = json(stats);
    } else if (code == 0) {
        text(ctl, stats);
    }
    client_free(stats);
    client_destroy(client);
    return code;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    return stats_run(ctl, command, argc, argv, print_json, print_table);
}

const struct command command_stats = {
    .name = "stats",
    .arguments = "",
    .summary = "all counters and latencies, each with its meaning",
    .details = "Needs a token with role ops or stats.",
    .example = "cachectl stats --json",
    .run = run,
};
