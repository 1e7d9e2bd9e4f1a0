/*
 * Decode: tokens from the head, streamed as they come.
 *
 * The worker writes tokens into the request's arrays and goes on; the stream is fed from there, one
 * message in flight, as fast as the reader takes them.  A slow reader therefore neither delays
 * decoding nor grows a queue.  Tokens the client lost are sent again from the session's log first.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define STREAM_TOKENS_MAX 1024u

static void pump(struct flow *flow);

static void decode_reply(struct flow *flow)
{
    struct request_out *out = &flow->req->out;
    out->checkpoints = kv_arena_alloc(flow->req->arena, sizeof(*out->checkpoints));
    out->checkpoint_count = 0;
    if (out->checkpoints != NULL && flow->point_count > 0 && flow->points[0].node != NULL)
        flow_fill_checkpoint(flow, flow->points[0].node,
                             &out->checkpoints[out->checkpoint_count++]);
    if (flow->live != NULL) out->head_position = flow->live->state.tokens;
    out->tokens_sent = flow->answer == NULL ? flow->streamed : answers_made_before(flow);
    out->stopped = flow->job.stopped;
    flow_finish(flow);
}

/* Both are needed for the end: everything sent, and the save answered. */
static void maybe_finish(struct flow *flow)
{
    if (flow->saved && flow->drained && !flow->req->stream_busy) decode_reply(flow);
}

static void stream_sent(struct kv_msg *msg)
{
    struct request *req = KV_CONTAINER_OF(msg, struct request, stream_msg);
    struct flow *flow = req->flow;
    req->stream_busy = false;
    if (atomic_load(&req->cancelled)) flow->shard->look_now = true;
    pump(flow);
}

static void pump(struct flow *flow)
{
    struct request *req = flow->req;
    if (req->stream_busy) return;
    const uint32_t made = atomic_load_explicit(&flow->job.out_count, memory_order_acquire);
    if (flow->answer != NULL) {
        /* Its caller may be gone while others want what it makes. */
        if (!atomic_load(&req->cancelled) && answers_stream(flow)) return;
        flow->drained = flow->job_done;
        maybe_finish(flow);
        return;
    }
    if (flow->resend_from < flow->resend_to && flow->live != NULL) {
        const uint32_t count = KV_MIN(flow->resend_to - flow->resend_from, STREAM_TOKENS_MAX);
        const uint32_t from = flow->resend_from;
        flow->resend_from += count;
        request_stream(req, from, flow->live->ids + from, flow->no_crcs, count);
        return;
    }
    if (flow->streamed < made) {
        const uint32_t count = KV_MIN(made - flow->streamed, STREAM_TOKENS_MAX);
        const uint32_t from = flow->streamed;
        flow->streamed += count;
        request_stream(req, flow->first_position + from, flow->job.out_tokens + from,
                       flow->job.out_crcs + from, count);
        return;
    }
    if (!flow->job_done) return;
    flow->drained = true;
    maybe_finish(flow);
}

static void decode_saved(struct flow *flow)
{
    flow->saved = true;
    pump(flow);
}

static void decode_progress(struct kv_msg *msg)
{
    struct worker_job *job = KV_CONTAINER_OF(msg, struct worker_job, progress);
    struct flow *flow = KV_CONTAINER_OF(job, struct flow, job);
    atomic_store(&job->progress_posted, false);
    answers_pump(flow);
    pump(flow);
}

static void decode_done(struct flow *flow)
{
    struct request *req = flow->req;
    struct live *live = flow->live;
    const uint32_t made = atomic_load_explicit(&flow->job.out_count, memory_order_acquire);

    if (live != NULL)
        memcpy(live->ids + flow->first_position, flow->job.out_tokens, sizeof(uint32_t) * made);
    flow->shard->counters.decoded_tokens += made;
    admit_computed(flow, made);
    answers_decoded(flow, made);
    answers_pump(flow);
    if (flow->count > 0) { /* The head was not in memory: a resume like any other. */
        flow->shard->counters.outcomes[req->out.outcome]++;
        flow->shard->counters.outcome_reasons[req->out.reason]++;
        flow->shard->counters.replayed_tokens += req->out.replayed_tokens;
    }
    if (flow->job.status != KV_OK || live == NULL) {
        flow_fail_job(flow);
        flow->saved = flow->drained = true;
        if (flow->answer == NULL) flow->streamed = made; /* Nobody reads any more. */
        flow->resend_from = flow->resend_to;
        maybe_finish(flow);
        return;
    }
    if (!req->in.u.decode.no_checkpoint && live->state.tokens > 0) {
        flow->points[0] = (struct commit_point){.tokens = live->state.tokens,
                                                .kind = KIND_DECODE_END,
                                                .pool_slot = KV_POOL_SLOT_NONE,
                                                .state = live->state};
        flow->point_count = 1;
    }
    turn_save(flow, decode_saved);
}

