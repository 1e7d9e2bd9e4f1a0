/*
 * Resume: from a prompt to a live session that can go on at H.
 *
 * The stages stand in the order in which they run: match, probe, plan, read, check, prepare. Stored
 * bytes never fail towards the client: whatever goes wrong with them is dropped with its cause and
 * the resume matches again with what is left, which can happen KV_WEAKEN_MAX times; after that it
 * computes everything, which is slower and still right.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <string.h>

#define WEAKEN_MAX 2u

static void stage_match(struct flow *flow);
static void stage_plan(struct flow *flow);

static uint64_t lap(struct flow *flow)
{
    const uint64_t now = kv_clock_stopwatch_ns();
    const uint64_t spent = now - flow->mark_ns;
    flow->mark_ns = now;
    return spent;
}

static bool out_of_memory(struct flow *flow, const void *memory)
{
    if (memory != NULL) return false;
    flow_fail(flow, KV_REASON_PROMPT_TOO_LONG, "request memory", NULL, NULL);
    flow_finish(flow);
    return true;
}

/* ---- match ---- */

static uint32_t common_prefix(const uint32_t *a, const uint32_t *b, uint32_t count)
{
    /* Whole blocks first: the usual prompt agrees for a long way. */
    uint32_t t = 0;
    while (count - t >= 1024 && memcmp(a + t, b + t, 4096) == 0)
        t += 1024;
    while (t < count && a[t] == b[t])
        t++;
    return t;
}

void resume_expire_live(struct flow *flow)
{
    struct live *live = flow->session->live;
    struct kv_store *store = flow->shard->store;
    if (live == NULL) return;
    const uint64_t now_ms = kv_store_now_ms(store);
    const uint64_t idle_ms = now_ms > flow->session->used_ms ? now_ms - flow->session->used_ms : 0;
    if (idle_ms > store->options.pool_ttl_ms || idle_ms > flow->session->ttl_ms)
        live_release(flow->shard, live);
}

static void drop_expired(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const uint64_t now_ms = kv_store_now_ms(store);
    struct kv_node *node = NULL;
    bool any = false;
    while ((node = kv_index_node_next(flow->session, node)) != NULL) {
        if (!kv_index_expired(node, now_ms)) continue;
        shard_before_drop(flow->session, node);
        any = true;
    }
    if (any) kv_store_drop_expired(store, flow->session);
}

static void stage_match(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct kv_store *store = shard->store;

    if (flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (!flow->plan_only) {
        resume_expire_live(flow);
        drop_expired(flow);
    }
    flow->match = (struct kv_match){.ids = flow->ids, .count = flow->count, .chain = flow->chain};
    kv_match_run(&flow->match, store->index, flow->session, kv_store_now_ms(store));

    const struct live *live = flow->session->live;
    flow->live_match = 0;
    if (live != NULL && !live->busy)
        flow->live_match =
            common_prefix(flow->ids, live->ids, KV_MIN(flow->count, live->state.tokens));
    stage_plan(flow);
}

/* Drops what lists a damaged page and starts over with the rest. */
static void weaken(struct flow *flow, uint32_t page)
{
    struct request *req = flow->req;
    struct kv_session *session = flow->session;
    struct kv_node *node = NULL;
    assert(!flow->plan_only);
    while ((node = kv_index_node_next(session, node)) != NULL) {
        for (uint32_t i = 0; i < node->page_count; i++) {
            if (node->pages[i] == page) shard_before_drop(session, node);
        }
    }
    kv_store_drop_page(flow->shard->store, session, page, KV_REASON_CORRUPT);
    req->out.weakened++;
    flow->shard->counters.weakened++;
    req->out.reason = KV_REASON_CORRUPT;
    stage_match(flow);
}

/* ---- probe ---- */

static void probes_read(struct kv_read *read)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    struct kv_store *store = flow->shard->store;
    uint32_t bad = KV_PAGE_INDEX_NONE;

    for (uint32_t i = 0; i < read->count; i++) {
        const uint32_t page = flow->read_pages[i];
        const struct kv_page *object = kv_index_page(store->index, page);
        const uint8_t *bytes = NULL;
        if (flow->read_slots[i] != KV_HBM_SLOT_NONE &&
            kv_store_page_check(store, page, flow->read_slots[i], flow->read_fresh[i],
                                &flow->chain[object->position / KV_PAGE_TOKENS], NULL, 0) == KV_OK)
            bytes = kv_hbm_bytes(store->hbm, flow->read_slots[i]);
        if (bytes == NULL) bad = page;
        for (uint32_t j = 0; j < flow->match.probe_count; j++) {
            struct kv_match_probe *probe = &flow->match.probes[j];
            if (!probe->resolved && probe->page == page)
                kv_match_resolve(&flow->match, probe, object, bytes);
        }
    }
    flow->req->out.times.read_ns += lap(flow);
    for (uint32_t i = 0; i < read->count; i++)
        kv_index_page_unref(store->index, flow->read_pages[i]);
    if (flow->plan_only) {
        /* It holds no claim: the tree may have changed meanwhile.  The pages are in memory now
         * (pinned until the end), so the second look does not wait. */
        flow->probed = true;
        stage_match(flow);
        return;
    }
    flow_unpin_read(flow);
    if (bad != KV_PAGE_INDEX_NONE && flow->req->out.weakened < WEAKEN_MAX) {
        weaken(flow, bad);
        return;
    }
    stage_plan(flow);
}

