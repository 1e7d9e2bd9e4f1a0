/*
 * DeleteSession and EraseUser: what is removed before the answer, and never comes back.
 *
 * A session is taken out of reach first: running calls are cancelled, calls that look at it end,
 * new ones are refused, its tree and windows leave memory.  Then all its records go in one batch,
 * so that after a crash there is the whole session or nothing of it, and the answer is sent when
 * that batch is durable.  Its places are free from then on; zeros are written over their bytes
 * within ssd.erase_within, if somebody else's rows are not.
 *
 * The records are read, not the tree: a session whose tree does not fit the index is deleted as
 * well.  Only where other sessions have a head in the tree it is loaded, to see what they need:
 * that becomes theirs, in the same batch.  EraseUser does this for one session after the other,
 * then with the user's own record, which holds name and salt.  It may be cut short between two
 * sessions and repeated.
 */

#include "cached/shard/delete_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- the end ---- */

static void removal_free(struct removal *removal)
{
    struct removal **link = &removal->shard->removals;
    while (*link != NULL && *link != removal)
        link = &(*link)->next;
    if (*link == removal) *link = removal->next;
    kv_batch_discard(removal->batch);
    free(removal->buf);
    free(removal->ids);
    free(removal);
}

static void removal_end(struct removal *removal)
{
    struct flow *flow = removal->flow;
    if (removal->user != NULL && !removal->dry_run)
        removal->user->erasing = removal->user->keys_gone = false;
    if (removal->loss.cause == KV_REASON_QUOTA) {
        removal_free(removal);
        flow->wake(flow);
        return;
    }
    if (flow != NULL) flow->req->out.receipt = removal->receipt;
    removal_free(removal);
    if (flow != NULL) flow_finish(flow);
}

/* A dry run has taken nothing out of reach: its session may be in the middle of somebody else's
 * deletion. */
void removal_let_go(struct removal *removal)
{
    struct kv_session *session = removal->session;
    removal->session = NULL;
    if (session == NULL) return;
    if (!removal->dry_run) session->deleting = false;
    session->flows--;
}

/* What is left stays as it was; whoever asked hears why. */
void removal_fail(struct removal *removal, kv_status status)
{
    removal_let_go(removal);
    if (removal->loss.cause == KV_REASON_QUOTA) {
        removal->flow->quota_tries = UINT32_MAX; /* It has to do without. */
        removal_end(removal);
        return;
    }
    if (removal->flow != NULL && !removal->flow->failed) {
        if (status == KV_IO)
            flow_fail(removal->flow, KV_REASON_SSD_READ_ONLY, "manifest", NULL, NULL);
        else if (status == KV_CORRUPT)
            flow_fail(removal->flow, KV_REASON_SESSION_UNREADABLE, "session_id", NULL, NULL);
        else
            flow_fail_status(removal->flow, status);
    }
    removal_end(removal);
}

/* Its batch was not written, or may have been. */
void removal_unrecorded(struct removal *removal, kv_status status)
{
    if (removal->flow != NULL)
        flow_fail(removal->flow, shard_unrecorded(removal->shard, status), "manifest", NULL, NULL);
    removal_fail(removal, status);
}

/* ---- one session: out of reach ---- */

static bool is_at_rest(const struct removal *removal)
{
    const struct kv_session *session = removal->session;
    const uint32_t own = 1u + (removal->flow->session == session);
    /* Pages that the kernel still reads into are some session's. */
    return removal->shard->store->reads_late == 0 && session->busy == NULL &&
           session->flows == own && session->tree->commits == 0 &&
           session->tree->load != KV_LOAD_RUNNING;
}

static void leave_start(struct removal *removal);

static void wait_look(struct removal *removal)
{
    struct shard *shard = removal->shard;
    struct kv_session *session = removal->session;
    struct flow *flow = removal->flow;
    if (flow_cancelled(flow)) {
        removal_fail(removal, KV_OK);
        return;
    }
    if (!is_at_rest(removal)) {
        if (session->busy != NULL) flow_close(session->busy);
        removal->waiting = true;
        return;
    }
    removal->waiting = false;
    live_release(shard, session->live);
    /* From here on nothing but this removal knows the session. */
    if (flow->session == session) {
        flow->session = NULL;
        session->flows--;
    }
    if (session->tree->session_count > 1) {
        leave_start(removal);
        return;
    }
    if (session->tree->load == KV_LOAD_DONE) kv_store_unload(shard->store, session);
    removal_read(removal);
}

