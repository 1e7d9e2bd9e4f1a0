/*
 * From a live session's pages to durable checkpoints.
 *
 * A commit makes the nodes of all its points at once, so the user can resume from them right away,
 * writes each page they need once, and then waits: pages flushed, then records synced, then the
 * checkpoints are durable and whoever waits is told.  When the save fails the nodes go again, the
 * head falls back to the last durable checkpoint, and the live session keeps its rows in memory.
 *
 * A session has one commit in flight at a time (flows wait for it), so a page is never on its way
 * twice.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* From content: the digest at t and the positions of all clipped replays below it.  named: also the
 * kernels that computed the states there and here. */
static bool checkpoint_id(const struct shard *shard, const struct live *live, uint32_t tokens,
                          const struct kv_digest *digest, bool named,
                          struct kv_checkpoint_id *ret_id)
{
    const uint32_t count = live_replays(live, 0, tokens, NULL, 0);
    const size_t room = 32 + (4 + 8) * (size_t)count + 8;
    uint32_t *replays = malloc(sizeof(*replays) * KV_MAX(count, 1u));
    uint8_t *bytes = malloc(room);
    struct kv_digest hash;
    const bool ok = replays != NULL && bytes != NULL;
    if (ok) {
        uint8_t *at = bytes + 32;
        (void)live_replays(live, 0, tokens, replays, count);
        memcpy(bytes, digest->bytes, 32);
        for (uint32_t i = 0; i < count; i++, at += 4)
            kv_store32(at, replays[i]);
        for (uint32_t i = 0; named && i <= count; i++, at += 8)
            kv_store64(at, live_kernels_at(shard, live, i < count ? replays[i] : tokens));
        kv_sha256(bytes, (size_t)(at - bytes), &hash);
        memcpy(ret_id->bytes, hash.bytes, sizeof(ret_id->bytes));
    }
    free(replays);
    free(bytes);
    return ok;
}

/* Equal tokens and marks are equal bits only of the same kernels, here and where replays began. */
static bool same_kernels(const struct shard *shard, const struct live *live,
                         const struct kv_node *node)
{
    if (node->kernels != live_kernels_at(shard, live, node->tokens)) return false;
    for (const struct kv_node *up = node; up != NULL; up = up->parent) {
        for (uint32_t i = 0; i < up->replay_count; i++) {
            const uint32_t h = up->replays[i];
            if (kv_index_kernels_at(node, h) != live_kernels_at(shard, live, h)) return false;
        }
    }
    return true;
}

/* Digest and id of a position, and the node that stands there (NULL: none).  Where one of other
 * kernels has the id, the kernels become part of it. */
static bool name_point(const struct shard *shard, const struct live *live, uint32_t tokens,
                       struct kv_digest *ret_digest, struct kv_checkpoint_id *ret_id,
                       struct kv_node **ret_node)
{
    const uint32_t k = tokens / KV_PAGE_TOKENS;
    struct kv_checkpoint_id named;
    *ret_digest = kv_digest_at(&live->chain[k], tokens, live->ids + (size_t)k * KV_PAGE_TOKENS);
    if (!checkpoint_id(shard, live, tokens, ret_digest, false, ret_id)) return false;
    if (!checkpoint_id(shard, live, tokens, ret_digest, true, &named)) return false;
    struct kv_node *taken = kv_index_node_find(live->session, ret_id);
    *ret_node = taken;
    if (taken != NULL && same_kernels(shard, live, taken)) return true;
    *ret_node = kv_index_node_find(live->session, &named);
    if (taken != NULL || *ret_node != NULL) *ret_id = named;
    return true;
}

/* What a commit knows of the pages it touches, by position in the live table. */
struct touched {
    uint32_t *objects; /* KV_PAGE_INDEX_NONE: not touched. */
    uint32_t first, count;
};

static struct kv_page *new_page(struct shard *shard, struct live *live, uint32_t k,
                                uint32_t *ret_index)
{
    struct kv_store *store = shard->store;
    if (!kv_store_make_room(store, 0, 1)) return NULL;
    *ret_index = kv_index_page_add(store->index, live->session);
    if (*ret_index == KV_PAGE_INDEX_NONE) return NULL;
    struct kv_page *page = kv_index_page(store->index, *ret_index);
    page->uid = kv_store_next_generation(store);
    page->position = k * KV_PAGE_TOKENS;
    page->tag = kv_load64(live->chain[k].bytes);
    return page;
}

/* The object for page k of an edge that ends at `tokens`: the table's own if it is shared already,
 * the one this commit made, the parent's last page if nobody has filled it further, else a new one.
 * The caller holds a reference on what is returned (from touched or from the table). */
