/*
 * Compact: the conversation begins anew behind its deepest anchor.
 *
 * The head moves there, or to position 0 where there is none; the call carries no tokens.  What it
 * left stays for a while, so that the harness can come back to it with a Rollback, and goes then
 * (old_branch.c).  New head and that time are one synced batch.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

static void compact_done(void *context, kv_status status)
{
    struct flow *flow = context;
    if (status != KV_OK)
        flow_fail(flow, shard_unrecorded(flow->shard, status), "manifest", NULL, NULL);
    flow_finish(flow);
}

/* The deepest anchor of the history; NULL: position 0. */
static struct kv_node *anchor_of(const struct shard *shard, struct kv_node *node)
{
    const uint64_t now_ms = kv_store_now_ms(shard->store);
    while (node != NULL &&
           (node->kind != KIND_ANCHOR || node->foreign || kv_index_expired(node, now_ms)))
        node = node->parent;
    return node;
}

static void head_to(struct kv_session *session, const struct kv_node *node)
{
    session->fell_back = false; /* Its caller named the place it goes on from. */
    session->head = (struct kv_node *)(uintptr_t)node;
    session->has_head = node != NULL;
    session->head_tokens = session->claimed_tokens = node == NULL ? 0 : node->tokens;
    if (node != NULL) session->head_id = node->id;
    session->epoch++;
}

static kv_status fill(struct flow *flow, struct kv_batch *batch, const struct kv_node *end,
                      uint32_t stop_tokens)
{
    const uint64_t keep_ms = flow->req->in.u.compact.keep_ms;
    struct kv_store *store = flow->shard->store;
    const kv_status status = kv_batch_session(batch, flow->session);
    if (status != KV_OK || end == NULL || end->tokens <= stop_tokens) return status;
    const struct kv_record_old_branch branch = {
        .session = flow->session->id,
        .end = end->id,
        .until_ms = kv_store_now_ms(store) + keep_ms,
        .stop_tokens = stop_tokens,
    };
    return kv_batch_old_branch(batch, store, &branch);
}

static void compact_begun(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct kv_session *session = flow->session;
    struct request *req = flow->req;
    resume_expire_live(flow);
    struct live *live = session->live;
    struct kv_node *end = live != NULL ? live->node : session->head;
    struct kv_node *anchor = anchor_of(shard, end);
    const uint32_t stop_tokens = anchor == NULL ? 0 : anchor->tokens;
    const uint32_t head_tokens = live != NULL ? live->state.tokens : end == NULL ? 0 : end->tokens;
    req->out.head_position = stop_tokens;
    if (head_tokens == stop_tokens) {
        flow_finish(flow); /* Once more: nothing to do, the epoch stays. */
        return;
    }
    if (shard->store->old_branch_count >= KV_OLD_BRANCHES_MAX) {
        flow_fail(flow, KV_REASON_QUEUE_FULL, "branches that compactions left",
                  request_u64(req, KV_OLD_BRANCHES_MAX), request_u64(req, KV_OLD_BRANCHES_MAX));
        req->out.failure.retry_ms = 1000;
    }
    struct kv_batch *batch = flow_stale_epoch(flow) ? NULL : kv_batch_create(shard->store);
    if (flow->failed) {
        kv_batch_discard(batch);
        flow_finish(flow);
        return;
    }
    live_release(shard, live);
    head_to(session, anchor);
    req->out.epoch = session->epoch;
    if (anchor != NULL) kv_store_renew(shard->store, anchor);
    const kv_status status = batch == NULL ? KV_NOMEM : fill(flow, batch, end, stop_tokens);
    if (status == KV_OK) {
        kv_batch_post(batch, compact_done, flow);
        return;
    }
    kv_batch_discard(batch);
    flow_fail_status(flow, status);
    flow_finish(flow);
}

void flow_compact(struct flow *flow)
{
    if (!flow_find_session(flow) || !flow_claim_session(flow)) {
        flow_finish(flow);
        return;
    }
    flow_begin(flow, compact_begun);
}
