/*
 * Branches that Compact left: when their time is up they go as ROLLED_BACK.
 *
 * A branch is named by its deepest checkpoint; what goes is the way from there up to where the head
 * went, as far as nothing else hangs on it: a checkpoint made later below it, the head of the
 * session that came back to it, a pin.  A resume looks before it matches, so what is past its time
 * is not used although no tick came yet; the tick looks after the others and loads their trees.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

#define LOADS_MAX 4u
#define RETRY_MS 1000u

static bool is_due(const struct shard *shard, const struct kv_record_old_branch *branch)
{
    return kv_store_now_ms(shard->store) > branch->until_ms;
}

/* The session's head is on it again, or was moved below it. */
static bool is_current(const struct kv_session *session, const struct kv_node *end,
                       uint32_t stop_tokens)
{
    const struct live *live = session->live;
    const struct kv_node *head = live != NULL ? live->node : session->head;
    if (head == NULL) return false;
    return kv_index_is_ancestor(end, head) ||
           (head->tokens > stop_tokens && kv_index_is_ancestor(head, end));
}

/* Nobody else's, and nobody needs it. */
static bool may_go(struct shard *shard, const struct kv_session *session, struct kv_node *node)
{
    if (node->session != session || node->child != NULL) return false;
    if (kv_index_stands(node, NULL) != NULL) return false;
    for (struct kv_session *other = kv_index_head_next(session->tree, NULL); other != NULL;
         other = kv_index_head_next(session->tree, other)) {
        const struct live *live = other->live;
        if (live != NULL && (live->node == node || live->branch == node)) return false;
    }
    return kv_store_pin_find(shard->store, node) == NULL;
}

static void drop_path(struct shard *shard, struct kv_session *session, struct kv_node *end,
                      uint32_t stop_tokens)
{
    while (end != NULL && end->tokens > stop_tokens && may_go(shard, session, end)) {
        struct kv_node *parent = end->parent;
        shard_before_drop(session, end);
        kv_store_drop_node(shard->store, end, KV_REASON_ROLLED_BACK);
        end = parent;
    }
}

/* Its tree is loaded and nobody works on it. */
static void branch_end(struct shard *shard, struct kv_session *session, uint32_t at)
{
    const struct kv_record_old_branch branch = shard->store->old_branches[at];
    struct kv_node *end = kv_index_node_find(session, &branch.end);
    if (end != NULL && kv_store_pin_find(shard->store, end) != NULL) return; /* When that ends. */
    kv_store_old_branch_gone(shard->store, at);
    if (end == NULL || is_current(session, end, branch.stop_tokens)) return;
    drop_path(shard, session, end, branch.stop_tokens);
}

void old_branches_look(struct shard *shard, struct kv_session *session)
{
    struct kv_store *store = shard->store;
    assert(session->tree->load == KV_LOAD_DONE);
    if (session->tree->commits > 0) return;
    for (uint32_t i = store->old_branch_count; i-- > 0;) {
        const struct kv_record_old_branch *branch = &store->old_branches[i];
        if (kv_id_equal(branch->session.bytes, session->id.bytes) && is_due(shard, branch))
            branch_end(shard, session, i);
    }
}

void old_branches_came_back(struct shard *shard, struct kv_session *session)
{
    struct kv_store *store = shard->store;
    for (uint32_t i = store->old_branch_count; i-- > 0;) {
        const struct kv_record_old_branch *branch = &store->old_branches[i];
        if (!kv_id_equal(branch->session.bytes, session->id.bytes)) continue;
        const struct kv_node *end = kv_index_node_find(session, &branch->end);
        if (end != NULL && is_current(session, end, branch->stop_tokens))
            kv_store_old_branch_gone(store, i);
    }
}

uint64_t old_branches_until_ms(const struct shard *shard, struct kv_session *session,
                               const struct kv_node *node)
{
    const struct kv_store *store = shard->store;
    uint64_t until_ms = 0;
    for (uint32_t i = 0; i < store->old_branch_count; i++) {
        const struct kv_record_old_branch *branch = &store->old_branches[i];
        if (!kv_id_equal(branch->session.bytes, session->id.bytes)) continue;
        if (node->tokens <= branch->stop_tokens || node->session != session) continue;
        const struct kv_node *end = kv_index_node_find(session, &branch->end);
        if (end == NULL || !kv_index_is_ancestor(node, end)) continue;
        if (is_current(session, end, branch->stop_tokens)) continue;
        until_ms = KV_MAX(until_ms, branch->until_ms);
    }
    return until_ms;
}

/* ---- each tick ---- */

static void branch_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct shard *shard = context;
    shard->branch_loads--;
    /* What came for it meanwhile waited for the same load. */
    flow_wake_loaded(session, status);
    if (status != KV_OK) session->sweep_after_ms = kv_store_now_ms(shard->store) + RETRY_MS;
}

void old_branches_tick(struct shard *shard)
{
    struct kv_store *store = shard->store;
    for (uint32_t i = store->old_branch_count; i-- > 0;) {
        if (i >= store->old_branch_count || !is_due(shard, &store->old_branches[i])) continue;
        struct kv_session *session =
            kv_index_session_find(store->index, &store->old_branches[i].session);
        if (session == NULL) {
            kv_store_old_branch_gone(store, i);
            continue;
        }
        if (session->busy != NULL || session->deleting || session->tree->commits > 0) continue;
        if (session->tree->load == KV_LOAD_DONE) {
            old_branches_look(shard, session);
        } else if (session->tree->load == KV_LOAD_NONE && shard->branch_loads < LOADS_MAX &&
                   kv_store_now_ms(store) >= session->sweep_after_ms) {
            shard->branch_loads++;
            kv_store_load_start(store, session, branch_loaded, shard);
        }
    }
}
