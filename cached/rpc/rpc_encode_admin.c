/*
 * Answers of the admin service, and the details of a failure.
 *
 * GetStats is filled from two threads' numbers: the shard's stand in request_out, the rpc thread's
 * in a snapshot it took when the call arrived.
 */

#include "cached/rpc/rpc_encode.h"

#include "admin.pb-c.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "status.pb-c.h"

#include <assert.h>
#include <stdio.h>

#define FILL(message, init)                                                                        \
    do {                                                                                           \
        if ((message) == NULL) return NULL;                                                        \
        *(message) = (__typeof__(*(message)))init;                                                 \
    } while (0)

#define TIERS 3u
#define DETAILS_MAX 3u
#define METADATA_MAX 3u

typedef Cached__Admin__V1__GetStatsResponse pb_stats;

static char *text(const char *value)
{
    return (char *)(value == NULL ? "" : value);
}

static Cached__Admin__V1__TierStats *tier(struct kv_arena *arena, const struct request_tier *t)
{
    Cached__Admin__V1__TierStats *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__TIER_STATS__INIT);
    m->name = text(t->name);
    m->note = text(t->note);
    m->bytes_used = t->bytes_used;
    m->bytes_capacity = t->bytes_capacity;
    m->items_used = t->items_used;
    m->items_capacity = t->items_capacity;
    return m;
}

static Cached__Admin__V1__Counter *counter(struct kv_arena *arena, const struct request_counter *c)
{
    Cached__Admin__V1__Counter *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__COUNTER__INIT);
    m->name = text(c->name);
    m->labels = text(c->labels);
    m->help = text(c->help);
    m->value = c->value;
    return m;
}

static Cached__Admin__V1__LatencyStats *latency(struct kv_arena *arena,
                                                const struct request_latency *l)
{
    Cached__Admin__V1__LatencyStats *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__LATENCY_STATS__INIT);
    m->name = text(l->name);
    m->count = l->count;
    m->p50_ms = l->p50_ms;
    m->p99_ms = l->p99_ms;
    m->max_ms = l->max_ms;
    return m;
}

/* The shard's list, then the rpc thread's. */
static bool fill_lists(struct kv_arena *arena, const struct request_stats *stats,
                       const struct rpc_snapshot *snapshot, pb_stats *m)
{
    const size_t counters = (size_t)stats->counter_count + snapshot->counter_count;
    const size_t latencies = (size_t)stats->latency_count + snapshot->latency_count;
    m->tiers = kv_arena_alloc(arena, TIERS * sizeof(*m->tiers));
    m->counters = kv_arena_alloc(arena, counters * sizeof(*m->counters));
    m->latencies = kv_arena_alloc(arena, latencies * sizeof(*m->latencies));
    if (m->tiers == NULL || m->counters == NULL || m->latencies == NULL) return false;

    for (uint32_t i = 0; i < TIERS; i++) {
        if (stats->tiers[i].name == NULL) continue;
        m->tiers[m->n_tiers] = tier(arena, &stats->tiers[i]);
        if (m->tiers[m->n_tiers++] == NULL) return false;
    }
    for (size_t i = 0; i < counters; i++) {
        m->counters[i] = counter(arena, i < stats->counter_count
                                            ? &stats->counters[i]
                                            : &snapshot->counters[i - stats->counter_count]);
        if (m->counters[i] == NULL) return false;
    }
    for (size_t i = 0; i < latencies; i++) {
        m->latencies[i] = latency(arena, i < stats->latency_count
                                             ? &stats->latencies[i]
                                             : &snapshot->latencies[i - stats->latency_count]);
        if (m->latencies[i] == NULL) return false;
    }
    m->n_counters = counters;
    m->n_latencies = latencies;
    return true;
}

