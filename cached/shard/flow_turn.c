/*
 * Prefill and Lookup, and what a turn ends with: a save.
 *
 * A prefill may stop on its way: at anchors, and at the position the client knows to be stable.
 * Each stop ends a piece as if it had been a call of its own, so what is stored there does not
 * depend on what came after.  The answer waits for the level asked for; the save goes on in any
 * case.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

void turn_reply(struct flow *flow)
{
    struct request_out *out = &flow->req->out;
    out->checkpoints =
        kv_arena_alloc(flow->req->arena, sizeof(*out->checkpoints) * KV_ARRAY_COUNT(flow->points));
    out->checkpoint_count = 0;
    for (uint32_t i = 0; out->checkpoints != NULL && i < flow->point_count; i++) {
        if (flow->points[i].node == NULL) continue;
        flow_fill_checkpoint(flow, flow->points[i].node,
                             &out->checkpoints[out->checkpoint_count++]);
    }
    if (flow->live != NULL) out->head_position = flow->live->state.tokens;
    flow_finish(flow);
}

static void turn_saved(struct flow *flow)
{
    flow->req->out.times.commit_ns = kv_clock_stopwatch_ns() - flow->mark_ns;
    flow->after_save(flow);
}

/* A Checkpoint beside a Decode, or another session of the tree, saves: what it makes may go again.
 */
static bool save_waits(struct flow *flow)
{
    if (flow->session->tree->commits == 0 || patience_is_over(flow)) return false;
    flow->waits_commit = true;
    return true;
}

static void save_now(struct flow *flow);

/* Pages that this save adds at most, to those of the checkpoint below. */
static uint32_t new_pages(const struct flow *flow, const struct live *live)
{
    const uint32_t end = kv_pages_for(flow->points[flow->point_count - 1].tokens);
    const uint32_t there = live->node == NULL ? 0 : live->node->tokens / KV_PAGE_TOKENS;
    return end > there ? end - there : 0;
}

/* True: it is saved later, or not at all. */
static bool is_held_back(struct flow *flow)
{
    struct request *req = flow->req;
    const struct live *live = flow->beside != NULL ? flow->beside : flow->live;
    const enum kv_reason before = req->out.save_reason;
    /* Beside a Decode nothing is waited for: the history moves on. */
    if (flow->beside != NULL) flow->quota_tries = UINT32_MAX;
    if (admit_pages(flow, new_pages(flow, live), save_now) == FLOW_WAIT) return true;
    if (req->out.save_reason == before) return false;
    flow->shard->counters.save_refused++;
    for (uint32_t i = 0; i < flow->point_count; i++)
        flow->points[i].node = NULL;
    turn_saved(flow);
    return true;
}

void turn_save(struct flow *flow, void (*after)(struct flow *flow))
{
    flow->after_save = after;
    flow->mark_ns = kv_clock_stopwatch_ns();
    if (flow->point_count == 0) {
        after(flow);
        return;
    }
    flow->wake = save_now;
    save_now(flow);
}

static void save_now(struct flow *flow)
{
    struct request *req = flow->req;
    if (save_waits(flow) || is_held_back(flow)) return;
    for (uint32_t i = 0; i < flow->point_count; i++) {
        flow->points[i].pool_slot = flow->reserved[i];
        flow->reserved[i] = KV_POOL_SLOT_NONE;
    }
    struct live *live = flow->beside != NULL ? flow->beside : flow->live;
    struct commit *commit =
        commit_start(flow->shard, live, flow->points, flow->point_count, &req->out.save_reason);
    for (uint32_t i = 0; i < flow->point_count; i++)
        flow->reserved[i] = flow->points[i].pool_slot; /* What was not used goes back at the end. */
    const bool wait = req->in.level == LEVEL_DEFAULT || req->in.level == LEVEL_SSD;
    if (commit == NULL || !wait) {
        turn_saved(flow);
        return;
    }
    commit->waiter = flow;
    flow->commit = commit;
    flow->wake = turn_saved;
#ifdef CACHED_TEST_HOOKS
    if (KV_PLANTED(flow->shard->store, ACK_BEFORE_FLUSH)) commit_ack_early(commit);
#endif
}

