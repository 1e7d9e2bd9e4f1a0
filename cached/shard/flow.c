/*
 * What every flow does: find and claim its session, wait for its tree, give everything back, reply.
 *
 * A flow lives in its request's arena.  It is in the shard's list from dispatch to flow_finish(),
 * which is the one place that releases what it holds: pinned pages, pool slots, the session.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

static bool is_late(const struct flow *flow)
{
    const uint64_t deadline_ns = flow->req->deadline_ns;
    return deadline_ns != 0 && kv_clock_stopwatch_ns() > deadline_ns;
}

bool flow_is_over(const struct flow *flow)
{
    if (atomic_load(&flow->shard->stopping) || flow->closed) return true;
    if (answers_wanted(flow)) return false;
    return is_late(flow) || atomic_load(&flow->req->cancelled);
}

bool flow_cancelled(struct flow *flow)
{
    enum kv_reason why = KV_REASON_CANCELLED;
    if (!flow_is_over(flow)) return false;
    if (atomic_load(&flow->shard->stopping))
        why = KV_REASON_SHUTTING_DOWN;
    else if (is_late(flow))
        why = KV_REASON_DEADLINE;
    flow_fail(flow, why, NULL, NULL, NULL);
    return true;
}

uint64_t flow_job_deadline(const struct flow *flow)
{
    return flow->answer == NULL ? flow->req->deadline_ns : 0;
}

void flow_close(struct flow *flow)
{
    if (!flow->closed) flow->shard->look_now = true; /* It may only wait. */
    flow->closed = true;
    atomic_store(&flow->stop, true);
}

void flow_fail(struct flow *flow, enum kv_reason reason, const char *field, const char *limit,
               const char *value)
{
    if (flow->failed) return; /* The first failure is the one that is told. */
    flow->failed = true;
    request_fail(flow->req, reason, field, limit, value, NULL);
}

void flow_fail_status(struct flow *flow, kv_status status)
{
    switch (status) {
    case KV_BUSY:
        flow_fail(flow, KV_REASON_INDEX_FULL, "index.ram", NULL, NULL);
        break;
    case KV_NOMEM:
        flow_fail(flow, KV_REASON_QUEUE_FULL, "memory", NULL, NULL);
        flow->req->out.failure.retry_ms = 1000;
        break;
    case KV_SHUTDOWN:
        flow_fail(flow, KV_REASON_SHUTTING_DOWN, NULL, NULL, NULL);
        break;
    default:
        flow_fail(flow, KV_REASON_INTERNAL, "status", NULL, kv_status_name(status));
        break;
    }
}

void flow_fail_job(struct flow *flow)
{
    if (flow->job.status == KV_CORRUPT) {
        flow_fail(flow, KV_REASON_INTERNAL, "engine", NULL, "a verified window was refused");
    } else if (flow->job.status == KV_IO) {
        shard_look_at_health(flow->shard); /* It says so when the answer does. */
        flow_fail(flow, KV_REASON_MODEL_LOST, "engine.model_dir", NULL, NULL);
    } else if (!flow_cancelled(flow)) {
        flow_fail(flow, KV_REASON_CANCELLED, NULL, NULL, NULL);
    }
}

bool flow_stale_epoch(struct flow *flow)
{
    struct request *req = flow->req;
    if (req->in.epoch == 0 || req->in.epoch == flow->session->epoch) return false;
    flow_fail(flow, KV_REASON_STALE_EPOCH, "epoch", request_u64(req, flow->session->epoch),
              request_u64(req, req->in.epoch));
    return true;
}

