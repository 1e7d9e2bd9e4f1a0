/*
 * Resume, third part: pages into memory, then a live session that stands ready.
 *
 * Room for the whole call is made before anything is read.  Each page is compared with what the
 * index and the prompt say before it enters the live session's table; one that differs, or cannot
 * be read, weakens the plan.  The page the head is in is copied, because it will be written.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <string.h>

static void stage_prepare(struct flow *flow);

const char *flow_hbm_tokens(struct flow *flow)
{
    const struct kv_hbm_usage usage = kv_hbm_usage(flow->shard->store->hbm);
    return request_u64(flow->req, (uint64_t)usage.slots * KV_PAGE_TOKENS);
}

static void hbm_full(struct flow *flow)
{
    const struct kv_hbm_usage usage = kv_hbm_usage(flow->shard->store->hbm);
    flow_fail(flow, KV_REASON_HBM_FULL, "hbm.bytes", flow_hbm_tokens(flow),
              request_u64(flow->req, (uint64_t)flow->count + flow->extra_tokens));
    /* What can never fit is not to be tried again. */
    const bool fits = kv_pages_for(flow->count + flow->extra_tokens) + 2 <= usage.slots;
    if (fits) flow->req->out.failure.retry_ms = 1000;
    if (flow->live != NULL && flow->live->state.tokens == 0) {
        /* Nothing stands in it: the head is the last checkpoint. */
        flow->live->busy = false;
        live_release(flow->shard, flow->live);
        flow->live = NULL;
    }
    flow_finish(flow);
}

/* Compares page k, while others are still on their way. */
static void row_arrived(struct kv_read *read, uint32_t k)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    const uint32_t start = k * KV_PAGE_TOKENS;
    const uint32_t tokens = KV_MIN(KV_PAGE_TOKENS, flow->plan.restore_tokens - start);
    flow->read_status[k] = kv_store_read_check(read, k, &flow->chain[k], flow->ids + start, tokens);
}

/* One that went meanwhile, with checkpoints of another session, kept its entry until here. */
static void let_pages_go(struct flow *flow)
{
    for (uint32_t k = 0; k < flow->read.count; k++)
        kv_index_page_unref(flow->shard->store->index, flow->read_pages[k]);
}

/* Gives back what was read, and the slot's place in the session. */
static void let_rows_go(struct flow *flow)
{
    let_pages_go(flow);
    flow_unpin_read(flow);
    if (flow->image_slot != KV_POOL_SLOT_NONE) {
        kv_pool_unpin(flow->shard->store->pool, flow->image_slot);
        flow->image_slot = KV_POOL_SLOT_NONE;
    }
    flow->req->out.ssd_tokens = flow->req->out.hbm_tokens = 0;
    flow->live->busy = false;
    live_release(flow->shard, flow->live);
    flow->live = NULL;
}

static void rows_read(struct kv_read *read)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    const uint32_t h = flow->plan.restore_tokens;

    flow->req->out.times.read_ns += resume_lap(flow);
    if (resume_is_stale(flow)) {
        let_rows_go(flow);
        resume_match(flow);
        return;
    }
    for (uint32_t k = 0; k < read->count; k++) {
        const uint32_t start = k * KV_PAGE_TOKENS;
        const uint32_t tokens = KV_MIN(KV_PAGE_TOKENS, h - start);
        if (flow->read_fresh[k])
            flow->req->out.ssd_tokens += tokens;
        else
            flow->req->out.hbm_tokens += tokens;
        const uint32_t page = flow->read_pages[k];
        if (flow->read_status[k] == KV_STATUS_COUNT) row_arrived(read, k); /* Was in memory. */
        const kv_status status = flow->read_status[k];
        if (status == KV_OK) continue;
        let_rows_go(flow);
        resume_weaken(flow, page, start, status);
        return;
    }
    const kv_status installed =
        live_install(flow->shard, flow->live, flow->read_pages, flow->read_slots, read->count);
    let_pages_go(flow);
    if (installed != KV_OK) {
        hbm_full(flow);
        return;
    }
    flow->read_count = 0; /* The live table holds the pins now. */
    live_follow(flow->live, flow->node, h);
    stage_prepare(flow);
}

static void read_path(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const uint32_t count = kv_pages_for(flow->plan.restore_tokens);
    kv_index_path_pages(flow->node, flow->plan.restore_tokens, flow->read_pages);
    flow->read = (struct kv_read){.count = count,
                                  .pages = flow->read_pages,
                                  .slots = flow->read_slots,
                                  .fresh = flow->read_fresh,
                                  .arrived = row_arrived,
                                  .done = rows_read};
    for (uint32_t k = 0; k < count; k++)
        flow->read_status[k] = KV_STATUS_COUNT;
    const kv_status status = kv_store_read_start(store, &flow->read);
    if (status == KV_OK || status == KV_MISS) {
        flow->read_count = count;
        for (uint32_t k = 0; k < count; k++)
            kv_index_page_ref(store->index, flow->read_pages[k]);
        if (status == KV_MISS) rows_read(&flow->read);
        return;
    }
    hbm_full(flow);
}