/* ---- Prefill ---- */

/* The end of the prefill, anchors and the stable position, ascending, each once. */
static void prefill_points(struct flow *flow)
{
    const struct request_in *in = &flow->req->in;
    const uint32_t stable = in->u.prefill.stable_tokens;
    const uint32_t end = stable == 0 ? flow->count : stable;
    bool end_placed = in->u.prefill.no_checkpoint;

    flow->point_count = 0;
    for (uint32_t i = 0; i <= in->u.prefill.anchor_count; i++) {
        const bool last = i == in->u.prefill.anchor_count;
        const uint32_t anchor = last ? UINT32_MAX : in->u.prefill.anchors[i];
        if (!end_placed && end <= anchor) {
            flow->points[flow->point_count++] = (struct commit_point){
                .tokens = end, .kind = KIND_PREFILL_END, .pool_slot = KV_POOL_SLOT_NONE};
            end_placed = true;
        }
        if (!last && (anchor != end || in->u.prefill.no_checkpoint))
            flow->points[flow->point_count++] = (struct commit_point){
                .tokens = anchor, .kind = KIND_ANCHOR, .pool_slot = KV_POOL_SLOT_NONE};
    }
}

static void prefill_done(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct request_out *out = &flow->req->out;
    if (flow->job.status != KV_OK) {
        /* The head is again the last checkpoint: what the engine holds is somewhere on the way. */
        if (flow->live != NULL) flow->live->busy = false;
        live_release(shard, flow->live);
        flow->live = NULL;
        flow_fail_job(flow);
        flow_finish(flow);
        return;
    }
    for (uint32_t i = 0; i < flow->point_count; i++) {
        for (uint32_t j = 0; j < flow->job.stop_count; j++) {
            if (flow->job.stops[j].tokens == flow->points[i].tokens)
                flow->points[i].state = flow->job.stops[j].state;
        }
    }
    shard->counters.outcomes[out->outcome]++;
    shard->counters.outcome_reasons[out->reason]++;
    shard->counters.prompt_tokens += out->prompt_tokens;
    shard->counters.hit_tokens += out->hit_tokens;
    shard->counters.replayed_tokens += out->replayed_tokens;
    shard->counters.computed_tokens += out->computed_tokens;
    admit_computed(flow, out->computed_tokens);
    flow->session->fell_back = false;
    turn_save(flow, turn_reply);
}

static void prefill_ready(struct flow *flow)
{
    struct worker_job *job = &flow->job;
    const uint32_t h = flow->plan.restore_tokens;
    prefill_points(flow);
    job->prefill_to = flow->count;
    job->stop_count = 0;
    for (uint32_t i = 0; i < flow->point_count; i++) {
        if (flow->points[i].tokens <= h) continue; /* Rows only: nothing is computed there. */
        job->stops[job->stop_count++] = (struct worker_stop_point){
            .tokens = flow->points[i].tokens, .export = flow_reserve_image(flow, i)};
    }
    if (job->stop_count == 0 || job->stops[job->stop_count - 1].tokens < flow->count)
        job->stops[job->stop_count++] = (struct worker_stop_point){.tokens = flow->count};
    resume_post_job(flow, prefill_done);
}

static bool prefill_positions_ok(struct flow *flow)
{
    struct request *req = flow->req;
    const struct request_in *in = &req->in;
    if (in->u.prefill.stable_tokens > flow->count) {
        flow_fail(flow, KV_REASON_STABLE_TOKENS_INVALID, "stable_tokens",
                  request_u64(req, flow->count), request_u64(req, in->u.prefill.stable_tokens));
        return false;
    }
    uint32_t before = 0;
    for (uint32_t i = 0; i < in->u.prefill.anchor_count; i++) {
        const uint32_t anchor = in->u.prefill.anchors[i];
        if (anchor <= before || anchor > flow->count) {
            flow_fail(flow, KV_REASON_ANCHORS_INVALID, "anchors", request_u64(req, flow->count),
                      request_u64(req, anchor));
            return false;
        }
        before = anchor;
    }
    return true;
}