bool flow_find_session(struct flow *flow)
{
    struct request *req = flow->req;
    /* A session of another user has another id: it is not found, like one that never was. */
    struct kv_session *session = kv_index_session_find(flow->shard->store->index, &req->in.session);
    if (session == NULL && kv_index_entry_find(flow->shard->store->index, &req->in.session)) {
        flow_fail_status(flow, KV_NOMEM);
        return false;
    }
    if (session == NULL) {
        const struct kv_deleted *deleted =
            kv_store_deleted_find(flow->shard->store, &req->in.session);
        flow_fail(flow, KV_REASON_SESSION_NOT_FOUND, "session_id", NULL,
                  deleted != NULL ? kv_reason_info(deleted->record.cause)->name
                                  : req->in.session_name);
        return false;
    }
    if (session->deleting) {
        flow_fail(flow, KV_REASON_SESSION_BUSY, "session_id", NULL, req->in.session_name);
        req->out.failure.retry_ms = 50;
        return false;
    }
    /* Rollback and Compact raise the epoch: repeated after a lost answer they still carry the old
     * one, and where the head stands decides. */
    const bool rollback_again =
        (req->method == REQUEST_ROLLBACK || req->method == REQUEST_COMPACT) &&
        req->in.epoch + 1 == session->epoch;
    if (req->in.epoch != 0 && req->in.epoch != session->epoch && !rollback_again) {
        flow_fail(flow, KV_REASON_STALE_EPOCH, "epoch", request_u64(req, session->epoch),
                  request_u64(req, req->in.epoch));
        return false;
    }
    flow->session = session;
    flow->session->flows++;
    req->out.epoch = flow->session->epoch;
    flow->session->tree->touched_seq = ++flow->shard->store->touch_seq;
    return true;
}

bool flow_claim_session(struct flow *flow)
{
    if (flow->session->busy != NULL) {
        flow_fail(flow, KV_REASON_SESSION_BUSY, "session_id", NULL, flow->req->in.session_name);
        flow->req->out.failure.retry_ms = 50;
        return false;
    }
    flow->session->busy = flow;
    flow->holds_session = true;
    return true;
}

void flow_wake_loaded(struct kv_session *session, kv_status status)
{
    struct flow *waiter = session->tree->waiters;
    session->tree->waiters = NULL;
    session->tree->waiter_count = 0;
    while (waiter != NULL) {
        struct flow *next = waiter->next_waiter;
        if (status != KV_OK) flow_fail_status(waiter, status);
        waiter->wake(waiter);
        waiter = next;
    }
}

static void loaded(void *context, struct kv_session *session, kv_status status)
{
    (void)context;
    flow_wake_loaded(session, status);
}

enum flow_next flow_load(struct flow *flow)
{
    struct kv_session *session = flow->session;
    if (session->tree->load == KV_LOAD_DONE) return FLOW_NEXT;
    if (session->tree->waiter_count >= KV_REQUESTS_PER_SESSION_MAX) {
        flow_fail(flow, KV_REASON_QUEUE_FULL, "requests waiting for the session",
                  request_u64(flow->req, KV_REQUESTS_PER_SESSION_MAX),
                  request_u64(flow->req, session->tree->waiter_count));
        flow->req->out.failure.retry_ms = 100;
        return FLOW_NEXT;
    }
    flow->next_waiter = session->tree->waiters;
    session->tree->waiters = flow;
    session->tree->waiter_count++;
    if (session->tree->load == KV_LOAD_NONE)
        kv_store_load_start(flow->shard->store, session, loaded, NULL);
    return FLOW_WAIT;
}

static void begin_again(struct flow *flow)
{
    flow_begin(flow, flow->next_step);
}

void flow_begin(struct flow *flow, void (*next_step)(struct flow *flow))
{
    flow->next_step = next_step;
    flow->wake = begin_again;
    /* First of all: who is woken because nobody waits for it must not wait again. */
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow_load(flow) == FLOW_WAIT) return;
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    if (flow->session->tree->commits > 0 && !patience_is_over(flow)) {
        flow->waits_commit = true;
        return;
    }
    flow->req->out.times.queue_ns = kv_clock_stopwatch_ns() - flow->req->out.times.arrived_ns;
    next_step(flow);
}

void flow_unpin_read(struct flow *flow)
{
    for (uint32_t i = 0; i < flow->read_count; i++) {
        if (flow->read_slots[i] != KV_HBM_SLOT_NONE)
            kv_hbm_unpin(flow->shard->store->hbm, flow->read_slots[i]);
    }
    flow->read_count = 0;
}

uint8_t *flow_reserve_image(struct flow *flow, uint32_t at)
{
    struct kv_store *store = flow->shard->store;
    uint32_t *slot = &flow->reserved[at];
    if (kv_pool_reserve(store->pool, kv_store_now_ns(store), slot) != KV_OK) {
        *slot = KV_POOL_SLOT_NONE;
        return NULL;
    }
    return kv_pool_bytes(store->pool, *slot);
}