/* Looks into pages in memory at once; returns how many have to be read (into read_pages). */
static uint32_t probes_in_memory(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    uint32_t best =
        KV_MAX(flow->live_match, flow->match.node == NULL ? 0 : flow->match.node->tokens);
    uint32_t missing = 0;
    for (uint32_t i = 0; i < flow->match.probe_count; i++) {
        struct kv_match_probe *probe = &flow->match.probes[i];
        const struct kv_page *object = kv_index_page(store->index, probe->page);
        if (!probe->resolved && object->hbm_slot != KV_HBM_SLOT_NONE)
            kv_match_resolve(&flow->match, probe, object,
                             kv_hbm_bytes(store->hbm, object->hbm_slot));
        if (probe->resolved) best = KV_MAX(best, probe->share);
    }
    for (uint32_t i = 0; i < flow->match.probe_count; i++) {
        struct kv_match_probe *probe = &flow->match.probes[i];
        if (probe->resolved) continue;
        if (probe->upper <= best) {
            /* It cannot hold more than what is known already. */
            kv_match_resolve(&flow->match, probe, kv_index_page(store->index, probe->page), NULL);
            continue;
        }
        if (flow->probed) {
            kv_match_resolve(&flow->match, probe, kv_index_page(store->index, probe->page), NULL);
            continue;
        }
        bool listed = false;
        for (uint32_t j = 0; j < missing; j++)
            listed |= flow->read_pages[j] == probe->page;
        if (!listed) flow->read_pages[missing++] = probe->page;
    }
    return missing;
}

/* True: wait for a read. */
static bool stage_probe(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const uint32_t missing = probes_in_memory(flow);
    if (missing == 0) return false;
    flow->req->out.times.lookup_ns += lap(flow);
    flow->read = (struct kv_read){.count = missing,
                                  .pages = flow->read_pages,
                                  .slots = flow->read_slots,
                                  .fresh = flow->read_fresh,
                                  .done = probes_read};
    (void)live_make_room(flow->shard, flow->session->live, missing);
    const kv_status status = kv_store_read_start(store, &flow->read);
    if (status == KV_OK || status == KV_MISS) {
        /* An object that is dropped meanwhile keeps its entry until we looked. */
        for (uint32_t i = 0; i < missing; i++)
            kv_index_page_ref(store->index, flow->read_pages[i]);
        flow->read_count = missing;
        if (status == KV_MISS) probes_read(&flow->read);
        return true;
    }
    for (uint32_t i = 0; i < flow->match.probe_count; i++) {
        struct kv_match_probe *probe = &flow->match.probes[i];
        if (!probe->resolved)
            kv_match_resolve(&flow->match, probe, kv_index_page(store->index, probe->page), NULL);
    }
    return false;
}

/* ---- plan ---- */