static void prefill_prompt(struct flow *flow)
{
    if (!prefill_positions_ok(flow)) {
        flow_finish(flow);
        return;
    }
    resume_start(flow, prefill_ready);
}

static struct kv_node *prefill_parent(struct flow *flow)
{
    struct kv_session *session = flow->session;
    const struct live *live = session->live;
    const struct kv_node *head = live != NULL ? live->node : session->head;
    struct kv_node *node = kv_index_node_find(session, &flow->req->in.u.prefill.parent);
    if (node == NULL || node->foreign ||
        kv_index_expired(node, kv_store_now_ms(flow->shard->store))) {
        const enum kv_reason gone = why_gone(session, &flow->req->in.u.prefill.parent);
        const char *cause = node == NULL    ? kv_reason_info(gone)->name
                            : node->foreign ? "MODEL_CHANGED"
                                            : "EXPIRED";
        flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND, "parent_checkpoint_id", NULL, cause);
        return NULL;
    }
    if (!kv_index_is_ancestor(node, head)) {
        flow_fail(flow, KV_REASON_CHECKPOINT_OTHER_BRANCH, "parent_checkpoint_id", NULL,
                  request_u64(flow->req, node->tokens));
        return NULL;
    }
    return node;
}

static void prefill_begun(struct flow *flow)
{
    const struct request_in *in = &flow->req->in;
    flow->exact = in->u.prefill.exact;
    const struct request_tokens *tokens = &in->u.prefill.tokens;
    if (!in->u.prefill.has_parent) {
        flow->ids = (uint32_t *)(uintptr_t)tokens->ids; /* Only read: the arena's copy. */
        flow->count = tokens->count;
        prefill_prompt(flow);
        return;
    }
    struct kv_node *node = prefill_parent(flow);
    const uint32_t context = flow->shard->layout->context_tokens;
    if (node != NULL && (uint64_t)node->tokens + tokens->count > context)
        flow_fail(flow, KV_REASON_PROMPT_TOO_LONG, "tokens", request_u64(flow->req, context),
                  request_u64(flow->req, (uint64_t)node->tokens + tokens->count));
    if (!flow->failed) {
        flow->count = node->tokens + tokens->count;
        flow->ids = kv_arena_alloc(flow->req->arena, sizeof(uint32_t) * flow->count);
        if (flow->ids == NULL) flow_fail_status(flow, KV_NOMEM);
    }
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    memcpy(flow->ids + node->tokens, tokens->ids, sizeof(uint32_t) * tokens->count);
    resume_path_ids(flow, node, prefill_prompt);
}

void flow_prefill(struct flow *flow)
{
    if (!flow_find_session(flow) || !flow_claim_session(flow) || !admit_turn(flow)) {
        flow_finish(flow);
        return;
    }
    flow_begin(flow, prefill_begun);
}

/* ---- Lookup ---- */

static void lookup_planned(struct flow *flow)
{
    flow->shard->counters.lookups++;
    flow_finish(flow);
}

static void lookup_loaded(struct flow *flow)
{
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    flow->ids = (uint32_t *)(uintptr_t)flow->req->in.u.lookup.tokens.ids;
    flow->count = flow->req->in.u.lookup.tokens.count;
    resume_start(flow, lookup_planned);
}

void flow_lookup(struct flow *flow)
{
    flow->plan_only = true;
    flow->wake = lookup_loaded;
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow_load(flow) == FLOW_NEXT) lookup_loaded(flow);
}
