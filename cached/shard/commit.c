/*
 * From a live session's pages to durable checkpoints.
 *
 * A commit makes the nodes of all its points at once, so the user can resume from them right away,
 * writes each page they need once, and then waits: pages flushed, then records synced, then the
 * checkpoints are durable and whoever waits is told.  When the save fails the nodes go again, the
 * head falls back to the last durable checkpoint, and the live session keeps its rows in memory.
 *
 * A tree has one commit in flight at a time, whichever session's: flows wait for it before they
 * match and before they save, so a page is never on its way twice, and nothing is built on
 * checkpoints that may go again.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ROOM_WAIT_NS 3000000000ull

/* Full pages from where they lie; the page still being filled from a copy. */
static bool plan_writes(struct shard *shard, struct live *live, struct commit *commit,
                        struct commit_pages *touched)
{
    struct kv_store *store = shard->store;
    const uint32_t end = commit->nodes[commit->node_count - 1]->tokens;
    for (uint32_t i = 0; i < touched->count; i++) {
        if (touched->objects[i] == KV_PAGE_INDEX_NONE) continue;
        const uint32_t k = touched->first + i;
        const uint32_t count = KV_MIN(KV_PAGE_TOKENS, end - k * KV_PAGE_TOKENS);
        struct live_page *entry = &live->pages[k];
        if (count == KV_PAGE_TOKENS) {
            kv_write_add(commit->write, touched->objects[i], entry->slot, count, &live->chain[k]);
            kv_index_page_ref(store->index, touched->objects[i]);
            entry->page = touched->objects[i];
            continue;
        }
        /* At most the last page is not full. */
        uint32_t slot = live->spare;
        live->spare = KV_HBM_SLOT_NONE;
        if (slot == KV_HBM_SLOT_NONE &&
            (!live_make_room(shard, live, 1) || kv_hbm_alloc(store->hbm, &slot) != KV_OK))
            return false;
        /* Not what lies behind: the engine may be writing there. */
        kv_page_copy(shard->layout, live->page_bytes[k], count, kv_hbm_bytes(store->hbm, slot));
        kv_write_add(commit->write, touched->objects[i], slot, count, &live->chain[k]);
        kv_hbm_unpin(store->hbm, slot); /* The write holds its own pin. */
    }
    return true;
}

static void fall_back(struct kv_session *session, struct kv_node *node)
{
    session->head = node;
    session->has_head = node != NULL;
    session->head_tokens = node == NULL ? 0 : node->tokens;
    if (node != NULL) session->head_id = node->id;
}

/* Whoever has still to answer with this checkpoint says that it is not stored: the waiter, and a
 * decode that answers early but is still sending. */
static void forget_point(const struct commit *commit, const struct kv_node *node)
{
    for (struct flow *flow = commit->shard->flows; flow != NULL; flow = flow->next) {
        for (uint32_t i = 0; i < flow->point_count; i++) {
            if (flow->points[i].node != node) continue;
            flow->points[i].node = NULL;
            flow->req->out.save_reason = commit->why;
        }
    }
}

/* Undoes what this commit made: nodes from the deepest up, page objects back to their old place. */
static void commit_revert(struct commit *commit, bool free_space)
{
    struct shard *shard = commit->shard;
    struct kv_store *store = shard->store;
    struct live *live = commit->live;
    struct kv_session *session = commit->session;
    const struct kv_loss loss = {.cause = KV_REASON_CAPACITY};

    if (live != NULL) {
        for (uint32_t k = 0; k < live->page_count; k++) {
            struct live_page *entry = &live->pages[k];
            if (entry->page == KV_PAGE_INDEX_NONE) continue;
            if (kv_index_page(store->index, entry->page)->durable) continue;
            kv_index_page_unref(store->index, entry->page);
            entry->page = KV_PAGE_INDEX_NONE;
        }
    }
    if (commit->write != NULL) kv_write_undo(commit->write, free_space);
    for (uint32_t i = commit->node_count; i-- > 0;) {
        struct kv_node *node = commit->nodes[i];
        assert(node->child == NULL);
        shard_before_drop(session, node);
        if (session->head == node) fall_back(session, node->parent);
        forget_point(commit, node);
        kv_store_note_node(store, node, &loss);
        kv_pool_drop(store->pool, &node->image, KV_REASON_CAPACITY);
        kv_index_node_remove(store->index, node);
    }
    store->counters.saves_failed++;
}