bool resume_fits(struct flow *flow)
{
    const uint32_t total = kv_pages_for(flow->count + flow->extra_tokens);
    if (total + 2 <= kv_hbm_usage(flow->shard->store->hbm).slots) return true;
    hbm_full(flow);
    return false;
}

void resume_read(struct flow *flow)
{
    struct shard *shard = flow->shard;
    const uint32_t total = kv_pages_for(flow->count + flow->extra_tokens);

    live_attach(shard, flow->slot, flow->session);
    flow->live = flow->slot;
    /* Two pages more: the copy of the page the head is in, and the one the save makes.  Refused
     * before anything is read or given up. */
    const uint32_t need = total + 2 - KV_MIN(flow->live->page_count, total + 2);
    if (!live_make_room(shard, flow->live, need)) {
        hbm_full(flow);
        return;
    }
    live_note_loss(flow->live);
    flow->live->turns++;
    if (flow->source != SOURCE_LIVE) live_clear(shard, flow->live);
    flow->live->busy = true;
    switch (flow->source) {
    case SOURCE_NODE:
        read_path(flow);
        return;
    case SOURCE_LIVE:
        flow->req->out.hbm_tokens = flow->plan.restore_tokens;
        live_back_to(flow->live, flow->plan.restore_tokens);
        break;
    case SOURCE_NONE:
        break;
    }
    stage_prepare(flow);
}

/* ---- prepare ---- */

static enum worker_start start_kind(const struct flow *flow)
{
    if (flow->plan.kind == KV_PLAN_MISS) return WORKER_RESET;
    if (flow->plan.kind == KV_PLAN_REPLAY) return WORKER_ROWS_ONLY;
    if (flow->source == SOURCE_NODE) return WORKER_IMPORT;
    return flow->plan.restore_tokens == flow->live->state.tokens ? WORKER_CONTINUE : WORKER_CUT;
}

static void stage_prepare(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct live *live = flow->live;
    const uint32_t h = flow->plan.restore_tokens;
    const uint32_t total = flow->count + flow->extra_tokens;
    kv_status status = live_cut(shard, live, h);
    if (status == KV_OK) status = live_extend(shard, live, total);
    if (status == KV_OK) status = live_reserve_ids(live, total + 1);
    if (status != KV_OK) {
        live->busy = false;
        live_release(shard, live); /* What it held is half changed. */
        flow->live = NULL;
        hbm_full(flow);
        return;
    }
    const uint32_t from = flow->source == SOURCE_LIVE ? h : 0;
    memcpy(live->ids + from, flow->ids + from, sizeof(uint32_t) * (flow->count - from));
    memcpy(live->replays, flow->replays, sizeof(live->replays));
    live->replay_count = flow->replay_count;
    live->other_until = flow->other_until;

    struct worker_job *job = &flow->job;
    job->slot = live->slot;
    job->start = start_kind(flow);
    job->start_tokens = h;
    job->pages = live->page_bytes;
    job->page_count = live->page_count;
    job->ids = live->ids;
    job->replay_from = flow->plan.replay_from;
    job->cancelled = &flow->stop;
    job->deadline_ns = flow_job_deadline(flow);
    job->reply = shard->options.mailbox;
    if (flow->image_slot != KV_POOL_SLOT_NONE) {
        job->image = kv_pool_bytes(shard->store->pool, flow->image_slot);
        job->image_state = flow->image_state;
    }
    kv_store_renew(shard->store, live->node);
    const bool path_marked = live->node != NULL && live->node->replay_total > 0;
    flow->req->out.approximate = path_marked || live->replay_count > 0;
    if (flow->req->out.approximate)
        flow->req->out.approx_from = path_marked ? live->node->approx_from : live->replays[0];
    flow->ready(flow);
}

static void job_done(struct kv_msg *msg)
{
    struct worker_job *job = KV_CONTAINER_OF(msg, struct worker_job, msg);
    struct flow *flow = KV_CONTAINER_OF(job, struct flow, job);
    struct live *live = flow->live;

    if (flow->image_slot != KV_POOL_SLOT_NONE) {
        kv_pool_unpin(flow->shard->store->pool, flow->image_slot);
        flow->image_slot = KV_POOL_SLOT_NONE;
    }
    flow->req->out.times.queue_ns += job->queue_ns;
    kv_histogram_add(&flow->shard->latencies[LATENCY_ENGINE_QUEUE], job->queue_ns);
    flow->req->out.times.run_ns += job->run_ns;
    flow->mark_ns = kv_clock_stopwatch_ns();
    if (!job->kept) {
        live->busy = false;
        live_release(flow->shard, live);
        flow->live = NULL;
    } else {
        live->state = job->state;
        live->has_logits = job->has_logits;
        if (job->state.has_pending) live->ids[job->state.tokens] = job->state.pending;
    }
    flow->job_done = true;
    flow->job_finished(flow);
}

void resume_post_job(struct flow *flow, void (*done)(struct flow *flow))
{
    flow->job_finished = done;
    flow->job.user = flow->session->user->id;
    flow->job.msg.run = job_done;
    flow->is_posted = true;
    worker_post(flow->shard->options.worker, &flow->job);
}
