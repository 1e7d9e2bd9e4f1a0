#pragma once

/* What the rpc thread counts about calls.  Owned by: rpc. */

#include "cached/request.h"
#include "cached/rpc/rpc_accept.h"
#include "cached/rpc/rpc_method.h"
#include "kvstore/base/metric.h"

#define RPC_CODES 17u /* gRPC status codes are 0 to 16. */

struct rpc_stats {
    struct kv_histogram durations_ns[RPC_METHOD_COUNT];
    uint64_t answers[RPC_METHOD_COUNT][RPC_CODES];
    uint64_t requests_inflight; /* With the shard. */
};

void rpc_stats_add(struct rpc_stats *stats, unsigned method, unsigned code, uint64_t duration_ns);

/* A copy for one GetStats answer, in the request's arena: the answer is written on the shard
 * thread, which must not read what the rpc thread writes. */
struct rpc_snapshot {
    struct request_counter *counters;
    uint32_t counter_count;
    struct request_latency *latencies;
    uint32_t latency_count;
    uint64_t requests_inflight;
    uint64_t rss_bytes;
    const char *trouble; /* Of connections; NULL: none. */
};

/* What GetStats can say before there is a shard.  phase is static.  NULL: as below. */
struct request_stats *rpc_stats_starting(struct kv_arena *arena, const char *phase,
                                         uint32_t percent);

/* NULL: the arena is exhausted. */
struct rpc_snapshot *rpc_stats_snapshot(const struct rpc_stats *stats,
                                        const struct rpc_accept_counts *connections,
                                        struct kv_arena *arena);