static uint32_t edge_page(struct shard *shard, struct live *live, struct touched *touched,
                          const struct kv_node *parent, uint32_t k)
{
    struct kv_index *index = shard->store->index;
    if (live->pages[k].page != KV_PAGE_INDEX_NONE) return live->pages[k].page;
    uint32_t *object = &touched->objects[k - touched->first];
    if (*object != KV_PAGE_INDEX_NONE) return *object;

    const uint32_t start = k * KV_PAGE_TOKENS;
    if (parent != NULL && parent->tokens > start && parent->page_count > 0) {
        const uint32_t last = parent->pages[parent->page_count - 1];
        if (kv_index_page(index, last)->count == parent->tokens - start) {
            kv_index_page_ref(index, last);
            *object = last;
            return last;
        }
    }
    if (new_page(shard, live, k, object) == NULL) *object = KV_PAGE_INDEX_NONE;
    return *object;
}

static struct kv_node *make_node(struct shard *shard, struct live *live, struct touched *touched,
                                 const struct commit_point *point, struct kv_node *parent,
                                 const struct kv_checkpoint_id *id, const struct kv_digest *digest)
{
    struct kv_store *store = shard->store;
    const uint32_t first = (parent == NULL ? 0 : parent->tokens) / KV_PAGE_TOKENS;
    const uint32_t count = kv_pages_for(point->tokens) - first;
    uint32_t *pages = malloc(sizeof(*pages) * count);
    struct kv_node *node = NULL;
    if (pages == NULL || !kv_store_make_room(store, 1, 0)) goto out;
    for (uint32_t i = 0; i < count; i++) {
        pages[i] = edge_page(shard, live, touched, parent, first + i);
        if (pages[i] == KV_PAGE_INDEX_NONE) goto out;
    }
    node = kv_index_node_add(store->index, live->session, parent, point->tokens, pages, count);
    if (node == NULL) goto out;
    node->id = *id;
    node->digest = *digest;
    node->kind = point->kind;
    node->kernels = live_kernels_at(shard, live, point->tokens);
    node->created_ms = kv_store_now_ms(store);
    uint32_t replays[KV_REPLAYS_MAX];
    const uint32_t replay_count = live_replays(live, parent == NULL ? 0 : parent->tokens,
                                               point->tokens, replays, KV_REPLAYS_MAX);
    kv_index_node_mark(node, replays, KV_MIN(replay_count, KV_REPLAYS_MAX));
    node->image.lost = KV_REASON_CAPACITY; /* Until an image is attached. */
    kv_index_renew(node, node->created_ms);
out:
    free(pages);
    return node;
}

static void attach_image(struct shard *shard, struct commit_point *point, struct kv_node *node)
{
    struct kv_store *store = shard->store;
    if (point->pool_slot == KV_POOL_SLOT_NONE) return;
    const uint64_t generation = kv_pool_next_generation(store->pool);
    const struct kv_image_header header = {
        .state = point->state,
        .generation = generation,
        .user = node->session->user->id,
        .model = store->options.model,
        .digest = node->digest,
        .kernels = node->kernels,
    };
    kv_image_seal(shard->layout, kv_pool_bytes(store->pool, point->pool_slot), &header);
    kv_pool_commit(store->pool, point->pool_slot, generation, &node->image, kv_store_now_ns(store));
    node->image_state = point->state;
    point->pool_slot = KV_POOL_SLOT_NONE;
}

/* A new turn's prompt supersedes the windows of earlier turns of its branch: first victims from now
 * on.  The newest turn's own two windows and anchors stay in line. */
static void demote_superseded(struct shard *shard, const struct kv_node *node)
{
    if (node->kind != KIND_PREFILL_END) return;
    uint32_t turns = 0;
    uint32_t steps = 0;
    for (struct kv_node *up = node->parent; up != NULL && steps < 8; up = up->parent, steps++) {
        if (up->kind == KIND_PREFILL_END) turns++;
        if (up->kind == KIND_ANCHOR || turns == 0) continue;
        kv_pool_demote(shard->store->pool, &up->image);
    }
}

/* node is the deepest checkpoint of the history now: replays below it are its path's. */
static void live_advance(struct live *live, struct kv_node *node)
{
    uint32_t kept = 0;
    live->node = node;
    for (uint32_t i = 0; i < live->replay_count; i++) {
        if (live->replays[i] >= node->tokens) live->replays[kept++] = live->replays[i];
    }
    live->replay_count = kept;
}

/* The history left a stored edge: a node where it did, so that edges stay short and both branches
 * share what is below.  Without room in the index the new edge is only longer. */