static void commit_end(struct commit *commit, bool saved)
{
    struct shard *shard = commit->shard;
    struct flow *waiter = commit->waiter;
    struct commit **link = &shard->commits;
    while (*link != NULL && *link != commit)
        link = &(*link)->next;
    if (*link == commit) *link = commit->next;
    struct kv_session *session = commit->session;
    assert(session->tree->commits > 0);
    session->tree->commits--;
    kv_histogram_add(&shard->latencies[LATENCY_COMMIT], kv_clock_stopwatch_ns() - commit->begun_ns);
    if (saved) {
        shard->store->counters.saves += commit->node_count;
    } else if (waiter != NULL) {
        waiter->req->out.save_reason = commit->why;
    }
    kv_write_destroy(commit->write);
    kv_batch_discard(commit->batch);
    free(commit);
    if (saved) admit_turns(shard, session);
    if (waiter != NULL) {
        waiter->commit = NULL;
        waiter->wake(waiter);
    }
    shard_commit_ended(shard, session);
}

/* The file system has no room: others took it. */
static void note_full(struct commit *commit)
{
    commit->why = KV_REASON_SSD_FULL;
    commit->shard->evict.refused_ns = kv_clock_stopwatch_ns();
}

static void path_durable(struct kv_store *store, struct kv_node *node)
{
    for (; node != NULL && !node->durable; node = node->parent) {
        node->durable = true;
        store->checkpoints++;
    }
}

static void records_done(void *context, kv_status status)
{
    struct commit *commit = context;
    struct kv_store *store = commit->shard->store;
    if (status != KV_OK) {
        /* BUSY: nothing was written, so it cannot turn up at the next start either. */
        if (status == KV_BUSY || kv_manifest_stats(store->manifest).no_room) note_full(commit);
        commit_revert(commit, status == KV_BUSY);
        commit_end(commit, false);
        return;
    }
    commit->shard->evict.refused_ns = 0; /* Saves work again. */
    for (uint32_t i = 0; commit->write != NULL && i < commit->write->count; i++)
        kv_index_page(store->index, commit->write->items[i].page)->durable = true;
    for (uint32_t i = 0; i < commit->node_count; i++)
        path_durable(store, commit->nodes[i]);
    for (uint32_t i = 0; i < commit->found_count; i++)
        path_durable(store, commit->found[i]);
    commit_end(commit, true);
}

/* A node made by cutting an edge is recorded with the first one below it, or with the first commit
 * that names it. */
static kv_status batch_path(struct commit *commit, struct kv_node *end)
{
    kv_status status = KV_OK;
    for (struct kv_node *node = end; status == KV_OK && node != NULL; node = node->parent) {
        if (node != end && node->durable) break;
        status = kv_batch_node(commit->batch, node);
    }
    return status;
}

static kv_status fill_pages(struct commit *commit)
{
    struct kv_store *store = commit->shard->store;
    kv_status status = KV_OK;
    for (uint32_t i = 0; status == KV_OK && commit->write != NULL && i < commit->write->count;
         i++) {
        const struct kv_write_item *item = &commit->write->items[i];
        status = kv_batch_page(commit->batch, kv_index_page(store->index, item->page));
        if (status == KV_OK && item->old_ssd != KV_SSD_PAGE_NONE)
            status = kv_batch_free_ssd(commit->batch, item->old_ssd);
    }
    return status;
}

/* An edge of another session was cut: its new checkpoint is in that session's number. */
static kv_status fill_makers(struct commit *commit)
{
    const struct kv_session *session = commit->session;
    kv_status status = KV_OK;
    for (const struct kv_session *at = kv_index_head_next(session->tree, NULL);
         status == KV_OK && at != NULL; at = kv_index_head_next(session->tree, at))
        if (at != session && at->before.recorded_nodes != at->recorded_nodes)
            status = kv_batch_session(commit->batch, at);
    return status;
}