/* Verifies the window before anything relies on it. */
static bool take_image(struct flow *flow, struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    struct kv_image_header header;
    struct kv_error err = {0};
    const uint8_t *image = kv_pool_get(store->pool, &node->image, kv_store_now_ns(store));
    if (image == NULL) return false;
    const bool good =
        kv_image_decode(&store->layout, image, &header, &err) == KV_OK &&
        header.generation == node->image.generation &&
        memcmp(header.user.bytes, node->session->user->id.bytes, sizeof(header.user.bytes)) == 0 &&
        memcmp(header.model.bytes, store->options.model.bytes, 32) == 0 &&
        memcmp(header.digest.bytes, node->digest.bytes, 32) == 0 &&
        header.state.tokens == node->tokens;
    if (!good) {
        kv_log(store->options.log, KV_LOG_ERROR, "image_damaged", "position=%u cause=\"%s\"",
               node->tokens, err.text[0] != '\0' ? err.text : "identity differs");
        store->counters.corrupt_images++;
        flow->req->out.weakened++;
        flow->shard->counters.weakened++;
        kv_pool_unpin(store->pool, node->image.slot);
        kv_pool_drop(store->pool, &node->image, KV_REASON_CORRUPT);
        return false;
    }
    flow->image_slot = node->image.slot;
    flow->image_state = header.state;
    return true;
}

/* Clipped replays below h since the deepest checkpoint at or below h: what the next checkpoint's
 * edge starts with.  Returns how many there are. */
static uint32_t edge_replays(struct flow *flow, bool from_live, const struct kv_node *node,
                             uint32_t h)
{
    const struct live *live = flow->session->live;
    struct kv_node *path = from_live ? live->node : (struct kv_node *)(uintptr_t)node;
    const struct kv_node *anchor = kv_index_ancestor(path, h);
    const uint32_t from = anchor == NULL ? 0 : anchor->tokens;
    const uint32_t count = from_live
                               ? live_replays(live, from, h, flow->replays, KV_REPLAYS_MAX)
                               : kv_index_replays(node, from, h, flow->replays, KV_REPLAYS_MAX);
    flow->replay_count = KV_MIN(count, KV_REPLAYS_MAX);
    return count;
}

/* What the tree and the live session offer, as numbers for the pure rule. */
struct offer {
    uint32_t rows_tree, rows, image_tree, image_live, image;
    struct kv_node *rows_node, *image_node;
    uint32_t diverged;
};

static struct offer weigh(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const struct live *live = flow->session->live;
    const uint32_t most = flow->count - 1;
    struct offer offer = {0};

    offer.rows_tree = kv_match_rows(&flow->match, &offer.rows_node, &offer.diverged);
    offer.rows = KV_MAX(offer.rows_tree, flow->live_match);
    flow->req->out.stored_tokens = offer.rows;
    if (flow->live_match >= offer.rows_tree && live != NULL && !live->busy) {
        const bool leaves = flow->live_match < KV_MIN(flow->count, live->state.tokens);
        offer.diverged = leaves ? flow->live_match : UINT32_MAX;
    }
    offer.rows = KV_MIN(offer.rows, most);
    offer.image_tree = kv_match_window(&flow->match, &store->layout, store->pool,
                                       kv_store_now_ns(store), &offer.image_node);
    if (flow->live_match > 0)
        offer.image_live =
            kv_image_cut(&store->layout, &live->state, KV_MIN(flow->live_match, most));
    offer.image = KV_MAX(offer.image_tree, offer.image_live);
    return offer;
}

/* Whether the edge of the next checkpoint has no room for one more clipped replay. */
static bool replays_exhausted(struct flow *flow, const struct offer *offer)
{
    if (offer->rows == 0) return false;
    const bool from_live = offer->rows_tree <= flow->live_match;
    return edge_replays(flow, from_live, offer->rows_node, offer->rows & ~1u) >= KV_REPLAYS_MAX;
}

static enum kv_reason plan_reason(const struct flow *flow, const struct offer *offer)
{
    if (flow->req->out.reason == KV_REASON_CORRUPT) return KV_REASON_CORRUPT;
    if (flow->plan.kind == KV_PLAN_EXACT) return KV_REASON_NONE;
    if (flow->plan.kind == KV_PLAN_REPLAY) {
        if (offer->rows_tree < flow->live_match) return KV_REASON_DIVERGED;
        return kv_match_window_reason(offer->rows_node, flow->plan.restore_tokens,
                                      flow->shard->layout->window_tokens);
    }
    if (offer->rows > 0) return KV_REASON_TOO_SHORT;
    if (flow->match.any_seen) return KV_REASON_DIVERGED;
    if (flow->match.expired_seen) return KV_REASON_EXPIRED;
    if (flow->match.foreign_seen) return KV_REASON_MODEL_CHANGED;
    if (flow->session->last_loss != KV_REASON_NONE) return flow->session->last_loss;
    return KV_REASON_NEVER_STORED;
}