static void fill_numbers(const struct request_stats *stats, pb_stats *m)
{
    m->model_name = text(stats->model_name);
    m->model_fingerprint =
        (ProtobufCBinaryData){sizeof(stats->model.bytes), (uint8_t *)stats->model.bytes};
    m->engine_backend = text(stats->engine_backend);
    m->engine_isa = text(stats->engine_isa);
    m->engine_family = text(stats->engine_family);
    m->io_backend = text(stats->io_backend);
    m->clock_mode = text(stats->clock_mode);
    m->sessions = stats->sessions;
    m->sessions_live = stats->sessions_live;
    m->checkpoints = stats->checkpoints;
    m->recovered_checkpoints = stats->recovered;
    m->dropped_checkpoints = stats->dropped;
    m->rss_budget_bytes = stats->rss_budget_bytes;
    m->health = text(stats->health == NULL ? "serving" : stats->health);
    m->page_bytes = stats->page_bytes;
    m->image_bytes = stats->image_bytes;
    m->bytes_per_token = stats->bytes_per_token;
    m->wrong_bytes = stats->wrong_bytes;
    m->window_tokens = stats->window_tokens;
    m->spare_tokens = stats->spare_tokens;
    m->vocab_tokens = stats->vocab_tokens;
    m->start_phase = text(stats->start_phase);
    m->start_percent = stats->start_percent;
}

const ProtobufCMessage *rpc_encode_stats(struct request *req, const struct rpc_about *about,
                                         const struct rpc_snapshot *snapshot)
{
    assert(req->out.stats != NULL);
    assert(snapshot != NULL);
    pb_stats *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__GET_STATS_RESPONSE__INIT);
    fill_numbers(req->out.stats, m);
    m->version = text(about->version);
    m->commit = text(about->commit);
    m->pid = about->pid;
    m->context_tokens = about->context_tokens;
    m->uptime_ms = (kv_clock_stopwatch_ns() - about->started_ns) / 1000000u;
    m->rss_bytes = snapshot->rss_bytes;
    if (snapshot->trouble != NULL) m->health = text(snapshot->trouble); /* May cause all else. */
    m->requests_inflight = snapshot->requests_inflight;
    return fill_lists(req->arena, req->out.stats, snapshot, m) ? &m->base : NULL;
}

const ProtobufCMessage *rpc_encode_config(struct kv_arena *arena,
                                          const struct rpc_setting *settings, uint32_t count)
{
    Cached__Admin__V1__GetConfigResponse *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__GET_CONFIG_RESPONSE__INIT);
    m->items = kv_arena_alloc(arena, count * sizeof(*m->items));
    if (m->items == NULL) return NULL;
    for (uint32_t i = 0; i < count; i++) {
        m->items[i] = kv_arena_alloc(arena, sizeof(*m->items[i]));
        FILL(m->items[i], CACHED__ADMIN__V1__CONFIG_ITEM__INIT);
        m->items[i]->key = text(settings[i].key);
        m->items[i]->value = text(settings[i].value);
        m->items[i]->origin = text(settings[i].origin);
        m->items[i]->doc = text(settings[i].doc);
    }
    m->n_items = count;
    return &m->base;
}

static ProtobufCBinaryData pack(struct kv_arena *arena, const ProtobufCMessage *message)
{
    ProtobufCBinaryData packed = {protobuf_c_message_get_packed_size(message), NULL};
    packed.data = kv_arena_alloc(arena, packed.len);
    if (packed.data != NULL) (void)protobuf_c_message_pack(message, packed.data);
    return packed;
}

static ProtobufCBinaryData error_info(struct kv_arena *arena, const struct request_failure *failure)
{
    const char *const keys[METADATA_MAX] = {"field", "limit", "value"};
    const char *const values[METADATA_MAX] = {failure->field, failure->limit, failure->value};
    Google__Rpc__ErrorInfo__MetadataEntry entries[METADATA_MAX];
    Google__Rpc__ErrorInfo__MetadataEntry *list[METADATA_MAX];
    Google__Rpc__ErrorInfo info = GOOGLE__RPC__ERROR_INFO__INIT;

    info.reason = text(kv_reason_info(failure->reason)->name);
    info.domain = text("cached");
    info.metadata = list;
    for (unsigned i = 0; i < METADATA_MAX; i++) {
        if (values[i] == NULL) continue;
        Google__Rpc__ErrorInfo__MetadataEntry *entry = &entries[info.n_metadata];
        google__rpc__error_info__metadata_entry__init(entry);
        entry->key = text(keys[i]);
        entry->value = text(values[i]);
        list[info.n_metadata++] = entry;
    }
    return pack(arena, &info.base);
}