static bool cut_branch(struct shard *shard, struct live *live, struct commit *commit)
{
    const uint32_t at = live->branch_at;
    struct kv_node *branch = live->branch;
    if (branch == NULL || !kv_store_make_room(shard->store, 1, 0)) {
        live->branch = NULL;
        return true;
    }
    struct kv_digest digest;
    struct kv_checkpoint_id id;
    struct kv_node *node;
    const bool named = name_point(shard, live, at, &digest, &id, &node);
    live->branch = NULL;
    if (!named) return false;
    if (node == NULL) {
        node = kv_index_node_split(shard->store->index, branch, at);
        if (node == NULL) return true;
        node->id = id;
        node->digest = digest;
        node->kind = KIND_BRANCH;
        commit->shortened = branch;
        node->image.lost = KV_REASON_DIVERGED;
    }
    if (live->node == NULL || node->tokens > live->node->tokens) live_advance(live, node);
    return true;
}

static struct kv_node *parent_of(const struct live *live, uint32_t tokens)
{
    struct kv_node *parent = live->node;
    while (parent != NULL && parent->tokens >= tokens)
        parent = parent->parent;
    return parent;
}

/* An edge is of one family: where the history changes kernels there is a node.  It is missing when
 * it was dropped meanwhile, or found no room. */
static bool place_change(struct shard *shard, struct live *live, struct commit *commit,
                         struct touched *touched, uint32_t tokens)
{
    const struct commit_point change = {
        .tokens = live->other_until, .kind = KIND_BRANCH, .pool_slot = KV_POOL_SLOT_NONE};
    struct kv_digest digest;
    struct kv_checkpoint_id id;
    struct kv_node *parent = parent_of(live, tokens);
    if (tokens <= change.tokens) return true;
    if (parent != NULL && parent->tokens >= change.tokens) return true;
    if (change.tokens == 0) return true;
    struct kv_node *node;
    if (!name_point(shard, live, change.tokens, &digest, &id, &node)) return false;
    if (node != NULL) { /* On another path, which has what this history lost. */
        live_advance(live, node);
        return true;
    }
    node = make_node(shard, live, touched, &change, parent, &id, &digest);
    if (node == NULL) return false;
    commit->nodes[commit->node_count++] = node;
    live_advance(live, node);
    return true;
}

/* One point: the node that stands there already, or a new one. */
static bool place_point(struct shard *shard, struct live *live, struct commit *commit,
                        struct touched *touched, struct commit_point *point)
{
    struct kv_digest digest;
    struct kv_checkpoint_id id;
    struct kv_node *node;
    if (!name_point(shard, live, point->tokens, &digest, &id, &node)) return false;

    point->existed = node != NULL;
    if (node == NULL) {
        if (point->tokens > live->branch_at && !cut_branch(shard, live, commit)) return false;
        if (!place_change(shard, live, commit, touched, point->tokens)) return false;
        struct kv_node *parent = parent_of(live, point->tokens);
        node = make_node(shard, live, touched, point, parent, &id, &digest);
        if (node == NULL) return false;
        commit->nodes[commit->node_count++] = node;
    } else {
        node->kind = point->kind == KIND_MANUAL ? node->kind : point->kind;
        /* Made by cutting an edge: its pages are durable, its record is still to be written. */
        if (!node->durable) commit->found[commit->found_count++] = node;
        /* Stored as far as this: the history has not left the edge before it. */
        if (node->tokens > live->branch_at) live->branch = NULL;
        kv_index_renew(node, kv_store_now_ms(shard->store));
    }
    point->node = node;
    attach_image(shard, point, node);
    demote_superseded(shard, node);
    if (live->node == NULL || node->tokens > live->node->tokens) live_advance(live, node);
    return true;
}

/* Full pages from where they lie; the page still being filled from a copy. */
static bool plan_writes(struct shard *shard, struct live *live, struct commit *commit,
                        struct touched *touched)
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
        memcpy(kv_hbm_bytes(store->hbm, slot), live->page_bytes[k], shard->layout->page_bytes);
        kv_page_clear_after(shard->layout, kv_hbm_bytes(store->hbm, slot), count);
        kv_write_add(commit->write, touched->objects[i], slot, count, &live->chain[k]);
        kv_hbm_unpin(store->hbm, slot); /* The write holds its own pin. */
    }
    return true;
}

static void remember_head(struct kv_session *session, struct kv_node *node, uint64_t now_ms)
{
    session->head = node;
    session->has_head = node != NULL;
    session->head_tokens = node == NULL ? 0 : node->tokens;
    if (node != NULL) session->head_id = node->id;
    session->used_ms = now_ms;
}

/* Whoever has still to answer with this checkpoint says that it is not stored: the waiter, and a
 * decode that answers early but is still sending. */
