/*
 * Counters of calls by method and status, and how long calls took.
 *
 * Both label sets are small and closed: methods of a table and the 17 status codes.  Only pairs
 * that have happened are shown.
 */

#include "cached/rpc/rpc_stats.h"

#include "kvstore/format/reason.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void rpc_stats_add(struct rpc_stats *stats, unsigned method, unsigned code, uint64_t duration_ns)
{
    assert(method < RPC_METHOD_COUNT);
    assert(code < RPC_CODES);
    stats->answers[method][code]++;
    kv_histogram_add(&stats->durations_ns[method], duration_ns);
}

static uint64_t rss_bytes(void)
{
    char text[128];
    const int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t got = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    if (got <= 0) return 0;
    text[got] = '\0';
    const char *resident = strchr(text, ' '); /* "size resident shared ...", in pages. */
    if (resident == NULL) return 0;
    return strtoull(resident, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static const char *label_text(struct kv_arena *arena, unsigned method, unsigned code)
{
    char text[96];
    const int used = snprintf(text, sizeof(text), "method=\"%s\",code=\"%s\"",
                              rpc_method_at(method)->name, kv_reason_code_name((int)code));
    return kv_arena_strdup(arena, text, (size_t)used);
}

static const char *latency_text(struct kv_arena *arena, unsigned method)
{
    char text[96];
    const int used = snprintf(text, sizeof(text), "cached_rpc_duration_seconds{method=\"%s\"}",
                              rpc_method_at(method)->name);
    return kv_arena_strdup(arena, text, (size_t)used);
}

static void fill_counters(const struct rpc_stats *stats, struct kv_arena *arena,
                          struct rpc_snapshot *snapshot)
{
    for (unsigned method = 0; method < RPC_METHOD_COUNT; method++) {
        for (unsigned code = 0; code < RPC_CODES; code++) {
            if (stats->answers[method][code] == 0) continue;
            snapshot->counters[snapshot->counter_count++] = (struct request_counter){
                .name = "cached_requests_total",
                .labels = label_text(arena, method, code),
                .help = "Calls answered, by method and gRPC status.",
                .value = (double)stats->answers[method][code],
            };
        }
    }
}

#define CONNECTION_COUNTERS 5u

static void fill_connections(const struct rpc_accept_counts *counts, struct rpc_snapshot *snapshot)
{
    static const char refused_help[] = "Connections closed because nothing could be kept for them.";
    const struct request_counter counters[CONNECTION_COUNTERS] = {
        {"cached_connections", NULL, "Connections that are open.", (double)counts->open},
        {"cached_connections_total", NULL, "Connections taken.", (double)counts->accepted},
        {"cached_connections_refused_total", "cause=\"limit\"", refused_help,
         (double)counts->refused_limit},
        {"cached_connections_refused_total", "cause=\"descriptors\"", refused_help,
         (double)counts->refused_files},
        {"cached_connections_refused_total", "cause=\"silent\"", refused_help,
         (double)counts->closed_silent},
    };
    for (uint32_t i = 0; i < CONNECTION_COUNTERS; i++)
        snapshot->counters[snapshot->counter_count++] = counters[i];
}

static void fill_latencies(const struct rpc_stats *stats, struct kv_arena *arena,
                           struct rpc_snapshot *snapshot)
{
    for (unsigned method = 0; method < RPC_METHOD_COUNT; method++) {
        const struct kv_histogram *histogram = &stats->durations_ns[method];
        if (histogram->count == 0) continue;
        snapshot->latencies[snapshot->latency_count++] = (struct request_latency){
            .name = latency_text(arena, method),
            .count = histogram->count,
            .p50_ms = (double)kv_histogram_quantile(histogram, 0.50) / 1e6,
            .p99_ms = (double)kv_histogram_quantile(histogram, 0.99) / 1e6,
            .max_ms = (double)histogram->max / 1e6,
        };
    }
}

struct rpc_snapshot *rpc_stats_snapshot(const struct rpc_stats *stats,
                                        const struct rpc_accept_counts *connections,
                                        struct kv_arena *arena)
{
    struct rpc_snapshot *snapshot = kv_arena_alloc(arena, sizeof(*snapshot));
    if (snapshot == NULL) return NULL;
    snapshot->counters = kv_arena_alloc(
        arena, (RPC_METHOD_COUNT * RPC_CODES + CONNECTION_COUNTERS) * sizeof(*snapshot->counters));
    snapshot->latencies = kv_arena_alloc(arena, RPC_METHOD_COUNT * sizeof(*snapshot->latencies));
    if (snapshot->counters == NULL || snapshot->latencies == NULL) return NULL;
    fill_counters(stats, arena, snapshot);
    fill_connections(connections, snapshot);
    fill_latencies(stats, arena, snapshot);
    snapshot->requests_inflight = stats->requests_inflight;
    snapshot->rss_bytes = rss_bytes();
    return snapshot;
}

struct request_stats *rpc_stats_starting(struct kv_arena *arena, const char *phase,
                                         uint32_t percent)
{
    char health[96];
    const int used =
        snprintf(health, sizeof(health), "starting: %s, %" PRIu32 " %%", phase, percent);
    struct request_stats *stats = kv_arena_alloc(arena, sizeof(*stats));
    if (stats == NULL) return NULL;
    *stats = (struct request_stats){
        .arena = arena,
        .health = kv_arena_strdup(arena, health, (size_t)used),
        .start_phase = phase,
        .start_percent = percent,
    };
    return stats;
}
