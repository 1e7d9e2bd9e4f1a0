/*
 * Sessions as things: open, close, list, show, roll back, wait for durability.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t age_ms(uint64_t now_ms, uint64_t then_ms)
{
    return now_ms > then_ms ? now_ms - then_ms : 0;
}

/* Where the session goes on: the live head, else its last checkpoint. */
static uint32_t head_position(const struct kv_session *session)
{
    const struct live *live = session->live;
    if (live != NULL) return live->state.tokens;
    if (session->tree == NULL || session->tree->load != KV_LOAD_DONE) return session->head_tokens;
    return session->head != NULL ? session->head->tokens : 0;
}

/* ---- OpenSession ---- */

#define KIND_MAIN_SESSION 1

static void record_done(void *context, kv_status status)
{
    struct flow *flow = context;
    if (status != KV_OK)
        flow_fail(flow, shard_unrecorded(flow->shard, status), "manifest", NULL, NULL);
    flow_finish(flow);
}

/* Writes the session's record (and its user's) and finishes when it is durable. */
static void record_session(struct flow *flow)
{
    struct request *req = flow->req;
    struct kv_batch *batch = kv_batch_create(flow->shard->store);
    kv_status status = batch == NULL ? KV_NOMEM : kv_batch_session(batch, flow->session);
    if (status == KV_OK) status = kv_batch_user(batch, flow->session->user, req->user_name);
    if (status == KV_OK)
        status = kv_store_deleted_forget(flow->shard->store, batch, &flow->session->id);
    if (status != KV_OK) {
        kv_batch_discard(batch);
        flow_fail_status(flow, status);
        flow_finish(flow);
        return;
    }
    kv_batch_post(batch, record_done, flow);
}

/* ttl_ms 0 finds sessions that follow the plan; also those whose ttl is what it says now, and what
 * ssd.ttl says: builds before plans had one recorded every ttl in full. */
static bool same_ttl(const struct flow *flow, uint64_t ttl_ms)
{
    const struct kv_session *session = flow->session;
    if (session->ttl_ms == ttl_ms) return true;
    return ttl_ms == 0 && (session->ttl_ms == session->user->ttl_ms ||
                           session->ttl_ms == flow->shard->store->options.rows_ttl_ms);
}

static bool same_parameters(struct flow *flow, uint8_t kind, uint64_t ttl_ms, const char *parent)
{
    const struct kv_session *session = flow->session;
    struct request *req = flow->req;
    if (session->kind != kind)
        flow_fail(flow, KV_REASON_SESSION_EXISTS, "kind", request_u64(req, session->kind),
                  request_u64(req, kind));
    else if (!same_ttl(flow, ttl_ms))
        flow_fail(flow, KV_REASON_SESSION_EXISTS, "ttl_ms", request_u64(req, session->ttl_ms),
                  request_u64(req, ttl_ms == 0 ? session->user->ttl_ms : ttl_ms));
    else if (strcmp(session->parent_name, parent) != 0 && !(session->has_origin && !*parent))
        flow_fail(flow, KV_REASON_SESSION_EXISTS, "parent_session_id", session->parent_name,
                  parent);
    return !flow->failed;
}

static struct kv_session *session_make(struct flow *flow, uint8_t kind, uint64_t ttl_ms,
                                       const char *parent)
{
    struct kv_store *store = flow->shard->store;
    struct request *req = flow->req;
    struct kv_user *user = kv_index_user_find(store->index, &req->user);
    if (user == NULL) user = kv_index_user_add(store->index, &req->user, NULL);
    if (user == NULL) return NULL;
    (void)snprintf(user->name, sizeof(user->name), "%s", req->user_name);
    const struct kv_quota quota = kv_store_quota(store, &user->id);
    user->ttl_ms = kv_store_quota_ttl_ms(store, &quota);
    struct kv_session *session =
        kv_index_session_add(store->index, &req->in.session, user, req->in.session_name, parent);
    if (session == NULL) return NULL;
    kv_index_entry_kind(&session->entry, kind);
    session->ttl_ms = ttl_ms == 0 && !kv_store_records_plan_ttl(store) ? user->ttl_ms : ttl_ms;
    session->epoch = 1;
    session->created_ms = session->used_ms = kv_store_now_ms(store);
    session->tree->load = KV_LOAD_DONE; /* There is nothing to load. */
    return session;
}