void flow_fill_checkpoint(struct flow *flow, const struct kv_node *node,
                          struct request_checkpoint *out)
{
    struct kv_store *store = flow->shard->store;
    const uint64_t now_ms = kv_store_now_ms(store);
    const uint64_t age = now_ms > node->used_ms ? now_ms - node->used_ms : 0;
    const uint64_t ttl_ms = kv_index_ttl_ms(node);
    struct kv_pool_ref image = node->image;
    *out = (struct request_checkpoint){
        .id = node->id,
        .has_parent = node->parent != NULL,
        .position = node->tokens,
        .digest = node->digest,
        .kind = (enum request_kind)node->kind,
        .rows_level = node->durable ? LEVEL_SSD : LEVEL_RAM,
        .window_level = LEVEL_NONE,
        .rows_expire_ms = age >= ttl_ms ? 1 : ttl_ms - age,
        .window_expire_ms = kv_pool_ttl_ms(store->pool, &image, kv_store_now_ns(store)),
        .approximate = node->replay_total > 0,
        .approx_from = node->replay_total > 0 ? node->approx_from : 0,
        .kernels = node->kernels,
        .bytes = (uint64_t)node->page_count * store->layout.page_bytes,
        .age_ms = now_ms > node->created_ms ? now_ms - node->created_ms : 0,
    };
    const struct kv_pin *pin = kv_store_pin_find(store, node);
    const uint64_t until_ms = old_branches_until_ms(flow->shard, flow->session, node);
    if (pin != NULL) out->pin_ms = pin->until_ms - now_ms;
    if (until_ms > 0) out->leave_ms = until_ms > now_ms ? until_ms - now_ms : 1;
    if (node->parent != NULL) out->parent = node->parent->id;
    if (out->window_expire_ms > 0) {
        out->window_level = LEVEL_RAM;
        out->bytes += store->layout.image_bytes;
    }
}

static void record_latency(struct flow *flow)
{
    struct kv_histogram *histograms = flow->shard->latencies;
    const struct request_times *times = &flow->req->out.times;
    const uint64_t total = kv_clock_stopwatch_ns() - times->arrived_ns;
    switch (flow->req->method) {
    case REQUEST_PREFILL:
        kv_histogram_add(&histograms[LATENCY_PREFILL], total);
        kv_histogram_add(&histograms[LATENCY_READ], times->read_ns);
        kv_histogram_add(&histograms[LATENCY_RUN], times->run_ns);
        kv_histogram_add(&histograms[LATENCY_QUEUE], times->queue_ns);
        break;
    case REQUEST_DECODE:
        kv_histogram_add(&histograms[LATENCY_DECODE], total);
        kv_histogram_add(&histograms[LATENCY_QUEUE], times->queue_ns);
        break;
    case REQUEST_LOOKUP:
        kv_histogram_add(&histograms[LATENCY_LOOKUP], total);
        break;
    default:
        break;
    }
}

void flow_finish(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct request *req = flow->req;

    assert(flow->commit == NULL && !flow->waits_slot);
    struct flow *joined = answers_end(flow);
    flow_unpin_read(flow);
    if (flow->image_slot != KV_POOL_SLOT_NONE) kv_pool_unpin(shard->store->pool, flow->image_slot);
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(flow->reserved); i++) {
        if (flow->reserved[i] != KV_POOL_SLOT_NONE)
            kv_pool_cancel(shard->store->pool, flow->reserved[i]);
    }
    if (flow->live != NULL) {
        live_give_spare(shard, flow->live);
        flow->live->busy = false;
        flow->live->used_seq = ++shard->used_seq;
    }
    if (flow->slot != NULL) flow->slot->holder = NULL;
    struct kv_session *freed = NULL;
    if (flow->holds_session) {
        freed = flow->session;
        flow->session->busy = NULL;
        if (!flow->failed) flow->session->used_ms = kv_store_now_ms(shard->store);
    }
    if (flow->session != NULL) flow->session->flows--;
    record_latency(flow);
    if (flow->failed) shard->counters.failures++;
    if (flow->prev != NULL) flow->prev->next = flow->next;
    if (flow->next != NULL) flow->next->prev = flow->prev;
    if (shard->flows == flow) shard->flows = flow->next;
    atomic_fetch_sub(&shard->inflight, 1);
    request_reply(req);
    if (freed != NULL) shard_session_freed(shard, freed);
    slots_give(shard);
    answers_wake(joined);
}