static void forget_point(struct shard *shard, const struct kv_node *node)
{
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        for (uint32_t i = 0; i < flow->point_count; i++) {
            if (flow->points[i].node != node) continue;
            flow->points[i].node = NULL;
            flow->req->out.save_reason = KV_REASON_SSD_READ_ONLY;
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
        if (live != NULL && live->node == node) live_fall_back(live, node->parent);
        if (session->head == node) remember_head(session, node->parent, session->used_ms);
        forget_point(shard, node);
        kv_pool_drop(store->pool, &node->image, KV_REASON_CAPACITY);
        kv_index_node_remove(store->index, node);
    }
    session->last_loss = KV_REASON_CAPACITY;
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
    assert(session->commits > 0);
    session->commits--;
    kv_histogram_add(&shard->latencies[LATENCY_COMMIT], kv_clock_stopwatch_ns() - commit->begun_ns);
    if (saved) {
        shard->store->counters.saves += commit->node_count;
    } else if (waiter != NULL) {
        waiter->req->out.save_reason = KV_REASON_SSD_READ_ONLY;
    }
    kv_write_destroy(commit->write);
    kv_batch_discard(commit->batch);
    free(commit);
    if (waiter != NULL) {
        waiter->commit = NULL;
        waiter->wake(waiter);
    }
    shard_commit_ended(shard, session);
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
        commit_revert(commit, false);
        commit_end(commit, false);
        return;
    }
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

static kv_status fill_tree(struct commit *commit)
{
    kv_status status = kv_batch_session(commit->batch, commit->session);
    /* Its old record stays true; the new one shows the tree as it is. */
    if (status == KV_OK && commit->shortened != NULL && commit->shortened->durable)
        status = kv_batch_node(commit->batch, commit->shortened);
    for (uint32_t i = 0; status == KV_OK && i < commit->node_count; i++)
        status = batch_path(commit, commit->nodes[i]);
    for (uint32_t i = 0; status == KV_OK && i < commit->found_count; i++)
        status = batch_path(commit, commit->found[i]);
    return status;
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

static void pages_done(struct kv_write *write, kv_status status)
{
    struct commit *commit = write->context;
    if (status == KV_OK) status = post_records(commit);
    if (status != KV_OK) {
        kv_log(commit->shard->options.log, KV_LOG_ERROR, "save_failed", "status=%s",
               kv_status_name(status));
        commit_revert(commit, true);
        commit_end(commit, false);
    }
}

static enum kv_reason refused(struct commit *commit, kv_status status, const struct kv_error *err)
{
    struct shard *shard = commit->shard;
    kv_log(shard->options.log, KV_LOG_WARN, "save_refused", "status=%s cause=\"%s\"",
           kv_status_name(status), err->text);
    shard->counters.save_refused++;
    commit_revert(commit, true);
    kv_write_destroy(commit->write);
    kv_batch_discard(commit->batch);
    free(commit);
    if (status == KV_BUSY) return KV_REASON_SSD_FULL;
    if (status == KV_INVALID) return KV_REASON_SSD_READ_ONLY;
    return err->sys_errno == ENOSPC ? KV_REASON_SSD_FULL : KV_REASON_SSD_READ_ONLY;
}

static bool place_points(struct shard *shard, struct live *live, struct commit *commit,
                         struct commit_point *points, uint32_t count, struct touched *touched)
{
    bool ok = true;
    for (uint32_t i = 0; ok && i < count; i++)
        ok = place_point(shard, live, commit, touched, &points[i]);
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

struct commit *commit_start(struct shard *shard, struct live *live, struct commit_point *points,
                            uint32_t count, enum kv_reason *ret_reason)
{
    struct kv_store *store = shard->store;
    struct kv_session *session = live->session;
    struct kv_error err = {0};
    *ret_reason = KV_REASON_NONE;
    assert(count > 0 && session->commits == 0);

    struct touched touched = {.first = 0, .count = live->page_count};
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
                              .begun_ns = kv_clock_stopwatch_ns()};
    const bool placed = place_points(shard, live, commit, points, count, &touched);
    free(touched.objects);
    if (!placed) {
        *ret_reason = refused(commit, KV_NOMEM, &err);
        *ret_reason = KV_REASON_INDEX_FULL;
        goto forget;
    }
    remember_head(session, live->node, kv_store_now_ms(store));
    session->claimed_tokens = live->state.tokens;
    commit->next = shard->commits;
    shard->commits = commit;
    session->commits++;
    kv_status status;
    if (commit->write == NULL || commit->write->count == 0) {
        status = post_records(commit);
    } else {
        commit->write->done = pages_done;
        commit->write->context = commit;
        status = kv_write_start(commit->write, &err);
    }
    if (status == KV_OK) return commit;
    shard->commits = commit->next;
    session->commits--;
    *ret_reason = refused(commit, status, &err);

forget:
    for (uint32_t i = 0; i < count; i++) {
        if (!points[i].existed) points[i].node = NULL;
    }
    return NULL;
}