/* The parent of a new session is one of the same user; another's is as unknown as none. */
static bool parent_is_there(struct flow *flow, const char *parent)
{
    const struct kv_session_id id = kv_session_id_of(&flow->req->user, parent);
    if (*parent == '\0' || kv_index_entry_find(flow->shard->store->index, &id) != NULL) return true;
    flow_fail(flow, KV_REASON_SESSION_NOT_FOUND, "parent_session_id", NULL, parent);
    return false;
}

bool session_has_room(struct flow *flow, uint8_t kind)
{
    const struct kv_user *user = kv_index_user_find(flow->shard->store->index, &flow->req->user);
    if (user == NULL || kind == KV_SESSION_MAIN) return true;
    const uint64_t limit = (uint64_t)KV_SUB_SESSIONS_MAX * KV_MAX(user->mains, 1u);
    if (user->others < limit) return true;
    flow_fail(flow, KV_REASON_SUB_SESSIONS_FULL, "sub and ephemeral sessions",
              request_u64(flow->req, limit), request_u64(flow->req, user->others + 1u));
    return false;
}

static void open_found(struct flow *flow)
{
    struct request *req = flow->req;
    const uint8_t kind = (uint8_t)(req->in.u.open.kind == 0 ? 1 : req->in.u.open.kind);
    const char *parent = req->in.u.open.parent_name == NULL ? "" : req->in.u.open.parent_name;
    if (!req->out.created && !same_parameters(flow, kind, req->in.u.open.ttl_ms, parent)) {
        flow_finish(flow);
        return;
    }
    req->out.head_position = head_position(flow->session);
    /* Found or made, the record is written: an open that raced the first one waits for it too. */
    record_session(flow);
}

static void open_detailed(void *context, kv_status status, const struct kv_record_session *record)
{
    struct flow *flow = context;
    if (status == KV_OK) status = kv_store_detail_take(flow->shard->store, flow->session, record);
    if (status == KV_MISS || status == KV_CORRUPT)
        flow_fail(flow, KV_REASON_SESSION_UNREADABLE, "session_id", NULL,
                  flow->req->in.session_name);
    else if (status != KV_OK)
        flow_fail_status(flow, status);
    if (flow->failed || flow_cancelled(flow))
        flow_finish(flow);
    else
        open_found(flow);
}

void flow_open_session(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct request *req = flow->req;
    const uint8_t kind = (uint8_t)(req->in.u.open.kind == 0 ? 1 : req->in.u.open.kind);
    const char *parent = req->in.u.open.parent_name == NULL ? "" : req->in.u.open.parent_name;

    struct kv_session *session = kv_index_session_find(shard->store->index, &req->in.session);
    const struct kv_user *user = kv_index_user_find(shard->store->index, &req->user);
    if (flow->failed) { /* While room was made for it. */
        flow_finish(flow);
        return;
    }
    if ((session != NULL && session->deleting) || (user != NULL && user->erasing)) {
        flow_fail(flow, KV_REASON_SESSION_BUSY, "session_id", NULL, req->in.session_name);
        req->out.failure.retry_ms = 50;
        flow_finish(flow);
        return;
    }
    const bool is_new = kv_index_entry_find(shard->store->index, &req->in.session) == NULL;
    req->out.created = is_new;
    if (is_new && (!parent_is_there(flow, parent) || !session_has_room(flow, kind))) {
        flow_finish(flow);
        return;
    }
    if (is_new && kind == KIND_MAIN_SESSION && admit_session(flow, flow_open_session) == FLOW_WAIT)
        return;
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    if (is_new) session = session_make(flow, kind, req->in.u.open.ttl_ms, parent);
    if (session == NULL && !is_new) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    if (session == NULL) {
        flow_fail(flow, KV_REASON_SESSIONS_FULL, "sessions",
                  request_u64(req, shard->store->options.sessions_max), NULL);
        flow_finish(flow);
        return;
    }
    flow->session = session;
    session->flows++;
    req->out.epoch = session->epoch;
    if (session->has_details) {
        open_found(flow);
        return;
    }
    const kv_status status =
        kv_store_record_start(shard->store, &session->id, true, open_detailed, flow);
    if (status == KV_OK) return;
    flow_fail_status(flow, status);
    flow_finish(flow);
}

/* ---- CloseSession ---- */

