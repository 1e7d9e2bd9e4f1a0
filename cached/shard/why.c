/*
 * Why: what took the rows that a prompt, or a position, does not find.
 *
 * Three sources, in this order: checkpoints that are still there and do not count (their time is
 * up, or another model made them), the session's history of removals, and what is known of a
 * window that is gone.  Asking renews nothing.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <string.h>

/* The checkpoint whose edge holds the position's row and whose use is the latest; NULL: none. */
static struct kv_node *covering(struct kv_session *session, uint32_t position)
{
    struct kv_node *best = NULL, *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        const uint32_t from = node->parent == NULL ? 0 : node->parent->tokens;
        if (position < from || position >= node->tokens) continue;
        const bool better = best == NULL || (best->foreign && !node->foreign) ||
                            (best->foreign == node->foreign && node->used_ms > best->used_ms);
        if (better) best = node;
    }
    return best;
}

static struct kv_removal removal_of(const struct kv_node *node, const struct kv_loss *loss,
                                    uint64_t removed_ms)
{
    return (struct kv_removal){
        .cause = loss->cause,
        .part = KV_REMOVED_ROWS,
        .limit_of = loss->limit_of,
        .from = node->parent == NULL ? 0 : node->parent->tokens,
        .to = node->tokens,
        .checkpoints = 1,
        .removed_ms = removed_ms,
        .limit = loss->limit,
        .value = loss->value,
    };
}

/* What is there and does not count: as if it had gone when that began. */
static bool passed_over(const struct shard *shard, struct kv_session *session, uint32_t position,
                        struct kv_removal *ret_removal)
{
    const struct kv_store *store = shard->store;
    const struct kv_node *node = covering(session, position);
    if (node == NULL) return false;
    if (node->foreign) {
        const struct kv_loss loss = {.cause = KV_REASON_MODEL_CHANGED};
        *ret_removal = removal_of(node, &loss, 0);
        return true;
    }
    if (!kv_index_expired(node, kv_store_now_ms(store))) return false;
    const struct kv_loss loss = kv_store_loss(store, node, KV_REASON_EXPIRED);
    *ret_removal = removal_of(node, &loss, node->used_ms + kv_index_ttl_ms(node));
    return true;
}

static bool removed_at(const struct shard *shard, struct kv_session *session, uint32_t position,
                       struct kv_removal *ret_removal)
{
    if (passed_over(shard, session, position, ret_removal)) return true;
    const struct kv_removal *removal = kv_history_at(session->tree->history, position, true);
    if (removal == NULL) return false;
    *ret_removal = *removal;
    return true;
}

enum kv_reason why_gone(const struct kv_session *session, const struct kv_checkpoint_id *id)
{
    const struct kv_removal *removal = kv_history_of(session->tree->history, id);
    const bool forgot = session->tree->history != NULL && session->tree->history->cut;
    if (removal == NULL && forgot) removal = kv_history_last(session->tree->history);
    return removal == NULL ? KV_REASON_NEVER_STORED : removal->cause;
}

enum kv_reason why_missed(const struct kv_session *session)
{
    const struct kv_removal *removal = kv_history_at(session->tree->history, 0, true);
    if (removal == NULL) removal = kv_history_last(session->tree->history);
    return removal == NULL ? KV_REASON_NEVER_STORED : removal->cause;
}

void why_resumed(struct flow *flow, uint32_t stored, bool diverged)
{
    struct request_out *out = &flow->req->out;
    if (stored >= flow->count) return; /* It is there as a whole. */
    out->has_removed = removed_at(flow->shard, flow->session, stored, &out->removed);
    /* Where it differs from what is stored, only what went from there on may have been its rest. */
    if (diverged && stored > 0 && out->removed.from != stored) out->has_removed = false;
}

/* ---- of a session ---- */

/* Why a resume at the end of `node` would not be EXACT; NONE: it would. */
static enum kv_reason node_reason(const struct shard *shard, struct kv_node *node)
{
    struct kv_store *store = shard->store;
    if (node->foreign) return KV_REASON_MODEL_CHANGED;
    if (kv_index_expired(node, kv_store_now_ms(store))) return KV_REASON_EXPIRED;
    if (kv_pool_has(store->pool, &node->image, kv_store_now_ns(store))) return KV_REASON_NONE;
    if (node->tokens <= shard->layout->window_tokens) return KV_REASON_TOO_SHORT;
    return node->image.lost == KV_REASON_NONE ? KV_REASON_NEVER_STORED : node->image.lost;
}

enum kv_reason why_head(const struct shard *shard, struct kv_session *session)
{
    if (session->live != NULL) return KV_REASON_NONE;
    if (session->head != NULL) return node_reason(shard, session->head);
    if (session->has_head) return why_gone(session, &session->head_id);
    return why_missed(session);
}

