/*
 * Resume: from a prompt to a live session that can go on at H.
 *
 * First part: match and probe; flow_plan.c and flow_read.c go on with plan, read, check, prepare.
 * Stored bytes never fail towards the client: what is wrong is dropped with its cause, what cannot
 * be read is passed over by this call, and the resume matches again with what is left, which can
 * happen RESUME_WEAKEN_MAX times; after that it computes everything, which is slower and still
 * right.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <string.h>

uint64_t resume_lap(struct flow *flow)
{
    const uint64_t now = kv_clock_stopwatch_ns();
    const uint64_t spent = now - flow->mark_ns;
    flow->mark_ns = now;
    return spent;
}

static bool stage_probe(struct flow *flow);

bool resume_is_stale(const struct flow *flow)
{
    return flow->removals != flow->session->tree->removals;
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

static bool live_expired(const struct flow *flow)
{
    const struct kv_store *store = flow->shard->store;
    const uint64_t now_ms = kv_store_now_ms(store);
    const uint64_t idle_ms = now_ms > flow->session->used_ms ? now_ms - flow->session->used_ms : 0;
    return idle_ms > store->options.pool_ttl_ms ||
           idle_ms > kv_index_session_ttl_ms(&flow->session->entry);
}

void resume_expire_live(struct flow *flow)
{
    if (flow->session->live != NULL && live_expired(flow))
        live_release(flow->shard, flow->session->live);
}

/* What ages of checkpoints are judged by. */
static uint64_t judged_ms(const struct kv_store *store)
{
    return KV_PLANTED(store, TTL_ONLY_SWEPT) ? 0 : kv_store_now_ms(store);
}

static void drop_expired(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const uint64_t now_ms = judged_ms(store);
    struct kv_node *node = NULL;
    bool any = false;
    /* A save that this call does not wait for holds nodes of the tree; what is expired is not
     * matched in any case. */
    if (flow->session->tree->commits > 0) return;
    while ((node = kv_index_node_next(flow->session, node)) != NULL) {
        if (!kv_index_expired(node, now_ms)) continue;
        shard_before_drop(flow->session, node);
        any = true;
    }
    if (any) kv_store_drop_expired(store, flow->session);
}

uint32_t resume_reach(const struct flow *flow)
{
    const struct kv_layout *layout = flow->shard->layout;
    if (!flow->exact) return layout->window_tokens;
    return (layout->window_tokens - 1) * layout->encoder_layers;
}

