/*
 * Fork: a second head in a session's tree.
 *
 * Nothing is copied and nothing read but, perhaps, the tree's records: the new session is one
 * record that names the tree and a checkpoint in it.  Without a checkpoint the head is made one
 * first.  Where the record says so, a call that comes again is the same call.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <string.h>

/* ---- the answer ---- */

static void fork_recorded(void *context, kv_status status)
{
    struct flow *flow = context;
    if (status != KV_OK)
        flow_fail(flow, shard_unrecorded(flow->shard, status), "manifest", NULL, NULL);
    flow_finish(flow);
}

/* Found or made, the record is written: a call that raced the first one waits for it, too.  The
 * checkpoint's own says that it was used now. */
static void record_fork(struct flow *flow, struct kv_session *fork, struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    struct kv_batch *batch = kv_batch_create(store);
    kv_status status = batch == NULL ? KV_NOMEM : KV_OK;
    flow->req->out.epoch = fork->epoch;
    flow->req->out.head_position = fork->origin_tokens;
    flow->req->out.has_head_checkpoint = true;
    flow->req->out.head_checkpoint = fork->origin_id;
    if (status == KV_OK && node != NULL) status = kv_batch_node(batch, node);
    if (status == KV_OK) status = kv_batch_session(batch, fork);
    if (status == KV_OK) status = kv_batch_session(batch, flow->session);
    if (status == KV_OK) status = kv_store_deleted_forget(store, batch, &fork->id);
    if (status != KV_OK) {
        kv_batch_discard(batch);
        flow_fail_status(flow, status);
        flow_finish(flow);
        return;
    }
    kv_batch_post(batch, fork_recorded, flow);
}

/* ---- again ---- */

static bool differs(struct flow *flow, const char *field, const char *there, const char *asked)
{
    flow_fail(flow, KV_REASON_SESSION_EXISTS, field, there, asked);
    return true;
}

static const char *id_text(struct flow *flow, const struct kv_checkpoint_id *id)
{
    static const char digits[] = "0123456789abcdef";
    char text[2 * sizeof(id->bytes)];
    for (size_t i = 0; i < sizeof(id->bytes); i++) {
        text[2 * i] = digits[id->bytes[i] >> 4];
        text[2 * i + 1] = digits[id->bytes[i] & 15];
    }
    return kv_arena_strdup(flow->req->arena, text, sizeof(text));
}

/* Whether the session that is there is another one than would be made. */
static bool is_another(struct flow *flow, const struct kv_session *there, uint8_t kind,
                       uint64_t ttl_ms)
{
    struct request *req = flow->req;
    const struct request_in *in = &req->in;
    if (there->tree != flow->session->tree || !there->has_origin ||
        strcmp(there->parent_name, in->session_name) != 0)
        return differs(flow, "session_id",
                       there->tree == flow->session->tree && there->has_origin ? there->parent_name
                                                                               : "none",
                       in->session_name);
    if (in->u.fork.has_id && !kv_id_equal(in->u.fork.id.bytes, there->origin_id.bytes))
        return differs(flow, "checkpoint_id", id_text(flow, &there->origin_id),
                       id_text(flow, &in->u.fork.id));
    if (there->kind != kind)
        return differs(flow, "kind", request_u64(req, there->kind), request_u64(req, kind));
    if (there->ttl_ms != ttl_ms)
        return differs(flow, "ttl_ms", request_u64(req, there->ttl_ms), request_u64(req, ttl_ms));
    return false;
}

static uint8_t kind_of(const struct flow *flow)
{
    const uint32_t kind = flow->req->in.u.fork.kind;
    return kind == 0 ? flow->session->kind : (uint8_t)kind;
}

static uint64_t ttl_of(const struct flow *flow)
{
    const uint64_t ttl_ms = flow->req->in.u.fork.ttl_ms;
    return ttl_ms == 0 ? flow->session->ttl_ms : ttl_ms;
}

/* True: the flow is finished, or goes on by itself. */
static bool fork_again(struct flow *flow)
{
    struct kv_index *index = flow->shard->store->index;
    const struct request_in *in = &flow->req->in;
    if (kv_index_entry_find(index, &in->u.fork.session) == NULL) return false;
    struct kv_session *there = kv_index_session_find(index, &in->u.fork.session);
    if (there == NULL) {
        flow_fail_status(flow, KV_NOMEM);
    } else if (there->deleting) {
        flow_fail(flow, KV_REASON_SESSION_BUSY, "new_session_id", NULL, in->u.fork.session_name);
        flow->req->out.failure.retry_ms = 50;
    } else if (!is_another(flow, there, kind_of(flow), ttl_of(flow))) {
        record_fork(flow, there, NULL);
        return true;
    }
    flow_finish(flow);
    return true;
}

/* ---- the new one ---- */

