/*
 * Checkpoint: the head is stored, whatever the session does.
 *
 * At rest the session is claimed like by any call that changes it.  Beside a Decode it is not: the
 * worker writes the image between two steps, where the session stands at a position, and the rows
 * below that position do not change any more; decoding goes on while they are saved.  A Prefill
 * stands nowhere until its end, so there, and beside a Rollback, a Checkpoint waits for the end.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

static void checkpoint_look(struct flow *flow);

/* Those that wait for a save in flight also wait for the next one to begin. */
void checkpoint_wake(struct flow *flow)
{
    if (flow->session->tree->commits == 0) shard_commit_ended(flow->shard, flow->session);
}

static void checkpoint_end(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct kv_session *session = flow->session;
    turn_reply(flow);
    if (session->tree->commits == 0) shard_commit_ended(shard, session);
}

static void checkpoint_reply(struct flow *flow)
{
    const enum kv_reason why = flow->req->out.save_reason;
    const bool is_late = why == KV_REASON_SSD_SLOW && flow->req->in.level == LEVEL_SSD;
    if (flow->points[0].node == NULL || is_late) {
        flow_fail(flow, why == KV_REASON_NONE ? KV_REASON_INTERNAL : why, "checkpoint", NULL, NULL);
        if (why == KV_REASON_SSD_SLOW) flow->req->out.failure.retry_ms = KV_DISK_PATIENCE_MS;
    }
    checkpoint_end(flow);
}

static void point_at(struct flow *flow, const struct kv_image_state *state)
{
    const enum request_kind kind = flow->req->method == REQUEST_CHECKPOINT
                                       ? flow->req->in.u.checkpoint.kind
                                       : KIND_UNSPECIFIED;
    flow->point_count = 1;
    flow->points[0] = (struct commit_point){
        .tokens = state->tokens,
        .kind = (uint8_t)(kind == KIND_UNSPECIFIED ? KIND_MANUAL : kind),
        .pool_slot = KV_POOL_SLOT_NONE,
        .state = *state,
    };
}

/* A job that only writes an image of where the session stands. */
static void export_job(struct flow *flow, const struct live *live)
{
    flow->job = (struct worker_job){
        .slot = live->slot,
        .start = WORKER_CONTINUE,
        .start_tokens = live->state.tokens,
        .pages = live->page_bytes,
        .page_count = live->page_count,
        .ids = live->ids,
        .replay_from = live->state.tokens,
        .prefill_to = live->state.tokens,
        .cancelled = &flow->stop,
        .reply = flow->shard->options.mailbox,
        .decode_export = flow_reserve_image(flow, 0),
    };
}

/* ---- at rest ---- */

static void checkpoint_exported(struct flow *flow)
{
    if (flow->job.status != KV_OK) {
        flow_fail_job(flow);
        checkpoint_end(flow);
        return;
    }
    point_at(flow, &flow->live->state);
    turn_save(flow, flow->checkpointed);
}

static void checkpoint_at_rest(struct flow *flow)
{
    struct kv_session *session = flow->session;
    resume_expire_live(flow);
    struct live *live = session->live;
    if (live == NULL || live->state.tokens == 0) {
        /* Not in memory: the head is the last checkpoint, or there is none. */
        flow->point_count = 1;
        flow->points[0].node = session->head;
        flow->points[0].pool_slot = KV_POOL_SLOT_NONE;
        if (session->head == NULL) {
            flow_fail(flow, KV_REASON_HEAD_EMPTY, "session_id", NULL, NULL);
            checkpoint_end(flow);
            return;
        }
        kv_store_renew(flow->shard->store, session->head);
        flow->checkpointed(flow);
        return;
    }
    flow->live = live;
    live->busy = true;
    export_job(flow, live);
    resume_post_job(flow, checkpoint_exported);
}

/* ---- beside a Decode ---- */

