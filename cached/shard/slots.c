/*
 * Live slots, shared fairly between users.
 *
 * A call that resumes holds one slot of the engine from here to flow_finish().  When all are held
 * by running calls it waits: before anything is matched, read or pinned, so that all it keeps from
 * others meanwhile is its session.  Who goes next is decided in kvstore/plan/admission.c.
 *
 * A slot that becomes free is given away at once, in the same call that freed it, so nobody who
 * comes later can take it first.  The flow that got it goes on from the shard's loop, not inside
 * the end of another flow.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

#define RETRY_MS 200u

static void hold(struct flow *flow, struct live *live)
{
    assert(live->holder == NULL);
    live->holder = flow;
    flow->slot = live;
}

/* The user whose call keeps this slot; NULL: it can be had. */
static const struct kv_user *user_of(const struct live *live)
{
    if (live->holder != NULL) return live->holder->session->user;
    if (live->session != NULL && live->session->busy != NULL) return live->session->user;
    return NULL;
}

uint32_t slots_in_use(const struct shard *shard, const struct kv_user_id *user)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < shard->live_count; i++) {
        const struct kv_user *of = user_of(&shard->lives[i]);
        if (of != NULL && (user == NULL || kv_id_equal(of->id.bytes, user->bytes))) count++;
    }
    return count;
}

static void wake_later(struct flow *flow)
{
    struct shard *shard = flow->shard;
    flow->next_waiter = NULL;
    if (shard->woken_last == NULL)
        shard->woken_first = flow;
    else
        shard->woken_last->next_waiter = flow;
    shard->woken_last = flow;
}

static void refuse(struct flow *flow, const char *field, uint32_t limit)
{
    flow->shard->counters.slot_refused++;
    flow_fail(flow, KV_REASON_QUEUE_FULL, field, request_u64(flow->req, limit),
              request_u64(flow->req, limit));
    flow->req->out.failure.retry_ms = RETRY_MS;
}

static void slot_woken(struct flow *flow)
{
    const uint64_t waited_ns = resume_lap(flow);
    flow->req->out.times.queue_ns += waited_ns;
    kv_histogram_add(&flow->shard->latencies[LATENCY_LIVE_QUEUE], waited_ns);
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    resume_digest(flow);
}

static void enter(struct flow *flow)
{
    struct shard *shard = flow->shard;
    const struct kv_user_id *user = &flow->session->user->id;
    const struct kv_admission entry = kv_admission_enter(&shard->waiting, user);
    switch (entry.kind) {
    case KV_ADMISSION_USER_FULL:
        refuse(flow, "calls of one user waiting for a live session", KV_LIVE_WAITING_PER_USER_MAX);
        break;
    case KV_ADMISSION_FULL:
        refuse(flow, "calls waiting for a live session", KV_LIVE_WAITING_MAX);
        break;
    case KV_ADMISSION_REPLACE: {
        struct flow *leaves = kv_waiting_take(&shard->waiting, entry.at, false);
        leaves->waits_slot = false;
        refuse(leaves, "calls waiting for a live session", KV_LIVE_WAITING_MAX);
        wake_later(leaves);
        break;
    }
    case KV_ADMISSION_WAIT:
        break;
    }
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    shard->counters.slot_waits++;
    flow->waits_slot = true;
    flow->wake = slot_woken;
    flow->mark_ns = kv_clock_stopwatch_ns();
    kv_waiting_push(&shard->waiting, user, flow);
}

void resume_slot(struct flow *flow)
{
    struct shard *shard = flow->shard;
    assert(flow->slot == NULL && flow->holds_session);
    resume_expire_live(flow);
    struct live *live = flow->session->live;
    if (live == NULL && shard->waiting.count == 0) live = live_find(shard);
    if (live == NULL) {
        enter(flow);
        return;
    }
    hold(flow, live);
    resume_digest(flow);
}

void slots_give(struct shard *shard)
{
    struct kv_waiting_queue *queue = &shard->waiting;
    while (queue->count > 0) {
        struct live *live = live_find(shard);
        if (live == NULL) return;
        for (uint32_t i = 0; i < queue->count; i++)
            queue->waiting[i].in_use = slots_in_use(shard, &queue->waiting[i].user);
        const uint32_t at = kv_admission_next(queue->waiting, queue->count);
        struct flow *flow = kv_waiting_take(queue, at, true);
        flow->waits_slot = false;
        hold(flow, live);
        wake_later(flow);
    }
}

void slots_leave(struct flow *flow)
{
    struct kv_waiting_queue *queue = &flow->shard->waiting;
    assert(flow->waits_slot);
    (void)kv_waiting_take(queue, kv_waiting_find(queue, flow), false);
    flow->waits_slot = false;
}

void slots_wake(struct shard *shard)
{
    while (shard->woken_first != NULL) {
        struct flow *flow = shard->woken_first;
        shard->woken_first = flow->next_waiter;
        if (shard->woken_first == NULL) shard->woken_last = NULL;
        flow->wake(flow);
    }
}