#define KIND_MAIN_SESSION 1

static void fork_look(struct flow *flow);

/* The superblock says that there are forks before there is one. */
static bool may_have_forks(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    struct kv_error err = {0};
    if (kv_store_forks(store, &err) == KV_OK) return true;
    kv_log(store->options.log, KV_LOG_ERROR, "fork_refused", "cause=\"%s\"", err.text);
    flow_fail(flow, shard_unwritten(&err), "superblock", NULL, NULL);
    return false;
}

static void fork_make(struct flow *flow, struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    const struct request_in *in = &flow->req->in;
    const uint64_t now_ms = kv_store_now_ms(store);
    if (!session_has_room(flow, kind_of(flow)) || !may_have_forks(flow)) {
        flow_finish(flow);
        return;
    }
    if (kind_of(flow) == KIND_MAIN_SESSION && admit_session(flow, fork_look) == FLOW_WAIT) return;
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    struct kv_session *fork =
        kv_index_session_fork(store->index, flow->session, &in->u.fork.session,
                              in->u.fork.session_name, in->session_name);
    if (fork == NULL) {
        flow_fail(flow, KV_REASON_SESSIONS_FULL, "sessions",
                  request_u64(flow->req, store->options.sessions_max), NULL);
        flow_finish(flow);
        return;
    }
    kv_index_entry_kind(&fork->entry, kind_of(flow));
    fork->ttl_ms = ttl_of(flow);
    fork->epoch = 1;
    fork->created_ms = fork->used_ms = now_ms;
    fork->has_head = fork->has_origin = true;
    fork->head = node;
    fork->head_id = fork->origin_id = node->id;
    fork->head_tokens = fork->claimed_tokens = fork->origin_tokens = node->tokens;
    kv_store_renew(store, node);
    flow->req->out.created = true;
    record_fork(flow, fork, node);
}

static void no_checkpoint(struct flow *flow, const char *cause)
{
    flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND, "checkpoint_id", NULL, cause);
    flow_finish(flow);
}

/* It is on its way to SSD: the fork's record must not come before it. */
static void fork_look(struct flow *flow)
{
    struct kv_session *session = flow->session;
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (session->tree->unreadable) {
        flow_fail(flow, KV_REASON_SESSION_UNREADABLE, "session_id", NULL,
                  flow->req->in.session_name);
        flow_finish(flow);
        return;
    }
    if (fork_again(flow)) return;
    struct kv_node *node = kv_index_node_find(session, &flow->req->in.u.fork.id);
    if (node == NULL)
        no_checkpoint(flow, kv_reason_info(why_gone(session, &flow->req->in.u.fork.id))->name);
    else if (node->foreign)
        no_checkpoint(flow, kv_reason_info(KV_REASON_MODEL_CHANGED)->name);
    else if (kv_index_expired(node, kv_store_now_ms(flow->shard->store)))
        no_checkpoint(flow, kv_reason_info(KV_REASON_EXPIRED)->name);
    else if (node->durable)
        fork_make(flow, node);
    else if (session->tree->commits > 0) {
        flow->waits_commit = true;
        flow->wake = fork_look;
    } else {
        flow_fail(flow, KV_REASON_SSD_READ_ONLY, "checkpoint_id", NULL, NULL);
        flow_finish(flow);
    }
}

/* ---- from the head ---- */

static void head_stored(struct flow *flow)
{
    struct kv_node *node = flow->points[0].node;
    const enum kv_reason why = flow->req->out.save_reason;
    flow->req->out.save_reason = KV_REASON_NONE;
    checkpoint_wake(flow);
    if (node == NULL || !node->durable) {
        flow_fail(flow, why == KV_REASON_NONE ? KV_REASON_SSD_READ_ONLY : why, "checkpoint", NULL,
                  NULL);
        flow_finish(flow);
        return;
    }
    flow->req->in.u.fork.id = node->id; /* Where fork_look() goes on after a wait. */
    fork_make(flow, node);
}

static void head_look(struct flow *flow)
{
    if (flow->failed || flow_cancelled(flow) || flow->session->tree->unreadable)
        fork_look(flow);
    else if (!fork_again(flow))
        checkpoint_start(flow, head_stored);
}

void flow_fork(struct flow *flow)
{
    const struct request_in *in = &flow->req->in;
    const bool from_head = !in->u.fork.has_id;
    const struct kv_user *user = kv_index_user_find(flow->shard->store->index, &flow->req->user);
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    if (user->erasing) {
        flow_fail(flow, KV_REASON_SESSION_BUSY, "session_id", NULL, in->session_name);
        flow->req->out.failure.retry_ms = 50;
        flow_finish(flow);
        return;
    }
    flow->wake = from_head ? head_look : fork_look;
    if (flow_load(flow) == FLOW_NEXT) flow->wake(flow);
}