/* The Decode that the worker has, or had, of this session; NULL: none. */
static struct flow *decode_of(const struct kv_session *session)
{
    struct flow *busy = session->busy;
    if (busy == NULL || busy->req->method != REQUEST_DECODE) return NULL;
    return busy->is_posted && busy->live != NULL ? busy : NULL;
}

/* Its tokens come into the session's log when it ends; those below the checkpoint now. */
static void log_tokens(struct live *live, const struct flow *decode,
                       const struct kv_image_state *state)
{
    const uint32_t first = decode->first_position;
    const uint32_t end = state->tokens + (state->has_pending ? 1 : 0);
    if (end <= first) return;
    assert(end - first <= atomic_load_explicit(&decode->job.out_count, memory_order_acquire));
    memcpy(live->ids + first, decode->job.out_tokens, sizeof(*live->ids) * (end - first));
}

static void beside_exported(struct kv_msg *msg)
{
    struct worker_job *job = KV_CONTAINER_OF(msg, struct worker_job, msg);
    struct flow *flow = KV_CONTAINER_OF(job, struct flow, job);
    struct shard *shard = flow->shard;
    struct live *live = flow->beside;
    flow->is_exporting = false;
    flow->req->out.times.run_ns += job->run_ns;
    if (job->status != KV_OK || live->session != flow->session ||
        live->turns != flow->beside_turns) {
        /* The session left that history while the job was on its way. */
        if (flow->reserved[0] != KV_POOL_SLOT_NONE)
            kv_pool_cancel(shard->store->pool, flow->reserved[0]);
        flow->reserved[0] = KV_POOL_SLOT_NONE;
        flow->beside = NULL;
        checkpoint_look(flow);
        return;
    }
    const struct flow *decode = decode_of(flow->session);
    if (decode != NULL && !decode->job_done) {
        log_tokens(live, decode, &job->state);
        live->state = job->state;
        live->has_logits = job->has_logits;
    }
    point_at(flow, &job->state);
    turn_save(flow, flow->checkpointed);
}

static void checkpoint_beside(struct flow *flow, struct live *live)
{
    flow->beside = live;
    flow->beside_turns = live->turns;
    flow->is_exporting = true;
    export_job(flow, live);
    flow->job.user = flow->session->user->id;
    flow->job.msg.run = beside_exported;
    worker_post(flow->shard->options.worker, &flow->job);
}

/* One at a time: the next one takes a later step. */
static bool is_exported_now(const struct flow *flow)
{
    for (const struct flow *other = flow->shard->flows; other != NULL; other = other->next)
        if (other->session == flow->session && other->is_exporting) return true;
    return false;
}

/* ---- which of them ---- */

static void checkpoint_look(struct flow *flow)
{
    struct kv_session *session = flow->session;
    flow->wake = checkpoint_look;
    if (flow->failed || flow_cancelled(flow)) {
        checkpoint_end(flow);
        return;
    }
    if (flow_load(flow) == FLOW_WAIT) return;
    if (flow->failed) {
        checkpoint_end(flow);
        return;
    }
    if ((session->tree->commits > 0 && !patience_is_over(flow)) || is_exported_now(flow)) {
        flow->waits_commit = true;
        return;
    }
    const struct flow *decode = decode_of(session);
    if (decode == NULL && session->busy != NULL) {
        flow->waits_session = true;
        return;
    }
    flow->req->out.times.queue_ns = kv_clock_stopwatch_ns() - flow->req->out.times.arrived_ns;
    if (decode != NULL) {
        checkpoint_beside(flow, decode->live);
        return;
    }
    const bool claimed = flow_claim_session(flow);
    assert(claimed);
    checkpoint_at_rest(flow);
}

void checkpoint_start(struct flow *flow, void (*after)(struct flow *flow))
{
    flow->checkpointed = after;
    checkpoint_look(flow);
}

void flow_checkpoint(struct flow *flow)
{
    if (flow_find_session(flow))
        checkpoint_start(flow, checkpoint_reply);
    else
        flow_finish(flow);
}