/* ---- one session of several in a tree ---- */

static void before_drop(struct kv_node *node)
{
    shard_before_drop(node->session, node);
}

static void leave_now(struct removal *removal)
{
    struct kv_store *store = removal->shard->store;
    struct kv_session *session = removal->session;
    struct kv_store_leaving leaving = kv_store_leaving(session);
    removal->leaves = true;
    removal->nodes = leaving.nodes;
    removal->pages = leaving.pages;
    removal_count(removal);
    if (removal->dry_run) {
        removal_let_go(removal);
        removal_next(removal);
        return;
    }
    const struct kv_record_deleted record = removal_record(removal);
    const kv_status status = kv_store_leave(store, session, removal->user == NULL ? &record : NULL,
                                            before_drop, removal_session_gone, removal);
    if (status != KV_OK) removal_fail(removal, status);
}

static void leave_look(struct removal *removal)
{
    const struct kv_tree *tree = removal->session->tree;
    if (removal->flow != NULL && flow_cancelled(removal->flow))
        removal_fail(removal, KV_OK);
    else if (tree->unreadable)
        removal_fail(removal, KV_CORRUPT);
    else if (tree->session_count == 1 && !removal->dry_run)
        wait_look(removal); /* The others went meanwhile. */
    else if (tree->commits > 0)
        removal->waiting = true; /* Checkpoints that may go again are on their way. */
    else
        leave_now(removal);
}

static void tree_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct removal *removal = context;
    flow_wake_loaded(session, status);
    if (status != KV_OK)
        removal_fail(removal, status);
    else
        leave_look(removal);
}

static void leave_start(struct removal *removal)
{
    struct kv_session *session = removal->session;
    if (session->tree->load == KV_LOAD_RUNNING)
        removal->waiting = true;
    else if (session->tree->load == KV_LOAD_DONE)
        leave_look(removal);
    else
        kv_store_load_start(removal->shard->store, session, tree_loaded, removal);
}

void delete_tick(struct shard *shard)
{
    struct removal *next = NULL;
    for (struct removal *removal = shard->removals; removal != NULL; removal = next) {
        next = removal->next;
#ifdef CACHED_TEST_HOOKS
        if (removal->held_ns != 0) {
            removal_post_held(removal);
            continue;
        }
#endif
        if (!removal->waiting) continue;
        removal->waiting = false;
        if (removal->dry_run)
            leave_start(removal);
        else
            wait_look(removal);
    }
}

static void session_start(struct removal *removal, struct kv_session *session)
{
    const bool is_one_of_several = session->tree->session_count > 1;
    removal->session = session;
    session->flows++; /* It stays open, and nobody else deletes it. */
    if (!removal->dry_run) {
        session->deleting = true;
        wait_look(removal);
    } else if (is_one_of_several && removal->user == NULL) {
        leave_start(removal);
    } else {
        removal_read(removal);
    }
}

/* Only counted, with all others of its user: a tree is counted once, with one of its sessions. */
static bool is_counted(const struct removal *removal, const struct kv_session *session)
{
    return removal->dry_run && removal->user != NULL && session->tree->sessions != &session->entry;
}

/* ---- the calls ---- */

static void user_gone(void *context, kv_status status)
{
    struct removal *removal = context;
    struct kv_user *user = removal->user;
    if (status != KV_OK) {
        removal_unrecorded(removal, status);
        return;
    }
    removal->user = NULL;
    answers_forget_user(removal->shard, &user->id);
    kv_store_forget_user(removal->shard->store, user);
    removal_end(removal);
}

static void user_end(struct removal *removal)
{
    struct kv_batch *batch = removal->dry_run ? NULL : kv_batch_create(removal->shard->store);
    if (removal->dry_run) {
        removal_end(removal);
        return;
    }
    if (batch == NULL || kv_batch_delete_user(batch, &removal->user->id) != KV_OK ||
        kv_store_deleted_erase(removal->shard->store, batch, &removal->user->id) != KV_OK) {
        kv_batch_discard(batch);
        removal_fail(removal, KV_NOMEM);
        return;
    }
    kv_batch_post(batch, user_gone, removal);
}

