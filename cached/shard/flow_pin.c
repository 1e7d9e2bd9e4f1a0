/*
 * Pin, Touch and GetUsage: what stays, what is renewed, and what there is.
 *
 * None of them claims the session: they run beside a Prefill or Decode.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

static void step(struct flow *flow);

/* The checkpoint that the call names; NULL (and failed): there is none, with the cause. */
static struct kv_node *node_of(struct flow *flow)
{
    struct kv_session *session = flow->session;
    struct kv_node *node = kv_index_node_find(session, &flow->req->in.u.node.id);
    const bool is_past =
        node != NULL && kv_index_expired(node, kv_store_now_ms(flow->shard->store));
    if (node != NULL && !node->foreign && !is_past) return node;
    const enum kv_reason gone = why_gone(session, &flow->req->in.u.node.id);
    const char *cause = node == NULL    ? kv_reason_info(gone)->name
                        : node->foreign ? "MODEL_CHANGED"
                                        : "EXPIRED";
    flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND, "checkpoint_id", NULL, cause);
    return NULL;
}

static uint64_t window_ms(const struct flow *flow, const struct kv_node *node)
{
    const struct kv_store *store = flow->shard->store;
    return kv_pool_ttl_ms(store->pool, &node->image, kv_store_now_ns(store));
}

/* ---- Pin ---- */

static void refuse(struct flow *flow, const char *field, uint64_t limit, uint64_t value)
{
    flow_fail(flow, KV_REASON_PIN_LIMIT, field, request_u64(flow->req, limit),
              request_u64(flow->req, value));
}

/* A quarter of what the user may have in each tier: of all of it, while nothing says less. */
static bool pin_fits(struct flow *flow, const struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    const struct kv_pin_use use = kv_store_pin_use(store, &node->session->user->id, node);
    const struct kv_pool_usage pool = kv_pool_usage(store->pool);
    const uint64_t window_bytes = pool.bytes_capacity / pool.slots;
    const uint64_t page_bytes = store->layout.page_bytes;
    const uint64_t ssd_max = kv_ssd_room(store->ssd).limit * page_bytes / KV_PIN_SHARE;
    const uint64_t pool_max = pool.bytes_capacity / KV_PIN_SHARE;
    if (use.pins > KV_PINS_PER_USER_MAX)
        refuse(flow, "pins", KV_PINS_PER_USER_MAX, use.pins);
    else if (use.pages * page_bytes > ssd_max)
        refuse(flow, "pinned bytes of rows", ssd_max, use.pages * page_bytes);
    else if (use.windows * window_bytes > pool_max)
        refuse(flow, "pinned bytes of windows", pool_max, use.windows * window_bytes);
    return !flow->failed;
}

static void pin_node(struct flow *flow, struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    const uint64_t ttl_ms = flow->req->in.u.node.ttl_ms;
    if (ttl_ms > 0 && !pin_fits(flow, node)) return;
    const uint64_t until_ms = ttl_ms == 0 ? 0 : kv_store_now_ms(store) + ttl_ms;
    if (kv_store_pin(store, node, until_ms) != KV_OK) {
        refuse(flow, "pins in all", KV_PINS_MAX, KV_PINS_MAX);
        return;
    }
    flow->req->out.pin_ms = ttl_ms;
    flow->req->out.window_expire_ms = window_ms(flow, node);
}

/* ---- Touch ---- */

static void touch_node(struct flow *flow, struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    const uint64_t now_ms = kv_store_now_ms(store);
    kv_store_renew(store, node);
    if (kv_pool_get(store->pool, &node->image, kv_store_now_ns(store)) != NULL)
        kv_pool_unpin(store->pool, node->image.slot);
    struct kv_session *session = flow->session;
    session->used_ms = KV_MAX(session->used_ms, now_ms);
    const uint64_t ttl_ms = kv_index_ttl_ms(node);
    const uint64_t age_ms = now_ms > node->used_ms ? now_ms - node->used_ms : 0;
    flow->req->out.rows_expire_ms = ttl_ms - KV_MIN(ttl_ms, age_ms);
    flow->req->out.window_expire_ms = window_ms(flow, node);
}

