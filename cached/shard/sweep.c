/*
 * Expired rows give their space back although nobody asks for their session any more.
 *
 * A session whose last use is longer ago than its life has nothing left that counts.  The sweep
 * walks the table of sessions, a bounded part each tick, loads the trees of such sessions and drops
 * what is due.  30 days later the session itself goes and its id is free again; until then it can
 * say that its rows expired.  Lookups do not depend on it: they judge
 * age themselves.
 *
 * Where time moves by AdvanceClock only, that call waits for one whole sweep, so that what the time
 * passed does is done when it answers.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#define SWEEP_SESSIONS_PER_TICK 512u
#define SWEEP_LOADS_MAX 8u
#define SWEEP_RETRY_MS 60000u
/* A session that lost its rows stays known this much longer, to answer EXPIRED. */
#define SWEEP_SESSION_KEEP_MS (30ull * 24 * 3600 * 1000)

static bool is_forgotten(const struct shard *shard, const struct kv_session *session)
{
    return kv_store_now_ms(shard->store) >
           session->used_ms + kv_index_session_ttl_ms(&session->entry) + SWEEP_SESSION_KEEP_MS;
}

static bool is_used(const struct kv_tree *tree)
{
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        if (at->busy != NULL || at->flows > 0 || at->deleting) return true;
    return false;
}

bool sweep_is_due(const struct shard *shard, const struct kv_session *session)
{
    const uint64_t now_ms = kv_store_now_ms(shard->store);
    const struct kv_tree *tree = session->tree; /* NULL: it is not in memory. */
    const bool is_loaded = tree != NULL && tree->load == KV_LOAD_DONE;
    const uint32_t nodes = is_loaded ? session->node_count : session->recorded_nodes;
    if (nodes == 0 && !is_forgotten(shard, session)) return false;
    if (shard->store->reads_late > 0) return false; /* The kernel may write into pages of it. */
    if (now_ms < session->sweep_after_ms) return false;
    if (tree != NULL && (tree->load == KV_LOAD_RUNNING || tree->commits > 0)) return false;
    if (tree != NULL && is_used(tree)) return false;
    return now_ms > session->used_ms + kv_index_session_ttl_ms(&session->entry);
}

/* The tree goes, much later the session itself. */
void sweep_session(struct shard *shard, struct kv_session *session)
{
    live_release(shard, session->live);
    const bool is_shared = session->tree->session_count > 1;
    for (struct kv_node *node = kv_index_node_next(session, NULL); is_shared && node != NULL;
         node = kv_index_node_next(session, node))
        if (kv_index_expired(node, kv_store_now_ms(shard->store))) shard_before_drop(session, node);
    kv_store_drop_expired(shard->store, session);
    /* What was used later than the session's record says keeps it from being due again; what a
     * fork keeps says nothing of this one. */
    for (const struct kv_node *node = session->tree->roots; node != NULL; node = node->sibling)
        if (!is_shared) session->used_ms = KV_MAX(session->used_ms, node->used_ms);
    if (is_shared) session->sweep_after_ms = kv_store_now_ms(shard->store) + SWEEP_RETRY_MS;
    if (session->node_count > 0 || !is_forgotten(shard, session)) return;
    struct kv_batch *batch = kv_batch_create(shard->store);
    kv_status status = batch == NULL ? KV_NOMEM : kv_batch_delete_session(batch, &session->id);
    if (status == KV_OK && session->tree->session_count == 1)
        status = kv_batch_delete_history(batch, &session->tree->id);
    if (status != KV_OK) {
        kv_batch_discard(batch);
        return;
    }
    kv_batch_post(batch, NULL, NULL);
    kv_index_session_remove(shard->store->index, session);
}

static void sweep_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct shard *shard = context;
    shard->sweep_loads--;
    /* What came for it meanwhile waited for the same load. */
    flow_wake_loaded(session, status);
    if (status == KV_OK && sweep_is_due(shard, session)) sweep_session(shard, session);
    if (status != KV_OK) session->sweep_after_ms = kv_store_now_ms(shard->store) + SWEEP_RETRY_MS;
}

static void swept(void *context, kv_status status)
{
    struct flow *flow = context;
    (void)status;
    flow->wake(flow);
}

/* The whole table was seen and nothing is being loaded: the space is free once the removals are
 * durable, and so is a batch posted behind them. */
static void pass_done(struct shard *shard)
{
    struct flow *flow = shard->sweep_waiters;
    shard->sweep_waiters = NULL;
    kv_store_tick(shard->store);
    while (flow != NULL) {
        struct flow *next = flow->next_waiter;
        struct kv_batch *batch = kv_batch_create(shard->store);
        if (batch == NULL) {
            flow->wake(flow);
        } else {
            kv_batch_barrier(batch);
            kv_batch_post(batch, swept, flow);
        }
        flow = next;
    }
}

void sweep_wait(struct flow *flow)
{
    flow->next_waiter = flow->shard->sweep_waiters;
    flow->shard->sweep_waiters = flow;
    flow->shard->sweep_bucket = 0;
}

void sweep_tick(struct shard *shard)
{
    const struct kv_session_entry *entry = NULL;
    uint32_t seen = 0;
    kv_index_close_idle(shard->store->index, SWEEP_SESSIONS_PER_TICK,
                        kv_store_now_ms(shard->store));
    while (seen < SWEEP_SESSIONS_PER_TICK && shard->sweep_loads < SWEEP_LOADS_MAX) {
        struct kv_session shape;
        entry = kv_index_entry_next(shard->store->index, &shard->sweep_bucket, entry);
        if (entry == NULL) {
            shard->sweep_bucket = 0;
            if (shard->sweep_waiters != NULL && shard->sweep_loads == 0) pass_done(shard);
            return;
        }
        seen++;
        if (!sweep_is_due(shard, kv_index_look(entry, &shape))) continue;
        struct kv_session *session = kv_index_session_find(shard->store->index, &entry->id);
        if (session == NULL) return; /* No memory: another time. */
        entry = &session->entry;
        if (session->tree->load != KV_LOAD_DONE) {
            shard->sweep_loads++;
            kv_store_load_start(shard->store, session, sweep_loaded, shard);
            continue;
        }
        sweep_session(shard, session);
        entry = NULL; /* It may be gone: from the start of its bucket. */
    }
}