static kv_status fill_tree(struct commit *commit)
{
    struct kv_session *session = commit->session;
    kv_status status = KV_OK;
    for (struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at))
        at->before.recorded_nodes = at->recorded_nodes;
    /* Its old record stays true; the new one shows the tree as it is. */
    if (commit->shortened != NULL && commit->shortened->durable)
        status = kv_batch_node(commit->batch, commit->shortened);
    for (uint32_t i = 0; status == KV_OK && i < commit->node_count; i++)
        status = batch_path(commit, commit->nodes[i]);
    for (uint32_t i = 0; status == KV_OK && i < commit->found_count; i++)
        status = batch_path(commit, commit->found[i]);
    /* Not before: a record of the session that a removal writes meanwhile must not name a head
     * that has no record itself. */
    if (session->head != NULL && kv_id_equal(session->head->id.bytes, commit->head_id.bytes)) {
        session->has_head = true;
        session->head_id = commit->head_id;
        session->head_tokens = commit->head_tokens;
        session->claimed_tokens = commit->claimed_tokens;
    }
    if (status == KV_OK) status = fill_makers(commit);
    return status == KV_OK ? kv_batch_session(commit->batch, session) : status;
}

static void post_batch(struct commit *commit, kv_batch_done_fn *done)
{
    struct kv_batch *batch = commit->batch;
    commit->batch = NULL; /* The store's from here on. */
    kv_batch_post(batch, done, commit);
}

#ifdef CACHED_TEST_HOOKS
void commit_ack_early(struct commit *commit)
{
    struct flow *waiter = commit->waiter;
    for (uint32_t i = 0; i < commit->node_count; i++)
        path_durable(commit->shard->store, commit->nodes[i]);
    for (uint32_t i = 0; i < commit->found_count; i++)
        path_durable(commit->shard->store, commit->found[i]);
    commit->waiter = NULL;
    if (waiter == NULL) return;
    waiter->commit = NULL;
    waiter->wake(waiter);
}

/* The second half of what should be one batch. */
static void torn_tree_done(void *context, kv_status status)
{
    struct commit *commit = context;
    commit->batch = kv_batch_create(commit->shard->store);
    if (status != KV_OK || commit->batch == NULL || fill_pages(commit) != KV_OK) {
        records_done(commit, KV_IO);
        return;
    }
    post_batch(commit, records_done);
}
#endif

static kv_status post_records(struct commit *commit)
{
    kv_status status = fill_tree(commit);
#ifdef CACHED_TEST_HOOKS
    if (status == KV_OK && KV_PLANTED(commit->shard->store, TORN_RECORD)) {
        post_batch(commit, torn_tree_done);
        return KV_OK;
    }
#endif
    if (status == KV_OK) status = fill_pages(commit);
    if (status != KV_OK) return status;
    post_batch(commit, records_done);
#ifdef CACHED_TEST_HOOKS
    if (KV_PLANTED(commit->shard->store, ACK_BEFORE_SYNC)) commit_ack_early(commit);
#endif
    return KV_OK;
}

static enum kv_reason reason_of(kv_status status, const struct kv_error *err)
{
    if (status == KV_BUSY) return KV_REASON_SSD_FULL;
    if (status == KV_INVALID) return KV_REASON_SSD_READ_ONLY;
    return err->sys_errno == ENOSPC ? KV_REASON_SSD_FULL : KV_REASON_SSD_READ_ONLY;
}

/* Before it is told: nothing of it was written. */
static void refuse(struct commit *commit, kv_status status, const struct kv_error *err)
{
    struct shard *shard = commit->shard;
    kv_log(shard->options.log, KV_LOG_WARN, "save_refused", "status=%s cause=\"%s\"",
           kv_status_name(status), err->text);
    shard->counters.save_refused++;
    if (status == KV_BUSY) shard->counters.room_refused++;
    if (err->sys_errno == ENOSPC ||
        (status == KV_BUSY && kv_ssd_room(shard->store->ssd).is_bounded))
        note_full(commit);
    commit->why = reason_of(status, err);
    commit_revert(commit, true);
}

static enum kv_reason refused(struct commit *commit, kv_status status, const struct kv_error *err)
{
    refuse(commit, status, err);
    const enum kv_reason reason = commit->why;
    kv_write_destroy(commit->write);
    kv_batch_discard(commit->batch);
    free(commit);
    return reason;
}

