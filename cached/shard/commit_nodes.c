/*
 * A commit's first part: the nodes of its points, and the pages that their edges list.
 *
 * A point gets the node that stands there already, if its content is the same; else a new one below
 * the deepest node of the history.  Where the history left a stored edge, and where it changed
 * kernels, there is a node as well, so that an edge is short and of one family.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

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
static uint32_t edge_page(struct shard *shard, struct live *live, struct commit_pages *touched,
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

static struct kv_node *make_node(struct shard *shard, struct live *live,
                                 struct commit_pages *touched, const struct commit_point *point,
                                 struct kv_node *parent, const struct kv_checkpoint_id *id,
                                 const struct kv_digest *digest)
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
    /* Others may have cut that edge meanwhile: it is left in its upper part, or at its start. */
    while (branch->parent != NULL && branch->parent->tokens >= at)
        branch = branch->parent;
    if (node == NULL && branch->tokens == at) node = branch;
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
                         struct commit_pages *touched, uint32_t tokens)
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

bool commit_place(struct shard *shard, struct live *live, struct commit *commit,
                  struct commit_pages *touched, struct commit_point *point)
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
        kv_store_renew(shard->store, node);
    }
    point->node = node;
    attach_image(shard, point, node);
    demote_superseded(shard, node);
    if (live->node == NULL || node->tokens > live->node->tokens) live_advance(live, node);
    return true;
}