void resume_match(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct kv_store *store = shard->store;

    if (flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (!flow->plan_only || flow->session->busy == NULL)
        old_branches_look(flow->shard, flow->session);
    if (!flow->plan_only) {
        resume_expire_live(flow);
        drop_expired(flow);
    }
    /* Rows from an unread page on are as good as not there.  From 0 on: resume_plan takes none. */
    const bool cut = flow->unread && flow->unread_from > 0;
    flow->match =
        (struct kv_match){.ids = flow->ids,
                          .count = cut ? KV_MIN(flow->count, flow->unread_from) : flow->count,
                          .chain = flow->chain,
                          .unmarked_only = flow->exact,
                          .reach = resume_reach(flow)};
    kv_match_run(&flow->match, store->index, flow->session, judged_ms(store));
    flow->removals = flow->session->tree->removals;

    const struct live *live = flow->session->live;
    flow->live_match = 0;
    if (live != NULL && !live->busy && !live_expired(flow))
        flow->live_match =
            common_prefix(flow->ids, live->ids, KV_MIN(flow->count, live->state.tokens));
    if (flow->exact && flow->live_match > 0)
        flow->live_match = KV_MIN(flow->live_match, live_unmarked(live));
    if (!stage_probe(flow)) resume_plan(flow);
}

static void note_weaker(struct flow *flow, enum kv_reason reason)
{
    flow->req->out.weakened++;
    flow->shard->counters.weakened++;
    flow->req->out.reason = reason;
}

void resume_weaken(struct flow *flow, uint32_t page, uint32_t position, kv_status status)
{
    assert(!flow->plan_only);
    /* Beside a save that this call does not wait for nothing is dropped, because nodes that need
     * the page may be of that save: then this call goes without it, and the next one drops it. */
    if (status == KV_CORRUPT && flow->session->tree->commits == 0) {
        shard_drop_page(flow->shard, flow->session, page);
    } else {
        flow->unread_from = flow->unread ? KV_MIN(flow->unread_from, position) : position;
        flow->unread = true;
    }
    note_weaker(flow, status == KV_CORRUPT ? KV_REASON_CORRUPT : KV_REASON_READ_FAILED);
    resume_match(flow);
}

/* ---- probe ---- */

static void probes_read(struct kv_read *read)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    struct kv_store *store = flow->shard->store;
    uint32_t bad = KV_PAGE_INDEX_NONE;
    bool unread = false; /* The rows before it still count. */

    for (uint32_t i = 0; i < read->count; i++) {
        const uint32_t page = flow->read_pages[i];
        const struct kv_page *object = kv_index_page(store->index, page);
        const uint8_t *bytes = NULL;
        const kv_status status =
            kv_store_read_check(read, i, &flow->chain[object->position / KV_PAGE_TOKENS], NULL, 0);
        if (status == KV_OK) bytes = kv_hbm_bytes(store->hbm, flow->read_slots[i]);
        for (uint32_t j = 0; j < flow->match.probe_count; j++) {
            struct kv_match_probe *probe = &flow->match.probes[j];
            if (probe->resolved || probe->page != page) continue;
            if (status == KV_CORRUPT && !probe->optional) bad = page;
            if (status == KV_IO && !probe->optional) unread = true;
            kv_match_resolve(&flow->match, probe, object, bytes);
        }
    }
    flow->req->out.times.read_ns += resume_lap(flow);
    for (uint32_t i = 0; i < read->count; i++)
        kv_index_page_unref(store->index, flow->read_pages[i]);
    if (flow->plan_only) {
        /* It holds no claim: the tree may have changed meanwhile.  The pages are in memory now
         * (pinned until the end), so the second look does not wait. */
        flow->probed = true;
        resume_match(flow);
        return;
    }
    flow_unpin_read(flow);
    if (resume_is_stale(flow)) {
        resume_match(flow);
        return;
    }
    if (bad != KV_PAGE_INDEX_NONE && flow->req->out.weakened < RESUME_WEAKEN_MAX) {
        resume_weaken(flow, bad, 0, KV_CORRUPT);
        return;
    }
    if (unread) note_weaker(flow, KV_REASON_READ_FAILED);
    resume_plan(flow);
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
        if (probe->upper <= best &&
            !kv_match_window_near(probe, &store->layout, store->pool, kv_store_now_ns(store))) {
            /* Neither more rows than what is known already, nor a window. */
            kv_match_resolve(&flow->match, probe, kv_index_page(store->index, probe->page), NULL);
            continue;
        }
        if (flow->probed) {
            kv_match_resolve(&flow->match, probe, kv_index_page(store->index, probe->page), NULL);
            continue;
        }
        probe->optional = probe->upper <= best;
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
    flow->req->out.times.lookup_ns += resume_lap(flow);
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

void resume_digest(struct flow *flow)
{
    struct kv_arena *arena = flow->req->arena;
    const uint32_t pages = KV_MAX(kv_pages_for(flow->count), KV_MATCH_PROBES_MAX);
    flow->chain = kv_arena_alloc(arena, sizeof(*flow->chain) * (flow->count / 128 + 1));
    flow->read_pages = kv_arena_alloc(arena, sizeof(uint32_t) * pages);
    flow->read_slots = kv_arena_alloc(arena, sizeof(uint32_t) * pages);
    flow->read_fresh = kv_arena_alloc(arena, sizeof(bool) * pages);
    flow->read_status = kv_arena_alloc(arena, sizeof(kv_status) * pages);
    if (out_of_memory(flow, flow->chain) || out_of_memory(flow, flow->read_pages) ||
        out_of_memory(flow, flow->read_slots) || out_of_memory(flow, flow->read_fresh) ||
        out_of_memory(flow, flow->read_status))
        return;
    kv_match_chain(&flow->session->user->root, flow->ids, flow->count, flow->chain);
    flow->mark_ns = kv_clock_stopwatch_ns();
    resume_match(flow);
}

void resume_start(struct flow *flow, void (*ready)(struct flow *flow))
{
    assert(flow->count > 0);
    flow->ready = ready;
    if (flow->plan_only)
        resume_digest(flow);
    else if (resume_fits(flow)) /* Before anybody else gives up memory or a slot for it. */
        resume_slot(flow);
}