static void plan_outcome(struct flow *flow, const struct offer *offer)
{
    static const enum request_outcome outcomes[] = {
        [KV_PLAN_MISS] = OUTCOME_MISS,
        [KV_PLAN_REPLAY] = OUTCOME_REPLAY,
        [KV_PLAN_EXACT] = OUTCOME_EXACT,
    };
    struct request_out *out = &flow->req->out;
    out->reason = plan_reason(flow, offer);
    out->outcome = outcomes[flow->plan.kind];
    out->prompt_tokens = flow->count;
    out->hit_tokens = flow->plan.restore_tokens;
    out->replayed_tokens = flow->plan.restore_tokens - flow->plan.replay_from;
    out->computed_tokens = flow->count - flow->plan.restore_tokens;
    out->diverged = offer->diverged < flow->count && flow->match.any_seen;
    out->diverged_at = out->diverged ? offer->diverged : 0;
}

/* Decode from a stored head: an image with its pending token is taken at its own position. */
static bool plan_pending(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    struct kv_node *head = flow->session->head;
    if (!flow->want_pending || flow->session->live != NULL || head == NULL) return false;
    if (head->tokens != flow->count || !head->image_state.has_pending) return false;
    if (!kv_pool_has(store->pool, &head->image, kv_store_now_ns(store))) return false;
    if (!take_image(flow, head)) return false;
    flow->plan = (struct kv_plan){.kind = KV_PLAN_EXACT,
                                  .replay_from = head->tokens,
                                  .restore_tokens = head->tokens,
                                  .prompt_tokens = head->tokens};
    flow->source = SOURCE_NODE;
    flow->node = head;
    flow->replay_count = 0;
    return true;
}

static void stage_read(struct flow *flow);

/* EXACT takes the window with its path, REPLAY the path with the most rows. */
static bool choose_source(struct flow *flow, const struct offer *offer)
{
    const uint32_t h = flow->plan.restore_tokens;
    const bool exact = flow->plan.kind == KV_PLAN_EXACT;
    flow->source = SOURCE_NONE;
    flow->node = NULL;
    flow->replay_count = 0;
    if (flow->plan.kind == KV_PLAN_MISS) return true;
    const bool from_live =
        exact ? offer->image_live >= offer->image_tree : flow->live_match >= offer->rows_tree;
    if (from_live) {
        flow->source = SOURCE_LIVE;
        (void)edge_replays(flow, true, NULL, h);
    } else {
        flow->source = SOURCE_NODE;
        flow->node = exact ? offer->image_node : offer->rows_node;
        if (exact && !flow->plan_only && !take_image(flow, flow->node)) return false;
        (void)edge_replays(flow, false, flow->node, h);
    }
    if (!exact) flow->replays[flow->replay_count++] = h;
    return true;
}

static void stage_plan(struct flow *flow)
{
    const uint32_t window = flow->shard->layout->window_tokens;
    if (flow->match.probe_count > 0 && stage_probe(flow)) return;
    if (plan_pending(flow)) {
        flow->req->out.outcome = OUTCOME_EXACT;
        flow->req->out.hit_tokens = flow->count;
        stage_read(flow);
        return;
    }
    struct offer offer;
    do {
        offer = weigh(flow);
        const struct kv_found found = {
            .rows_tokens = flow->req->out.weakened > WEAKEN_MAX ? 0 : offer.rows,
            .image_tokens = flow->req->out.weakened > WEAKEN_MAX ? 0 : offer.image,
            .replays_exhausted = replays_exhausted(flow, &offer),
        };
        flow->plan = kv_plan_resume(window, found, flow->count);
    } while (!choose_source(flow, &offer)); /* A damaged window is gone the next time round. */
    plan_outcome(flow, &offer);
    if (flow->source == SOURCE_NODE && flow->plan.kind == KV_PLAN_EXACT) {
        flow->req->out.has_resumed = true;
        flow->req->out.resumed = flow->node->id;
    } else if (flow->source == SOURCE_LIVE && flow->plan.kind == KV_PLAN_EXACT) {
        const struct live *live = flow->session->live;
        flow->req->out.has_resumed = live->node != NULL;
        if (live->node != NULL) flow->req->out.resumed = live->node->id;
    }
    flow->req->out.times.lookup_ns += lap(flow);
    if (flow->plan_only)
        flow->ready(flow);
    else
        stage_read(flow);
}

/* ---- read and check ---- */

static void stage_prepare(struct flow *flow);