/* ---- waiting for room ---- */

/* More than the tier can ever hold is refused at once. */
static bool wait_for_room(struct commit *commit)
{
    struct shard *shard = commit->shard;
    const uint32_t limit = kv_ssd_room(shard->store->ssd).limit;
    if (commit->write->count > limit) return false;
    if (shard->waiting_count >= KV_REQUESTS_INFLIGHT_MAX || atomic_load(&shard->stopping))
        return false;
    if (shard->waiting_first == NULL)
        shard->waiting_first = commit;
    else
        shard->waiting_last->next_waiting = commit;
    shard->waiting_last = commit;
    shard->waiting_count++;
    shard->waiting_pages += commit->write->count;
    shard->counters.room_waits++;
    shard->evict.hopeless_ns = 0; /* Beside it something may go that could not before. */
    return true;
}

static void pages_done(struct kv_write *write, kv_status status)
{
    struct commit *commit = write->context;
    const bool wrote_nothing = status != KV_OK && write->err.text[0] != '\0';
    if (status == KV_BUSY && wait_for_room(commit)) return;
    if (wrote_nothing) { /* It waited for a segment that could not be made. */
        refuse(commit, status, &write->err);
        commit_end(commit, false);
        return;
    }
    if (status == KV_OK) status = post_records(commit);
    if (status != KV_OK) {
        kv_log(commit->shard->options.log, KV_LOG_ERROR, "save_failed", "status=%s",
               kv_status_name(status));
        commit_revert(commit, true);
        commit_end(commit, false);
    }
}

static kv_status write_in_turn(struct commit *commit, struct kv_error *err)
{
    if (commit->shard->waiting_first != NULL)
        return KV_FAIL(err, KV_BUSY, "the SSD tier is full: others wait for room");
    return kv_write_start(commit->write, err);
}

void commit_retry(struct shard *shard, uint64_t hopeless_ns)
{
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    while (shard->waiting_first != NULL) {
        struct commit *commit = shard->waiting_first;
        struct kv_error err = {0};
        const kv_status status = kv_write_start(commit->write, &err);
        const bool is_over = commit->begun_ns < hopeless_ns || atomic_load(&shard->stopping) ||
                             now_ns - commit->begun_ns > ROOM_WAIT_NS;
        if (status == KV_BUSY && !is_over) return;
        shard->waiting_first = commit->next_waiting;
        shard->waiting_count--;
        shard->waiting_pages -= commit->write->count;
        if (status == KV_OK) continue;
        refuse(commit, status, &err);
        commit_end(commit, false);
    }
}

bool commit_waits(const struct shard *shard, const struct kv_session *session)
{
    const struct commit *commit = shard->waiting_first;
    while (commit != NULL && commit->session->tree != session->tree)
        commit = commit->next_waiting;
    if (commit == NULL) return false;
    /* A call that did not want to wait for it goes on beside it, and may stand on any node. */
    for (const struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at)) {
        const struct flow *busy = at->busy;
        if (busy != NULL && busy != commit->waiter && !busy->waits_commit) return false;
    }
    return true;
}

/* Whether a node is on the way to where a session of its tree is. */
static bool is_stood_on(const struct kv_node *node)
{
    const struct kv_tree *tree = node->session->tree;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        const struct live *live = at->live;
        if (live != NULL && kv_index_is_ancestor(node, live->node)) return true;
        if (live != NULL && kv_index_is_ancestor(node, live->branch)) return true;
        if (kv_index_is_ancestor(node, at->head)) return true;
    }
    return false;
}

bool commit_needs(const struct shard *shard, const struct kv_node *node)
{
    const struct kv_tree *tree = node->session->tree;
    if (is_stood_on(node)) return true;
    for (const struct commit *commit = shard->commits; commit != NULL; commit = commit->next) {
        if (commit->session->tree != tree) continue;
        for (uint32_t i = 0; i < commit->node_count; i++)
            if (kv_index_is_ancestor(node, commit->nodes[i])) return true;
        for (uint32_t i = 0; i < commit->found_count; i++)
            if (kv_index_is_ancestor(node, commit->found[i])) return true;
        if (kv_index_is_ancestor(node, commit->shortened)) return true;
    }
    for (const struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (flow->session == NULL || flow->session->tree != tree) continue;
        for (uint32_t i = 0; i < flow->point_count; i++)
            if (kv_index_is_ancestor(node, flow->points[i].node)) return true;
    }
    return false;
}