static ProtobufCBinaryData retry_info(struct kv_arena *arena, uint32_t retry_ms)
{
    Google__Rpc__RetryInfo__Duration delay = GOOGLE__RPC__RETRY_INFO__DURATION__INIT;
    Google__Rpc__RetryInfo info = GOOGLE__RPC__RETRY_INFO__INIT;
    delay.seconds = retry_ms / 1000;
    delay.nanos = (int32_t)(retry_ms % 1000 * 1000000);
    info.retry_delay = &delay;
    return pack(arena, &info.base);
}

static bool is_of_quota(enum kv_reason reason)
{
    return reason == KV_REASON_QUOTA_SESSIONS || reason == KV_REASON_QUOTA_BYTES_SSD ||
           reason == KV_REASON_QUOTA_REQUESTS || reason == KV_REASON_QUOTA_TOKENS ||
           reason == KV_REASON_QUOTA_SAVES;
}

static ProtobufCBinaryData quota_failure(struct request *req)
{
    const struct request_failure *failure = &req->out.failure;
    Google__Rpc__QuotaFailure__Violation violation = GOOGLE__RPC__QUOTA_FAILURE__VIOLATION__INIT;
    Google__Rpc__QuotaFailure__Violation *list[1] = {&violation};
    Google__Rpc__QuotaFailure quota = GOOGLE__RPC__QUOTA_FAILURE__INIT;
    char subject[KV_USER_NAME_MAX + 8], description[128];
    (void)snprintf(subject, sizeof(subject), "user:%s",
                   req->user_name == NULL ? "" : req->user_name);
    (void)snprintf(description, sizeof(description), "%.40s limit=%.24s value=%.24s",
                   text(failure->field), text(failure->limit), text(failure->value));
    violation.subject = subject;
    violation.description = description;
    quota.violations = list;
    quota.n_violations = 1;
    return pack(req->arena, &quota.base);
}

struct kv_bytes rpc_encode_failure(struct request *req)
{
    const struct request_failure *failure = &req->out.failure;
    Google__Rpc__Status status = GOOGLE__RPC__STATUS__INIT;
    Google__Rpc__Any any[DETAILS_MAX];
    Google__Rpc__Any *details[DETAILS_MAX];
    size_t count = 1;

    assert(failure->failed);
    for (size_t i = 0; i < DETAILS_MAX; i++) {
        google__rpc__any__init(&any[i]);
        details[i] = &any[i];
    }
    any[0].type_url = text("type.googleapis.com/google.rpc.ErrorInfo");
    any[0].value = error_info(req->arena, failure);
    if (failure->retry_ms > 0) {
        any[count].type_url = text("type.googleapis.com/google.rpc.RetryInfo");
        any[count++].value = retry_info(req->arena, failure->retry_ms);
    }
    if (is_of_quota(failure->reason)) {
        any[count].type_url = text("type.googleapis.com/google.rpc.QuotaFailure");
        any[count++].value = quota_failure(req);
    }
    for (size_t i = 0; i < count; i++)
        if (any[i].value.data == NULL) return (struct kv_bytes){NULL, 0};

    status.code = kv_reason_info(failure->reason)->grpc_code;
    status.message = text(failure->text);
    status.n_details = count;
    status.details = details;
    const ProtobufCBinaryData packed = pack(req->arena, &status.base);
    return (struct kv_bytes){packed.data, packed.data == NULL ? 0 : packed.len};
}