static void hbm_full(struct flow *flow)
{
    const struct kv_hbm_usage usage = kv_hbm_usage(flow->shard->store->hbm);
    flow_fail(flow, KV_REASON_HBM_FULL, "hbm.bytes",
              request_u64(flow->req, (uint64_t)usage.slots * KV_PAGE_TOKENS),
              request_u64(flow->req, (uint64_t)flow->count + flow->extra_tokens));
    flow->req->out.failure.retry_ms = 1000;
    flow_finish(flow);
}

static void rows_read(struct kv_read *read)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    struct kv_store *store = flow->shard->store;
    const uint32_t h = flow->plan.restore_tokens;

    flow->req->out.times.read_ns += lap(flow);
    for (uint32_t k = 0; k < read->count; k++) {
        const uint32_t page = flow->read_pages[k];
        const uint32_t start = k * KV_PAGE_TOKENS;
        const uint32_t tokens = KV_MIN(KV_PAGE_TOKENS, h - start);
        if (flow->read_fresh[k])
            flow->req->out.ssd_tokens += tokens;
        else
            flow->req->out.hbm_tokens += tokens;
        if (flow->read_slots[k] != KV_HBM_SLOT_NONE &&
            kv_store_page_check(store, page, flow->read_slots[k], flow->read_fresh[k],
                                &flow->chain[k], flow->ids + start, tokens) == KV_OK)
            continue;
        flow_unpin_read(flow);
        if (flow->image_slot != KV_POOL_SLOT_NONE) {
            kv_pool_unpin(store->pool, flow->image_slot);
            flow->image_slot = KV_POOL_SLOT_NONE;
        }
        flow->req->out.ssd_tokens = flow->req->out.hbm_tokens = 0;
        weaken(flow, page);
        return;
    }
    if (live_install(flow->shard, flow->live, flow->read_pages, flow->read_slots, read->count) !=
        KV_OK) {
        hbm_full(flow);
        return;
    }
    flow->read_count = 0; /* The live table holds the pins now. */
    live_follow(flow->live, flow->node, h);
    stage_prepare(flow);
}

static void read_path(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const uint32_t count = kv_pages_for(flow->plan.restore_tokens);
    kv_index_path_pages(flow->node, flow->plan.restore_tokens, flow->read_pages);
    flow->read = (struct kv_read){.count = count,
                                  .pages = flow->read_pages,
                                  .slots = flow->read_slots,
                                  .fresh = flow->read_fresh,
                                  .done = rows_read};
    const kv_status status = kv_store_read_start(store, &flow->read);
    if (status == KV_OK || status == KV_MISS) {
        flow->read_count = count;
        if (status == KV_MISS) rows_read(&flow->read);
        return;
    }
    hbm_full(flow);
}

static void stage_read(struct flow *flow)
{
    struct shard *shard = flow->shard;
    const uint32_t total = kv_pages_for(flow->count + flow->extra_tokens);

    flow->live = live_acquire(shard, flow->session);
    if (flow->live == NULL) {
        flow_fail(flow, KV_REASON_QUEUE_FULL, "engine.live_sessions",
                  request_u64(flow->req, shard->live_count), NULL);
        flow->req->out.failure.retry_ms = 200;
        flow_finish(flow);
        return;
    }
    if (flow->source != SOURCE_LIVE) live_clear(shard, flow->live);
    /* One page more: the copy of the page the head is in.  Refused before anything is read. */
    const uint32_t held = flow->source == SOURCE_LIVE ? flow->live->page_count : 0;
    const uint32_t need = total + 1 - KV_MIN(held, total);
    if (!live_make_room(shard, flow->live, need)) {
        hbm_full(flow);
        return;
    }
    flow->live->busy = true;
    switch (flow->source) {
    case SOURCE_NODE:
        read_path(flow);
        return;
    case SOURCE_LIVE:
        flow->req->out.hbm_tokens = flow->plan.restore_tokens;
        live_back_to(flow->live, flow->plan.restore_tokens);
        break;
    case SOURCE_NONE:
        break;
    }
    stage_prepare(flow);
}

/* ---- prepare ---- */

static enum worker_start start_kind(const struct flow *flow)
{
    if (flow->plan.kind == KV_PLAN_MISS) return WORKER_RESET;
    if (flow->plan.kind == KV_PLAN_REPLAY) return WORKER_ROWS_ONLY;
    if (flow->source == SOURCE_NODE) return WORKER_IMPORT;
    return flow->plan.restore_tokens == flow->live->state.tokens ? WORKER_CONTINUE : WORKER_CUT;
}

