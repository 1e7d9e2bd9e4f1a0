/*
 * What goes because somebody wants it to: a session leaves a tree in which others have a head, or
 * goes back and wants no more of where it was.
 *
 * What it made goes as far as nobody else needs it: no other head stands on it or below it, and
 * nothing that another session made lies below.  The rest is from now on made by one of those who
 * need it, so that it goes with the last of them.  All of it and the session's record are one
 * batch: after a crash there is the session as it was, or the tree without it.
 *
 * An older build would take the records of such trees for damage: the directory says that it has
 * them before there is one.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>

kv_status kv_store_forks(struct kv_store *store, struct kv_error *err)
{
    struct kv_store_options *options = &store->options;
    if ((options->superblock.features & KV_FEATURE_FORKS) != 0) return KV_OK;
    return kv_directory_add_feature(options->disk, options->dir, KV_FEATURE_FORKS,
                                    &options->superblock, err);
}

static void keep_path(struct kv_node *node)
{
    for (; node != NULL && !node->kept; node = node->parent)
        node->kept = true;
}

/* Marks what others need. */
static void mark_kept(struct kv_session *session)
{
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL)
        node->kept = false;
    while ((node = kv_index_node_next(session, node)) != NULL)
        if (node->session != session) keep_path(node);
    for (struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at))
        if (at != session) keep_path(at->head);
}

/* A page of two edges is in that of the parent as well. */
static uint32_t pages_of(const struct kv_node *node)
{
    const struct kv_node *parent = node->parent;
    const bool shares = parent != NULL && parent->page_count > 0 && node->page_count > 0 &&
                        parent->pages[parent->page_count - 1] == node->pages[0];
    return node->page_count - (shares ? 1 : 0);
}

struct kv_store_leaving kv_store_leaving(struct kv_session *session)
{
    struct kv_store_leaving leaving = {0};
    struct kv_node *node = NULL;
    mark_kept(session);
    while ((node = kv_index_node_next(session, node)) != NULL) {
        if (node->kept) continue;
        leaving.nodes++;
        leaving.pages += pages_of(node);
    }
    return leaving;
}

/* Who needs a node: its children are others' already. */
static struct kv_session *heir_of(const struct kv_node *node, const struct kv_session *session)
{
    return node->child != NULL ? node->child->session : kv_index_stands(node, session);
}

static kv_status give_node(struct kv_store *store, struct kv_batch *batch, struct kv_node *node)
{
    kv_index_node_give(store->index, node, heir_of(node, node->session));
    return node->durable ? kv_batch_node(batch, node) : KV_OK;
}

static kv_status records_of_heirs(struct kv_batch *batch, const struct kv_session *session)
{
    kv_status status = KV_OK;
    for (const struct kv_session *at = kv_index_head_next(session->tree, NULL);
         status == KV_OK && at != NULL; at = kv_index_head_next(session->tree, at))
        if (at != session && at->before.recorded_nodes != at->recorded_nodes)
            status = kv_batch_session(batch, at);
    return status;
}

static struct kv_node *first_leaf(struct kv_node *node)
{
    while (node != NULL && node->child != NULL)
        node = node->child;
    return node;
}

kv_status kv_store_leave(struct kv_store *store, struct kv_session *session,
                         const struct kv_record_deleted *deleted, kv_before_drop_fn *before,
                         kv_batch_done_fn *done, void *context)
{
    const struct kv_tree *tree = session->tree;
    struct kv_batch *batch = kv_store_dead_batch(store); /* Dropped nodes go there, too. */
    kv_status status = KV_OK;
    if (batch == NULL) return KV_NOMEM;
    assert(tree->load == KV_LOAD_DONE && tree->commits == 0 && tree->session_count > 1);
    for (struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        at->before.recorded_nodes = at->recorded_nodes;
    mark_kept(session);
    for (struct kv_node *node = first_leaf(tree->roots), *next; node != NULL; node = next) {
        next = node->sibling != NULL ? first_leaf(node->sibling) : node->parent;
        if (!node->kept) {
            before(node);
            kv_store_drop_leaf(store, node, &(struct kv_loss){.cause = KV_REASON_DELETED});
        } else if (node->session == session && status == KV_OK) {
            status = give_node(store, batch, node);
        }
    }
    if (status == KV_OK) status = records_of_heirs(batch, session);
    if (status == KV_OK) status = kv_batch_delete_session(batch, &session->id);
    if (status == KV_OK && deleted != NULL)
        status = kv_store_deleted_note(store, batch, &session->id, deleted);
    if (status != KV_OK) return status; /* What is gone is, the rest is true and repeatable. */
    store->dead = NULL;
    kv_batch_post(batch, done, context);
    return KV_OK;
}

void kv_store_roll_back(struct kv_store *store, struct kv_session *session, struct kv_node *old,
                        const struct kv_node *target, kv_before_drop_fn *before)
{
    const struct kv_loss loss = {.cause = KV_REASON_ROLLED_BACK};
    bool dropped = false;
    while (old != NULL && !kv_index_is_ancestor(old, target)) {
        struct kv_node *parent = old->parent;
        if (old->child != NULL || old->session != session) break;
        if (kv_index_stands(old, session) != NULL) break;
        before(old);
        kv_store_drop_leaf(store, old, &loss);
        dropped = true;
        old = parent;
    }
    if (dropped) kv_store_record_history(store, session->tree);
}