static void close_now(struct flow *flow)
{
    struct kv_session *session = flow->session;
    struct flow *running = session->busy;
    if (flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (running != NULL) {
        /* What runs is cancelled first; it ends at its next chunk or step. */
        flow_close(running);
        flow->req->out.was_live = true;
        flow->waits_session = true;
        flow->wake = close_now;
        return;
    }
    flow->req->out.was_live |= session->live != NULL;
    live_release(flow->shard, session->live);
    flow_finish(flow);
}

void flow_close_session(struct flow *flow)
{
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    close_now(flow);
}

/* ---- Rollback ---- */

/* By id, or the checkpoint at a position with that digest: of several (their rows follow different
 * replays) one on the way to the head. */
static struct kv_node *rollback_target(struct flow *flow)
{
    const struct request_in *in = &flow->req->in;
    struct kv_session *session = flow->session;
    const struct live *live = session->live;
    struct kv_node *head = live != NULL ? live->node : session->head;
    struct kv_node *node = NULL, *found = NULL;
    if (in->u.rollback.has_id) return kv_index_node_find(session, &in->u.rollback.id);
    while ((node = kv_index_node_next(session, node)) != NULL) {
        if (node->tokens != in->u.rollback.position) continue;
        if (memcmp(node->digest.bytes, in->u.rollback.digest.bytes, sizeof(node->digest.bytes)) !=
            0)
            continue;
        if (kv_index_is_ancestor(node, head)) return node;
        if (found == NULL || node->replay_total < found->replay_total) found = node;
    }
    return found;
}

static void before_drop(struct kv_node *node)
{
    shard_before_drop(node->session, node);
}

/* The new head and what went for it become durable together. */
static void record_return(struct flow *flow, struct kv_node *old, const struct kv_node *target)
{
    struct kv_store *store = flow->shard->store;
    kv_store_roll_back(store, flow->session, old, target, before_drop);
    struct kv_batch *batch = kv_store_take_removals(store);
    const kv_status status = batch == NULL ? KV_NOMEM : kv_batch_session(batch, flow->session);
    if (status == KV_OK) {
        kv_batch_post(batch, record_done, flow);
        return;
    }
    if (batch != NULL) kv_batch_post(batch, NULL, NULL); /* What is gone stays gone. */
    flow_fail_status(flow, status);
    flow_finish(flow);
}

static void rollback_begun(struct flow *flow)
{
    struct kv_session *session = flow->session;
    resume_expire_live(flow);
    struct kv_node *node = rollback_target(flow);
    if (node == NULL || node->foreign ||
        kv_index_expired(node, kv_store_now_ms(flow->shard->store))) {
        const struct request_in *in = &flow->req->in;
        const struct kv_removal *removal =
            kv_history_at(session->tree->history, KV_MAX(in->u.rollback.position, 1u) - 1, false);
        enum kv_reason cause = removal == NULL ? KV_REASON_NEVER_STORED : removal->cause;
        if (node != NULL)
            cause = node->foreign ? KV_REASON_MODEL_CHANGED : KV_REASON_EXPIRED;
        else if (in->u.rollback.has_id)
            cause = why_gone(session, &in->u.rollback.id);
        flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND,
                  in->u.rollback.has_id ? "checkpoint_id" : "position", NULL,
                  kv_reason_info(cause)->name);
        flow_finish(flow);
        return;
    }
    struct live *live = session->live;
    const bool there = live != NULL ? live->node == node && live->state.tokens == node->tokens
                                    : session->head == node;
    flow->req->out.head_position = node->tokens;
    if (!there && flow->req->in.epoch != 0 && flow->req->in.epoch != session->epoch) {
        flow_fail(flow, KV_REASON_STALE_EPOCH, "epoch", request_u64(flow->req, session->epoch),
                  request_u64(flow->req, flow->req->in.epoch));
        flow_finish(flow);
        return;
    }
    if (there) {
        session->fell_back = false; /* Its caller named the place it goes on from. */
        flow_finish(flow);          /* The same target again: nothing to do, the epoch stays. */
        return;
    }
    struct kv_node *old = live != NULL ? live->node : session->head;
    live_release(flow->shard, live);
    session->fell_back = false;
    session->head = node;
    session->has_head = true;
    session->head_id = node->id;
    session->head_tokens = session->claimed_tokens = node->tokens;
    session->epoch++;
    flow->req->out.epoch = session->epoch;
    kv_store_renew(flow->shard->store, node);
    old_branches_came_back(flow->shard, session);
    if (flow->req->in.u.rollback.keep)
        record_session(flow);
    else
        record_return(flow, old, node);
}