static void stage_prepare(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct live *live = flow->live;
    const uint32_t h = flow->plan.restore_tokens;
    const uint32_t total = flow->count + flow->extra_tokens;
    kv_status status = live_cut(shard, live, h);
    if (status == KV_OK) status = live_extend(shard, live, total);
    if (status == KV_OK) status = live_reserve_ids(live, total + 1);
    if (status != KV_OK) {
        live->busy = false;
        live_release(shard, live); /* What it held is half changed. */
        flow->live = NULL;
        hbm_full(flow);
        return;
    }
    const uint32_t from = flow->source == SOURCE_LIVE ? h : 0;
    memcpy(live->ids + from, flow->ids + from, sizeof(uint32_t) * (flow->count - from));
    memcpy(live->replays, flow->replays, sizeof(live->replays));
    live->replay_count = flow->replay_count;

    struct worker_job *job = &flow->job;
    job->slot = live->slot;
    job->start = start_kind(flow);
    job->start_tokens = h;
    job->pages = live->page_bytes;
    job->page_count = live->page_count;
    job->ids = live->ids;
    job->replay_from = flow->plan.replay_from;
    job->cancelled = &flow->req->cancelled;
    job->deadline_ns = flow->req->deadline_ns;
    job->reply = shard->options.mailbox;
    if (flow->image_slot != KV_POOL_SLOT_NONE) {
        job->image = kv_pool_bytes(shard->store->pool, flow->image_slot);
        job->image_state = flow->image_state;
    }
    kv_index_renew(live->node, kv_store_now_ms(shard->store));
    const bool path_marked = live->node != NULL && live->node->replay_total > 0;
    flow->req->out.approximate = path_marked || live->replay_count > 0;
    if (flow->req->out.approximate)
        flow->req->out.approx_from = path_marked ? live->node->approx_from : live->replays[0];
    flow->ready(flow);
}

void resume_start(struct flow *flow, void (*ready)(struct flow *flow))
{
    struct kv_arena *arena = flow->req->arena;
    const uint32_t pages = KV_MAX(kv_pages_for(flow->count), KV_MATCH_PROBES_MAX);
    assert(flow->count > 0);
    flow->ready = ready;
    flow->chain = kv_arena_alloc(arena, sizeof(*flow->chain) * (flow->count / 128 + 1));
    flow->read_pages = kv_arena_alloc(arena, sizeof(uint32_t) * pages);
    flow->read_slots = kv_arena_alloc(arena, sizeof(uint32_t) * pages);
    flow->read_fresh = kv_arena_alloc(arena, sizeof(bool) * pages);
    if (out_of_memory(flow, flow->chain) || out_of_memory(flow, flow->read_pages) ||
        out_of_memory(flow, flow->read_slots) || out_of_memory(flow, flow->read_fresh))
        return;
    kv_match_chain(&flow->session->user->root, flow->ids, flow->count, flow->chain);
    flow->mark_ns = kv_clock_stopwatch_ns();
    stage_match(flow);
}

static void job_done(struct kv_msg *msg)
{
    struct worker_job *job = KV_CONTAINER_OF(msg, struct worker_job, msg);
    struct flow *flow = KV_CONTAINER_OF(job, struct flow, job);
    struct live *live = flow->live;

    if (flow->image_slot != KV_POOL_SLOT_NONE) {
        kv_pool_unpin(flow->shard->store->pool, flow->image_slot);
        flow->image_slot = KV_POOL_SLOT_NONE;
    }
    flow->req->out.times.queue_ns += job->queue_ns;
    flow->req->out.times.run_ns += job->run_ns;
    flow->mark_ns = kv_clock_stopwatch_ns();
    if (!job->kept) {
        live->busy = false;
        live_release(flow->shard, live);
        flow->live = NULL;
    } else {
        live->state = job->state;
        live->has_logits = job->has_logits;
        if (job->state.has_pending) live->ids[job->state.tokens] = job->state.pending;
    }
    flow->job_done = true;
    flow->job_finished(flow);
}

void resume_post_job(struct flow *flow, void (*done)(struct flow *flow))
{
    flow->job_finished = done;
    flow->job.msg.run = job_done;
    worker_post(flow->shard->options.worker, &flow->job);
}