static bool place_points(struct shard *shard, struct live *live, struct commit *commit,
                         struct commit_point *points, uint32_t count, struct commit_pages *touched)
{
    bool ok = true;
    for (uint32_t i = 0; ok && i < count; i++)
        ok = commit_place(shard, live, commit, touched, &points[i]);
    if (ok && commit->node_count > 0) {
        commit->write = kv_write_create(shard->store, touched->count);
        ok = commit->write != NULL && plan_writes(shard, live, commit, touched);
    }
    /* Edges and writes hold their own references now. */
    for (uint32_t i = 0; i < touched->count; i++) {
        if (touched->objects[i] != KV_PAGE_INDEX_NONE)
            kv_index_page_unref(shard->store->index, touched->objects[i]);
    }
    return ok;
}

/* Why nothing of this session is saved at present; NONE: it can be tried. */
static enum kv_reason not_now(struct shard *shard, const struct kv_session *session)
{
    if (session->tree->unreadable) return KV_REASON_SESSION_UNREADABLE;
    if (session->tree->commits == 0 && !shard->slow) return KV_REASON_NONE;
    shard->counters.save_refused++;
    return KV_REASON_SSD_SLOW;
}

struct commit *commit_start(struct shard *shard, struct live *live, struct commit_point *points,
                            uint32_t count, enum kv_reason *ret_reason)
{
    struct kv_store *store = shard->store;
    struct kv_session *session = live->session;
    struct kv_error err = {0};
    assert(count > 0);
    *ret_reason = not_now(shard, session);
    if (*ret_reason != KV_REASON_NONE) {
        for (uint32_t i = 0; i < count; i++)
            points[i].node = NULL;
        return NULL;
    }

    struct commit_pages touched = {.first = 0, .count = live->page_count};
    /* Only now a position of this history; else one of whoever had the slot before. */
    const uint32_t branch_at = live->branch == NULL ? 0 : live->branch_at;
    struct commit *commit = calloc(1, sizeof(*commit));
    touched.objects = malloc(sizeof(uint32_t) * KV_MAX(touched.count, 1u));
    struct kv_batch *batch = kv_batch_create(store);
    if (commit == NULL || touched.objects == NULL || batch == NULL ||
        live_chain(live, KV_MAX(points[count - 1].tokens, branch_at)) != KV_OK) {
        free(commit);
        free(touched.objects);
        kv_batch_discard(batch);
        *ret_reason = KV_REASON_INDEX_FULL;
        return NULL;
    }
    memset(touched.objects, 0xff, sizeof(uint32_t) * KV_MAX(touched.count, 1u));
    *commit = (struct commit){.shard = shard,
                              .session = session,
                              .live = live,
                              .batch = batch,
                              .why = KV_REASON_SSD_READ_ONLY,
                              .begun_ns = kv_clock_stopwatch_ns()};
    const bool placed = place_points(shard, live, commit, points, count, &touched);
    free(touched.objects);
    if (!placed) {
        *ret_reason = refused(commit, KV_NOMEM, &err);
        *ret_reason = KV_REASON_INDEX_FULL;
        goto forget;
    }
    session->head = live->node;
    session->used_ms = kv_store_now_ms(store);
    commit->head_id = live->node->id;
    commit->head_tokens = live->node->tokens;
    commit->claimed_tokens = live->state.tokens;
    commit->next = shard->commits;
    shard->commits = commit;
    session->tree->commits++;
    kv_status status;
    if (commit->write == NULL || commit->write->count == 0) {
        status = post_records(commit);
    } else {
        commit->write->done = pages_done;
        commit->write->context = commit;
        status = write_in_turn(commit, &err);
    }
    if (status == KV_OK || (status == KV_BUSY && wait_for_room(commit))) return commit;
    shard->commits = commit->next;
    session->tree->commits--;
    *ret_reason = refused(commit, status, &err);

forget:
    for (uint32_t i = 0; i < count; i++) {
        if (!points[i].existed) points[i].node = NULL;
    }
    return NULL;
}