void flow_rollback(struct flow *flow)
{
    if (!flow_find_session(flow) || !flow_claim_session(flow)) {
        flow_finish(flow);
        return;
    }
    flow_begin(flow, rollback_begun);
}

/* ---- WaitDurable ---- */

static bool keeps_nothing(const struct kv_store *store)
{
    return kv_ssd_usage(store->ssd).read_only || kv_manifest_stats(store->manifest).failed;
}

static void wait_look(struct flow *flow)
{
    struct kv_session *session = flow->session;
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    const struct kv_node *node = kv_index_node_find(session, &flow->req->in.u.wait_durable.id);
    if (node == NULL && keeps_nothing(flow->shard->store)) {
        /* Its save failed, or it never was: it cannot become durable before a restart. */
        flow_fail(flow, KV_REASON_SSD_READ_ONLY, "level", NULL, NULL);
        flow_finish(flow);
        return;
    }
    if (node == NULL) {
        flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND, "checkpoint_id", NULL,
                  kv_reason_info(why_gone(session, &flow->req->in.u.wait_durable.id))->name);
        flow_finish(flow);
        return;
    }
    if (!node->durable && session->tree->commits == 0 && flow->req->in.level != LEVEL_RAM) {
        /* Nothing is on the way that could make it durable. */
        flow_fail(flow, KV_REASON_SSD_READ_ONLY, "level", NULL, NULL);
        flow_finish(flow);
        return;
    }
    if (node->durable || flow->req->in.level == LEVEL_RAM) {
        flow->req->out.rows_level = node->durable ? LEVEL_SSD : LEVEL_RAM;
        flow_finish(flow);
        return;
    }
    flow->waits_commit = true;
    flow->wake = wait_look;
}

void flow_wait_durable(struct flow *flow)
{
    flow->wake = wait_look;
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow_load(flow) == FLOW_NEXT) wait_look(flow);
}

/* ---- GetSession, ListSessions ---- */

static void fill_session(struct flow *flow, const struct kv_session *session,
                         struct request_session *out)
{
    const uint64_t now_ms = kv_store_now_ms(flow->shard->store);
    const bool is_loaded = session->tree != NULL && session->tree->load == KV_LOAD_DONE;
    *out = (struct request_session){
        .kind = session->kind,
        .head_position = head_position(session),
        .checkpoints = is_loaded ? session->node_count : session->recorded_nodes,
        .live = session->live != NULL,
        .idle_ms = age_ms(now_ms, session->used_ms),
        .age_ms = age_ms(now_ms, session->created_ms),
        .ttl_ms = kv_index_session_ttl_ms(&session->entry),
        .ttl_of_plan = session->ttl_ms == 0,
    };
}

/* Of the others that share its tree. */
static bool fill_heads(struct flow *flow)
{
    const struct kv_tree *tree = flow->session->tree;
    struct request_out *out = &flow->req->out;
    out->heads = kv_arena_alloc(flow->req->arena, sizeof(*out->heads) * tree->session_count);
    if (out->heads == NULL) return false;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        const struct live *live = at->live;
        const struct kv_node *node = live != NULL ? live->node : at->head;
        struct request_head *head = &out->heads[out->head_count];
        if (at == flow->session || !at->has_details) continue;
        *head = (struct request_head){
            .session_name = kv_arena_strdup(flow->req->arena, at->name, strlen(at->name)),
            .has_checkpoint = node != NULL,
            .position = head_position(at),
        };
        if (node != NULL) head->checkpoint = node->id;
        if (head->session_name == NULL) return false;
        out->head_count++;
    }
    return true;
}