static bool decode_buffers(struct flow *flow)
{
    struct kv_arena *arena = flow->req->arena;
    struct worker_job *job = &flow->job;
    const uint32_t count = flow->req->in.u.decode.max_tokens;
    const bool has_log = flow->answer != NULL; /* Its own, of which tokens are the end. */
    job->out_tokens = has_log ? NULL : kv_arena_alloc(arena, sizeof(uint32_t) * count);
    job->out_crcs = kv_arena_alloc(arena, sizeof(uint32_t) * count);
    flow->no_crcs = kv_arena_alloc(arena, sizeof(uint32_t) * STREAM_TOKENS_MAX);
    return (has_log || job->out_tokens != NULL) && job->out_crcs != NULL && flow->no_crcs != NULL;
}

static void decode_job(struct flow *flow)
{
    const struct request_in *in = &flow->req->in;
    struct worker_job *job = &flow->job;
    const uint32_t before = answers_made_before(flow);
    job->decode_max = in->u.decode.max_tokens - before;
    job->sampling =
        (struct eng_sampling){.temperature = in->u.decode.temperature,
                              .top_p = in->u.decode.top_p == 0.0f ? 1.0f : in->u.decode.top_p,
                              .top_k = in->u.decode.top_k,
                              .seed = in->u.decode.seed};
    if (in->u.decode.forced.count > 0) {
        job->forced = in->u.decode.forced.ids + before;
        job->forced_count = in->u.decode.forced.count - before;
        job->decode_max = KV_MIN(job->decode_max, job->forced_count);
    } else {
        memcpy(job->stops_at, in->u.decode.stop_tokens, sizeof(uint32_t) * in->u.decode.stop_count);
        job->stops_at_count = in->u.decode.stop_count;
        if (!in->u.decode.ignore_eos)
            job->stops_at[job->stops_at_count++] = flow->shard->options.eos;
    }
    if (!in->u.decode.no_checkpoint) job->decode_export = flow_reserve_image(flow, 0);
    job->progress.run = decode_progress;
    flow->req->stream_msg.run = stream_sent;
}

/* Tokens the client wants again: from from_position to the last one sent before. */
static bool decode_resend(struct flow *flow, uint32_t sent_end)
{
    const uint32_t from = flow->req->in.u.decode.from_position;
    if (from == 0 || answers_made_before(flow) > 0) return true;
    if (from > sent_end) {
        flow_fail(flow, KV_REASON_FROM_POSITION_INVALID, "from_position",
                  request_u64(flow->req, sent_end), request_u64(flow->req, from));
        return false;
    }
    flow->resend_from = from;
    flow->resend_to = sent_end;
    return true;
}

static void decode_go(struct flow *flow, uint32_t tokens, bool pending)
{
    flow->first_position = tokens + (pending ? 1 : 0);
    if (!decode_resend(flow, flow->first_position) || !answers_decode_log(flow)) {
        flow_finish(flow);
        return;
    }
    decode_job(flow);
    resume_post_job(flow, decode_done);
    pump(flow);
    /* A Checkpoint may have come before there was a step to take it at. */
    shard_session_freed(flow->shard, flow->session);
}

/* The head was restored: what was stored may end below it, the rest is computed again first. */
static void decode_ready(struct flow *flow)
{
    struct worker_job *job = &flow->job;
    const bool pending = flow->plan.restore_tokens == flow->count;
    if (pending) {
        flow->live->ids[flow->count] = flow->image_state.pending;
    } else {
        job->prefill_to = flow->count;
        job->stop_count = 1;
        job->stops[0] = (struct worker_stop_point){.tokens = flow->count};
    }
    decode_go(flow, flow->count, pending);
}