static void step(struct flow *flow)
{
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    struct kv_node *node = node_of(flow);
    if (node != NULL && flow->req->method == REQUEST_PIN) pin_node(flow, node);
    if (node != NULL && flow->req->method == REQUEST_TOUCH) touch_node(flow, node);
    flow_finish(flow);
}

void flow_pin(struct flow *flow)
{
    flow->wake = step;
    if (!flow_find_session(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow_load(flow) == FLOW_NEXT) step(flow);
}

void flow_touch(struct flow *flow)
{
    flow_pin(flow);
}

/* ---- GetUsage ---- */

/* Pages of it in memory, each once: where the checkpoint above ends in the middle of a page both
 * edges list it. */
static uint64_t pages_in_memory(const struct flow *flow, const struct kv_node *node)
{
    struct kv_index *index = flow->shard->store->index;
    const struct kv_node *parent = node->parent;
    uint64_t count = 0;
    for (uint32_t i = 0; i < node->page_count; i++) {
        const bool is_parents = i == 0 && parent != NULL && parent->page_count > 0 &&
                                parent->pages[parent->page_count - 1] == node->pages[0];
        if (!is_parents && kv_index_page(index, node->pages[i])->hbm_slot != KV_HBM_SLOT_NONE)
            count++;
    }
    return count;
}

/* Pages of the live session that are not a stored page's own copy. */
static uint64_t pages_of_live(const struct flow *flow, const struct live *live)
{
    uint64_t count = 0;
    for (uint32_t k = 0; live != NULL && k < live->page_count; k++) {
        const struct live_page *entry = &live->pages[k];
        if (entry->page == KV_PAGE_INDEX_NONE ||
            kv_index_page(flow->shard->store->index, entry->page)->hbm_slot != entry->slot)
            count++;
    }
    return count;
}

/* What an open session holds; checkpoints count for the session that made them. */
static void add_open(struct flow *flow, struct kv_session *session)
{
    const struct kv_store *store = flow->shard->store;
    const struct kv_pool_usage pool = kv_pool_usage(store->pool);
    const uint64_t now_ns = kv_store_now_ns(store);
    struct request_use *use = &flow->req->out.use;
    uint64_t in_memory = pages_of_live(flow, session->live);
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        if (node->session != session) continue;
        in_memory += pages_in_memory(flow, node);
        if (kv_pool_ttl_ms(store->pool, &node->image, now_ns) > 0)
            use->bytes_pool += pool.bytes_capacity / pool.slots;
    }
    use->bytes_hbm += in_memory * store->layout.page_bytes;
}

static void add_session(struct flow *flow, struct kv_session_entry *entry)
{
    struct request_use *use = &flow->req->out.use;
    struct kv_session *session = entry->is_open ? (struct kv_session *)entry : NULL;
    const bool is_loaded = session != NULL && session->tree->load == KV_LOAD_DONE;
    use->sessions++;
    use->checkpoints += is_loaded ? session->node_count : entry->recorded_nodes;
    if (is_loaded) add_open(flow, session);
}

void flow_get_usage(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    struct request_use *use = &flow->req->out.use;
    const struct kv_user *user = kv_index_user_find(store->index, &flow->req->user);
    struct kv_session_entry *entry = NULL;
    uint32_t bucket = 0;
    while (user != NULL && (entry = kv_index_entry_next(store->index, &bucket, entry)) != NULL)
        if (entry->user == user) add_session(flow, entry);
    if (user != NULL) {
        const struct kv_pin_use pins = kv_store_pin_use(store, &user->id, NULL);
        const struct kv_pool_usage pool = kv_pool_usage(store->pool);
        use->bytes_ssd = (uint64_t)user->pages * store->layout.page_bytes;
        use->pins = pins.pins;
        use->pinned_bytes_ssd = pins.pages * store->layout.page_bytes;
        use->pinned_bytes_pool = pins.windows * (pool.bytes_capacity / pool.slots);
    }
    flow_finish(flow);
}