static void session_show(struct flow *flow)
{
    struct kv_session *session = flow->session;
    struct kv_arena *arena = flow->req->arena;
    struct request_out *out = &flow->req->out;
    struct kv_node *node = NULL;
    uint32_t count = 0;
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    fill_session(flow, session, &out->session);
    out->session.name = flow->req->in.session_name;
    out->session.parent_name = session->has_details ? kv_arena_strdup(arena, session->parent_name,
                                                                      strlen(session->parent_name))
                                                    : "";
    while ((node = kv_index_node_next(session, node)) != NULL)
        count++;
    out->checkpoints = kv_arena_alloc(arena, sizeof(*out->checkpoints) * (count + 1u));
    if (out->checkpoints == NULL || out->session.parent_name == NULL)
        flow_fail_status(flow, KV_NOMEM);
    while (out->checkpoints != NULL && (node = kv_index_node_next(session, node)) != NULL) {
        struct request_checkpoint *checkpoint = &out->checkpoints[out->checkpoint_count++];
        flow_fill_checkpoint(flow, node, checkpoint);
        if (node->session != session && node->session->has_details)
            checkpoint->session_name =
                kv_arena_strdup(arena, node->session->name, strlen(node->session->name));
    }
    if (!fill_heads(flow)) flow_fail_status(flow, KV_NOMEM);
    if (!why_removals(flow, session)) flow_fail_status(flow, KV_NOMEM);
    out->reason = why_head(flow->shard, session);
    const struct live *live = session->live;
    const struct kv_node *head = live != NULL ? live->node : session->head;
    out->has_head_checkpoint = head != NULL;
    if (head != NULL) out->head_checkpoint = head->id;
    flow_finish(flow);
}

void flow_get_session(struct flow *flow)
{
    flow->wake = session_show;
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow_load(flow) == FLOW_NEXT) session_show(flow);
}

static int compare_ids(const void *a, const void *b)
{
    const struct kv_session_entry *const *x = a, *const *y = b;
    return memcmp((*x)->id.bytes, (*y)->id.bytes, sizeof((*x)->id.bytes));
}

/* The user's sessions after `after`, ordered by id: stable while sessions come and go. */
static uint32_t collect(struct flow *flow, const struct kv_session_entry **ret_list,
                        uint32_t capacity)
{
    const struct kv_index *index = flow->shard->store->index;
    const struct request_in *in = &flow->req->in;
    const struct kv_session_entry *entry = NULL;
    uint32_t bucket = 0, count = 0;
    while ((entry = kv_index_entry_next(index, &bucket, entry)) != NULL) {
        if (!kv_id_equal(entry->user->id.bytes, flow->req->user.bytes)) continue;
        if (in->u.list.has_after &&
            memcmp(entry->id.bytes, in->u.list.after.bytes, sizeof(entry->id.bytes)) <= 0)
            continue;
        if (count < capacity) ret_list[count] = entry;
        count++;
    }
    return count;
}

/* Those that went while their names were read are left out. */
static void list_named(struct flow *flow)
{
    struct request_out *out = &flow->req->out;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < out->session_count; i++) {
        if (flow->names[i].name == NULL) continue;
        out->sessions[kept] = out->sessions[i];
        out->sessions[kept].name = flow->names[i].name;
        out->sessions[kept++].parent_name = flow->names[i].parent_name;
    }
    out->session_count = kept;
    flow_finish(flow);
}

static void list_fill(struct flow *flow, const struct kv_session_entry **list, uint32_t count)
{
    struct request_out *out = &flow->req->out;
    out->session_count = KV_MIN(count, flow->req->in.u.list.page_size);
    for (uint32_t i = 0; i < out->session_count; i++) {
        struct kv_session shape;
        fill_session(flow, kv_index_look(list[i], &shape), &out->sessions[i]);
        flow->names[i] = (struct session_name){.id = list[i]->id};
    }
    out->list_more = count > out->session_count;
    if (out->session_count > 0) out->list_last = list[out->session_count - 1]->id;
}

void flow_list_sessions(struct flow *flow)
{
    struct request *req = flow->req;
    struct request_out *out = &req->out;
    const uint32_t count = collect(flow, NULL, 0);
    const uint32_t room = KV_MIN(count, req->in.u.list.page_size) + 1u;
    const struct kv_session_entry **list =
        malloc(sizeof(const struct kv_session_entry *) * KV_MAX(count, 1u));
    out->sessions = kv_arena_alloc(req->arena, sizeof(*out->sessions) * room);
    flow->names = kv_arena_alloc(req->arena, sizeof(*flow->names) * room);
    if (list == NULL || out->sessions == NULL || flow->names == NULL) {
        free(list);
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    (void)collect(flow, list, count);
    qsort(list, count, sizeof(const struct kv_session_entry *), compare_ids);
    list_fill(flow, list, count);
    free(list);
    names_read(flow, flow->names, out->session_count, list_named);
}