static void decode_restore(struct flow *flow)
{
    flow->want_pending = true;
    resume_start(flow, decode_ready);
}

/* Prompt and answer together have room in the model's context. */
static bool decode_fits(struct flow *flow, uint32_t tokens)
{
    const uint32_t room = flow->shard->layout->context_tokens - tokens;
    const uint32_t wanted = flow->req->in.u.decode.max_tokens - answers_made_before(flow);
    /* One more than the answer, where there is one: its last token is written by the next call. */
    flow->extra_tokens = KV_MIN(wanted + 1, room);
    if (wanted <= room) return true;
    flow_fail(flow, KV_REASON_CONTEXT_FULL, "max_tokens", request_u64(flow->req, room),
              request_u64(flow->req, wanted));
    return false;
}

static void decode_live(struct flow *flow, struct live *live)
{
    struct worker_job *job = &flow->job;
    flow->req->out.outcome = OUTCOME_EXACT;
    flow->req->out.hit_tokens = live->state.tokens;
    flow->live = live;
    const uint32_t total = live->state.tokens + flow->extra_tokens;
    kv_status status = live_extend(flow->shard, live, total);
    if (status == KV_OK) status = live_reserve_ids(live, total + 1);
    if (status != KV_OK) {
        flow_fail(flow, KV_REASON_HBM_FULL, "hbm.bytes", flow_hbm_tokens(flow),
                  request_u64(flow->req, total));
        flow_finish(flow);
        return;
    }
    live->busy = true;
    live->used_seq = ++flow->shard->used_seq;
    *job = (struct worker_job){
        .reply = flow->shard->options.mailbox,
        .cancelled = &flow->stop,
        .deadline_ns = flow_job_deadline(flow),
        .slot = live->slot,
        .start = WORKER_CONTINUE,
        .start_tokens = live->state.tokens,
        .pages = live->page_bytes,
        .page_count = live->page_count,
        .ids = live->ids,
        .replay_from = live->state.tokens,
        .prefill_to = live->state.tokens,
        .out_tokens = job->out_tokens,
        .out_crcs = job->out_crcs,
    };
    kv_store_renew(flow->shard->store, live->node);
    decode_go(flow, live->state.tokens, live->state.has_pending);
}

static void decode_begun(struct flow *flow)
{
    struct kv_session *session = flow->session;
    resume_expire_live(flow);
    struct live *live = session->live;
    const uint32_t tokens = live != NULL            ? live->state.tokens
                            : session->head != NULL ? session->head->tokens
                                                    : 0;
    if (tokens == 0)
        flow_fail(flow, KV_REASON_HEAD_EMPTY, "session_id", NULL, flow->req->in.session_name);
    /* Its pages are whole and another model's: not to be read, and nothing to be dropped. */
    if (tokens > 0 && live == NULL && session->head->foreign)
        flow_fail(flow, KV_REASON_HEAD_MOVED, "head_position", NULL,
                  "0: the checkpoint at the head was made by another model");
    else if (live == NULL && session->fell_back)
        flow_fail(flow, KV_REASON_HEAD_MOVED, "head_position", NULL,
                  request_u64(flow->req, tokens));
    if (!flow->failed && decode_fits(flow, tokens) && !decode_buffers(flow))
        flow_fail_status(flow, KV_NOMEM);
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    if (live != NULL && (live->has_logits || live->state.has_pending)) {
        decode_live(flow, live);
        return;
    }
    flow->count = tokens;
    flow->ids = kv_arena_alloc(flow->req->arena, sizeof(uint32_t) * tokens);
    if (flow->ids == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    if (live != NULL) {
        memcpy(flow->ids, live->ids, sizeof(uint32_t) * tokens);
        decode_restore(flow);
        return;
    }
    resume_path_ids(flow, session->head, decode_restore);
}

void flow_decode(struct flow *flow)
{
    if (!flow_find_session(flow) || !flow_claim_session(flow) || !admit_turn(flow)) {
        flow_finish(flow);
        return;
    }
    flow_begin(flow, decode_begun);
}