bool why_removals(struct flow *flow, const struct kv_session *session)
{
    struct request_out *out = &flow->req->out;
    const struct kv_history *history = session->tree->history;
    if (history == NULL) return true;
    struct kv_removal *copy =
        kv_arena_alloc(flow->req->arena, sizeof(*copy) * KV_MAX(history->removal_count, 1u));
    if (copy == NULL) return false;
    memcpy(copy, history->removals, sizeof(*copy) * history->removal_count);
    out->removals = copy;
    out->removal_count = history->removal_count;
    out->removals_cut = history->cut;
    return true;
}

/* ---- the call ---- */

static void fill_position(struct flow *flow, struct request_why *why)
{
    const struct shard *shard = flow->shard;
    struct kv_session *session = flow->session;
    struct kv_node *node = covering(session, why->position);
    const struct live *live = session->live;
    const bool counts =
        node != NULL && !node->foreign && !kv_index_expired(node, kv_store_now_ms(shard->store));
    why->is_stored = counts || (live != NULL && why->position < live->state.tokens);
    const struct kv_removal *removal = kv_history_at(session->tree->history, why->position, false);
    if (!why->is_stored) {
        flow->req->out.has_removed =
            removed_at(shard, session, why->position, &flow->req->out.removed);
    } else if (removal != NULL && removal->part == KV_REMOVED_CHECKPOINT) {
        flow->req->out.removed = *removal; /* Its rows are there, its checkpoint is not. */
        flow->req->out.has_removed = true;
    }
    if (flow->req->out.has_removed)
        why->reason = flow->req->out.removed.cause;
    else if (why->is_stored)
        why->reason = KV_REASON_NONE;
    else if (session->tree->history != NULL && session->tree->history->cut)
        why->reason = why_missed(session);
    else
        why->reason = KV_REASON_NEVER_STORED;
}

static void why_loaded(struct flow *flow)
{
    struct request *req = flow->req;
    struct kv_session *session = flow->session;
    struct request_why *why = req->out.why;
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    why->is_there = true;
    why->has_position = req->in.u.why.has_position;
    why->position = req->in.u.why.position;
    why->idle_ms = kv_store_now_ms(flow->shard->store);
    why->idle_ms = why->idle_ms > session->used_ms ? why->idle_ms - session->used_ms : 0;
    why->ttl_ms = kv_index_session_ttl_ms(&session->entry);
    why->checkpoints = session->node_count;
    why->head_position = session->live != NULL   ? ((struct live *)session->live)->state.tokens
                         : session->head != NULL ? session->head->tokens
                                                 : 0;
    if (why->has_position) {
        fill_position(flow, why);
    } else {
        why->reason = why_head(flow->shard, session);
        const struct kv_node *head = session->head;
        const bool expired =
            head != NULL && kv_index_expired(head, kv_store_now_ms(flow->shard->store));
        why->is_stored = (head != NULL && !expired) || session->live != NULL;
        if (why->reason != KV_REASON_NONE && !why->is_stored)
            req->out.has_removed = removed_at(
                flow->shard, session, head == NULL ? 0 : head->tokens - 1, &req->out.removed);
    }
    if (!why_removals(flow, session)) flow_fail_status(flow, KV_NOMEM);
    flow_finish(flow);
}

/* A session that is gone: what is left of it is why. */
static bool tell_deleted(struct flow *flow)
{
    struct request_why *why = flow->req->out.why;
    const struct kv_deleted *deleted =
        kv_store_deleted_find(flow->shard->store, &flow->req->in.session);
    if (deleted == NULL) return false;
    why->reason = deleted->record.cause;
    flow->req->out.has_removed = true;
    flow->req->out.removed = (struct kv_removal){
        .cause = deleted->record.cause,
        .part = KV_REMOVED_ROWS,
        .limit_of = deleted->record.limit_of,
        .checkpoints = deleted->record.checkpoints,
        .removed_ms = deleted->record.removed_ms,
        .limit = deleted->record.limit,
        .value = deleted->record.value,
    };
    return true;
}

void flow_why(struct flow *flow)
{
    struct request *req = flow->req;
    /* Another user's session is as if it never was. */
    if (!req->is_ops && !kv_id_equal(req->in.u.why.user.bytes, req->user.bytes)) {
        flow_fail(flow, KV_REASON_ROLE_DENIED, "user", "ops", "harness");
        flow_finish(flow);
        return;
    }
    req->out.why = kv_arena_alloc(req->arena, sizeof(*req->out.why));
    if (req->out.why == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    if (kv_index_entry_find(flow->shard->store->index, &req->in.session) == NULL &&
        tell_deleted(flow)) {
        flow_finish(flow);
        return;
    }
    flow->wake = why_loaded;
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow_load(flow) == FLOW_NEXT) why_loaded(flow);
}