void removal_next(struct removal *removal)
{
    assert(removal->session == NULL);
    while (removal->id_next < removal->id_count) {
        struct kv_session *session =
            kv_index_session_find(removal->shard->store->index, &removal->ids[removal->id_next++]);
        if (session == NULL) continue; /* Its owner was faster. */
        if (is_counted(removal, session)) {
            removal->receipt.sessions++;
            continue;
        }
        if (removal->flow != NULL && flow_cancelled(removal->flow)) {
            removal_fail(removal, KV_OK);
        } else if (session->deleting) {
            /* Its owner deletes it now: the two would wait for each other's end. */
            if (removal->flow != NULL) {
                flow_fail(removal->flow, KV_REASON_SESSION_BUSY, "session_id", NULL,
                          session->has_details ? session->name : NULL);
                removal->flow->req->out.failure.retry_ms = 50;
            }
            removal_fail(removal, KV_OK);
        } else {
            session_start(removal, session);
        }
        return;
    }
    if (removal->user != NULL)
        user_end(removal);
    else
        removal_end(removal);
}

static struct removal *removal_make(struct flow *flow, bool dry_run)
{
    struct removal *removal = calloc(1, sizeof(*removal));
    if (removal == NULL) return NULL;
    removal->buf = malloc(REMOVAL_SCAN_BYTES);
    if (removal->buf == NULL) {
        free(removal);
        return NULL;
    }
    removal->shard = flow->shard;
    removal->flow = flow;
    removal->dry_run = dry_run;
    removal->next = flow->shard->removals;
    flow->shard->removals = removal;
    return removal;
}

bool delete_for_quota(struct flow *flow, struct kv_session *session, const struct kv_loss *loss)
{
    struct removal *removal = removal_make(flow, false);
    if (removal == NULL) return false;
    removal->loss = *loss;
    session_start(removal, session);
    return true;
}

void flow_delete_session(struct flow *flow)
{
    struct request *req = flow->req;
    const struct kv_session_entry *known =
        kv_index_entry_find(flow->shard->store->index, &req->in.session);
    /* Again, after a lost answer. */
    if (known == NULL && kv_store_deleted_find(flow->shard->store, &req->in.session) != NULL) {
        flow_finish(flow);
        return;
    }
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    struct removal *removal = removal_make(flow, req->in.u.remove.dry_run);
    if (removal == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    session_start(removal, flow->session);
}

/* Ids of the user's sessions: those that are opened from now on are refused. */
static bool collect(struct removal *removal)
{
    struct kv_index *index = removal->shard->store->index;
    for (int fill = 0; fill < 2; fill++) {
        const struct kv_session_entry *entry = NULL;
        uint32_t bucket = 0, count = 0;
        while ((entry = kv_index_entry_next(index, &bucket, entry)) != NULL) {
            if (entry->user != removal->user) continue;
            if (fill) removal->ids[count] = entry->id;
            count++;
        }
        removal->id_count = count;
        if (!fill) removal->ids = malloc(sizeof(*removal->ids) * KV_MAX(count, 1u));
        if (removal->ids == NULL) return false;
    }
    return true;
}

void flow_erase_user(struct flow *flow)
{
    struct request *req = flow->req;
    struct kv_user *user = kv_index_user_find(flow->shard->store->index, &req->in.u.remove.user);
    if (user == NULL) { /* Never there, or erased already. */
        flow_finish(flow);
        return;
    }
    req->out.receipt.found = true;
    if (user->erasing) {
        flow_fail(flow, KV_REASON_SESSION_BUSY, "user", NULL, req->in.u.remove.user_name);
        req->out.failure.retry_ms = 50;
        flow_finish(flow);
        return;
    }
    struct removal *removal = removal_make(flow, req->in.u.remove.dry_run);
    if (removal == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    removal->user = user;
    removal->receipt.found = true;
    user->erasing = !removal->dry_run;
    if (collect(removal))
        removal_next(removal);
    else
        removal_fail(removal, KV_NOMEM);
}
