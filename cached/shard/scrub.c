/*
 * The scrub as an operator sees it: start, status, stop; and what is done about a finding.
 *
 * kv_scrub reads and compares at its pace, a little in each turn of the loop (store_scrub.c).  What
 * does not fit its record waits here, in a bounded list, until its session is at rest: then the
 * tree is loaded and says whether the page is still the one that was read.  If it is, its place is
 * quarantined and what needs it is dropped, exactly as if a resume had met it.  While the list is
 * full nothing more is read.
 *
 * One pass at a time.  Nothing of it is kept: a restart stops it, and the next one begins anew.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

#define LOAD_RETRY_NS 1000000000ull /* index.ram was full of sessions in use. */

/* ---- findings ---- */

static bool is_at_rest(const struct kv_session *session)
{
    const struct kv_tree *tree = session->tree;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        if (at->busy != NULL || at->flows > 0 || at->deleting) return false;
    return tree->commits == 0 && tree->load != KV_LOAD_RUNNING;
}

static void pending_remove(struct scrub *scrub, uint32_t at)
{
    scrub->pending[at] = scrub->pending[--scrub->pending_count];
}

/* True: it is as it was found, and its place is out of use. */
static bool settle(struct shard *shard, struct kv_session *session,
                   const struct kv_scrub_finding *finding)
{
    const uint32_t page = kv_scrub_current(shard->store, session, finding);
    if (page == KV_PAGE_INDEX_NONE) return false; /* It went, or was written again meanwhile. */
    shard->scrub.damaged++;
    shard->store->counters.scrub_corrupt_pages++;
    if (finding->missing)
        kv_log(shard->options.log, KV_LOG_ERROR, "page_damaged",
               "where=scrub ssd_page=%u owners=%u cause=\"%s\" action=dropped", finding->ssd_page,
               kv_store_page_owners(shard->store, page), finding->cause);
    else
        kv_store_quarantine(shard->store, page, KV_FOUND_BY_SCRUB, finding->cause);
    return true;
}

/* A live session has the right rows in memory: they become its own, and its next save writes them
 * again, elsewhere.  Else that save would take the bad page for a good one. */
static void let_go(struct shard *shard, const struct kv_session *session, uint32_t page)
{
    struct live *live = session->live;
    for (uint32_t k = 0; live != NULL && k < live->page_count; k++) {
        if (live->pages[k].page != page) continue;
        live->pages[k].page = KV_PAGE_INDEX_NONE;
        kv_index_page_unref(shard->store->index, page);
    }
}

static void all_let_go(struct shard *shard, const struct kv_tree *tree, uint32_t page)
{
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        let_go(shard, at, page);
}

/* All findings of a tree that is in memory: every place is told and taken out of use
 * before the first checkpoint goes, because other bad pages may go with it. */
static void settle_session(struct shard *shard, struct kv_session *session)
{
    struct scrub *scrub = &shard->scrub;
    const uint64_t dropped = shard->store->counters.nodes_dropped;
    for (uint32_t i = 0; i < scrub->pending_count;) {
        const bool own = kv_id_equal(scrub->pending[i].tree.bytes, session->tree->id.bytes);
        if (own && !settle(shard, session, &scrub->pending[i]))
            pending_remove(scrub, i);
        else
            i++;
    }
    for (uint32_t i = 0; i < scrub->pending_count;) {
        const struct kv_scrub_finding finding = scrub->pending[i];
        if (!kv_id_equal(finding.tree.bytes, session->tree->id.bytes)) {
            i++;
            continue;
        }
        pending_remove(scrub, i);
        const uint32_t page = kv_scrub_current(shard->store, session, &finding);
        if (page == KV_PAGE_INDEX_NONE) continue;
        all_let_go(shard, session->tree, page);
        shard_drop_page(shard, session, page);
    }
    scrub->dropped += shard->store->counters.nodes_dropped - dropped;
}

static void tree_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct shard *shard = context;
    shard->scrub.loading = false;
    /* What came for it meanwhile waited for the same load, and may have it now. */
    flow_wake_loaded(session, status);
    if (status == KV_OK && is_at_rest(session)) settle_session(shard, session);
    if (status != KV_OK) shard->scrub.retry_ns = kv_clock_stopwatch_ns() + LOAD_RETRY_NS;
}

/* One look at each finding; those of busy sessions stay. */
static void settle_pending(struct shard *shard)
{
    struct scrub *scrub = &shard->scrub;
    for (uint32_t i = 0; i < scrub->pending_count;) {
        struct kv_session *session =
            kv_index_tree_session(shard->store->index, &scrub->pending[i].tree);
        if (session == NULL) {
            pending_remove(scrub, i); /* It was removed as a whole. */
        } else if (!is_at_rest(session)) {
            i++;
        } else if (session->tree->load == KV_LOAD_DONE) {
            settle_session(shard, session);
            i = 0; /* Others moved to where these were. */
        } else if (scrub->loading || kv_clock_stopwatch_ns() < scrub->retry_ns) {
            i++;
        } else {
            scrub->loading = true;
            kv_store_load_start(shard->store, session, tree_loaded, shard);
            return;
        }
    }
}

static void found(void *context, const struct kv_scrub_finding *finding)
{
    struct scrub *scrub = &((struct shard *)context)->scrub;
    assert(scrub->pending_count < KV_SCRUB_PENDING_MAX);
    scrub->pending[scrub->pending_count++] = *finding;
}

/* ---- a pass ---- */

static void run_end(struct shard *shard, bool whole)
{
    struct scrub *scrub = &shard->scrub;
    scrub->last = kv_scrub_progress(scrub->run);
    scrub->ended_ns = kv_clock_stopwatch_ns();
    if (scrub->last.status != KV_OK) whole = false;
    if (whole) {
        scrub->passes++;
        scrub->full_ns = scrub->ended_ns;
    }
    kv_scrub_destroy(scrub->run);
    scrub->run = NULL;
    kv_log(shard->options.log, whole ? KV_LOG_INFO : KV_LOG_WARN,
           whole ? "scrub_done" : "scrub_stopped",
           "pages=%llu bytes=%llu damaged=%llu unread=%llu checkpoints_dropped=%llu ms=%llu "
           "status=%s",
           (unsigned long long)scrub->last.pages, (unsigned long long)scrub->last.bytes,
           (unsigned long long)scrub->damaged, (unsigned long long)scrub->last.unread,
           (unsigned long long)scrub->dropped,
           (unsigned long long)((scrub->ended_ns - scrub->started_ns) / 1000000u),
           kv_status_name(scrub->last.status));
}

static kv_status run_start(struct shard *shard, uint64_t rate_bytes, const char *by);

/* Nobody asked for one for so long that it begins by itself. */
static void begin_if_due(struct shard *shard)
{
    struct scrub *scrub = &shard->scrub;
    const uint64_t every_ms = shard->options.scrub_every_ms;
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    const uint64_t since_ns = KV_MAX(shard->started_ns, scrub->ended_ns);
    if (every_ms == 0 || shard->slow || atomic_load(&shard->stopping)) return;
    if ((now_ns - since_ns) / 1000000u < every_ms) return;
    if (run_start(shard, shard->options.scrub_rate_bytes, "schedule") != KV_OK)
        scrub->ended_ns = now_ns; /* No memory now. */
}

static void made_durable(void *context, kv_status status)
{
    struct scrub *scrub = &((struct shard *)context)->scrub;
    (void)status; /* A manifest that takes nothing is told of elsewhere. */
    scrub->settling = false;
    scrub->settled = true;
}

/* What was found is recorded: a pass that has ended is right after a crash, too. */
static bool is_durable(struct shard *shard)
{
    struct scrub *scrub = &shard->scrub;
    if (scrub->damaged == 0 || scrub->settled) return true;
    if (scrub->settling) return false;
    struct kv_batch *barrier = kv_batch_create(shard->store);
    if (barrier == NULL) return true;
    kv_batch_barrier(barrier);
    scrub->settling = true;
    kv_batch_post(barrier, made_durable, shard);
    return false;
}

uint64_t scrub_tick(struct shard *shard)
{
    struct scrub *scrub = &shard->scrub;
    if (scrub->run == NULL) begin_if_due(shard);
    if (scrub->run == NULL) return UINT64_MAX;
    if (atomic_load(&shard->stopping)) scrub->stopping = true;
    if (scrub->stopping) {
        if (kv_scrub_in_flight(scrub->run) || scrub->loading || scrub->settling) return UINT64_MAX;
        scrub->pending_count = 0; /* Whoever reads these pages finds them again. */
        run_end(shard, false);
        return UINT64_MAX;
    }
    /* Every read in flight may be one more finding. */
    bool hold = scrub->pending_count + KV_SCRUB_DEPTH_MAX > KV_SCRUB_PENDING_MAX;
    /* All bad pages of a tree are to be known before it is cut. */
    if (hold || kv_scrub_is_between(scrub->run)) settle_pending(shard);
    hold = scrub->pending_count + KV_SCRUB_DEPTH_MAX > KV_SCRUB_PENDING_MAX;
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    kv_scrub_step(scrub->run, now_ns, hold);
    if (kv_scrub_progress(scrub->run).done && scrub->pending_count == 0 && !scrub->loading) {
        if (!is_durable(shard)) return UINT64_MAX;
        run_end(shard, true);
        return UINT64_MAX;
    }
    return hold || scrub->pending_count > 0 ? UINT64_MAX : kv_scrub_wait_ns(scrub->run, now_ns);
}

double scrub_age_s(const struct shard *shard)
{
    const uint64_t from_ns = shard->scrub.passes > 0 ? shard->scrub.full_ns : shard->started_ns;
    return (double)(kv_clock_stopwatch_ns() - from_ns) / 1e9;
}

/* ---- the call ---- */

static kv_status run_start(struct shard *shard, uint64_t rate_bytes, const char *by)
{
    struct scrub *scrub = &shard->scrub;
    const struct kv_scrub_options options = {
        .store = shard->store, .rate_bytes = rate_bytes, .found = found, .context = shard};
    const kv_status status = kv_scrub_create(&options, &scrub->run);
    if (status != KV_OK) return status;
    scrub->stopping = false;
    scrub->rate_bytes = rate_bytes;
    scrub->started_ns = kv_clock_stopwatch_ns();
    scrub->ended_ns = 0;
    scrub->damaged = scrub->dropped = 0;
    scrub->settled = false;
    kv_log(shard->options.log, KV_LOG_INFO, "scrub_started", "by=%s pages=%llu rate_bytes=%llu", by,
           (unsigned long long)kv_scrub_progress(scrub->run).pages_total,
           (unsigned long long)rate_bytes);
    return KV_OK;
}

static bool list_quarantined(struct flow *flow, struct request_scrub *out)
{
    const struct kv_store *store = flow->shard->store;
    struct kv_arena *arena = flow->req->arena;
    const uint64_t now_ms = kv_store_now_ms(store);
    struct request_quarantined *listed =
        kv_arena_alloc(arena, sizeof(*listed) * (store->quarantined_count + 1u));
    if (listed == NULL) return false;
    for (uint32_t i = 0; i < store->quarantined_count; i++) {
        const struct kv_record_quarantine *record = &store->quarantined[i];
        listed[i] = (struct request_quarantined){
            .ssd_page = record->ssd_page,
            .owners = record->owners,
            .generation = record->generation,
            .age_ms = now_ms > record->found_ms ? now_ms - record->found_ms : 0,
            .found_by = kv_found_by_name(record->found_by),
            .cause = record->cause,
        };
        kv_ssd_place(store->ssd, record->ssd_page, &listed[i].segment, &listed[i].offset);
    }
    out->listed = listed;
    out->listed_count = store->quarantined_count;
    out->quarantined_pages = kv_ssd_usage(store->ssd).pages_quarantined;
    return true;
}

/* A pass walks records, so it goes as far as they can be read. */
static const char *failure_of(kv_status status)
{
    switch (status) {
    case KV_OK:
        return NULL;
    case KV_CORRUPT:
        return "records cannot be read: they are damaged";
    case KV_IO:
        return "records cannot be read: an error of the device or of its files";
    default:
        return "records could not be read this time";
    }
}

bool scrub_fill_status(struct flow *flow, bool changed)
{
    const struct scrub *scrub = &flow->shard->scrub;
    struct request_scrub *out = kv_arena_alloc(flow->req->arena, sizeof(*out));
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    if (out == NULL || !list_quarantined(flow, out)) return false;
    const struct kv_scrub_progress progress =
        scrub->run != NULL ? kv_scrub_progress(scrub->run) : scrub->last;
    out->running = scrub->run != NULL;
    out->stopping = out->running && scrub->stopping;
    out->changed = changed;
    out->rate_bytes = scrub->rate_bytes;
    if (scrub->started_ns > 0)
        out->elapsed_ms =
            ((out->running ? now_ns : scrub->ended_ns) - scrub->started_ns) / 1000000u;
    if (!out->running) out->failure = failure_of(progress.status);
    out->pages_total = progress.pages_total;
    out->pages = progress.pages;
    out->bytes = progress.bytes;
    out->damaged = scrub->damaged;
    out->unread = progress.unread;
    out->plain = progress.plain;
    out->waiting = scrub->pending_count;
    out->checkpoints_dropped = scrub->dropped;
    out->passes = scrub->passes;
    if (scrub->passes > 0) out->full_age_ms = KV_MAX((now_ns - scrub->full_ns) / 1000000u, 1u);
    flow->req->out.scrub = out;
    return true;
}

void flow_scrub(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct scrub *scrub = &shard->scrub;
    const struct request_in *in = &flow->req->in;
    uint64_t rate_bytes = in->u.scrub.rate_bytes;
    kv_status status = KV_OK;
    if (in->u.scrub.action == SCRUB_RELEASE) {
        flow_release(flow);
        return;
    }
    bool changed = false;
    if (in->u.scrub.action == SCRUB_START && scrub->run == NULL) {
        if (rate_bytes == 0) rate_bytes = shard->options.scrub_rate_bytes;
        status = run_start(shard, rate_bytes, "call");
        changed = status == KV_OK;
    } else if (in->u.scrub.action == SCRUB_START) {
        /* It goes on, at the rate that was named last. */
        scrub->stopping = false;
        if (rate_bytes > 0) {
            scrub->rate_bytes = rate_bytes;
            kv_scrub_set_rate(scrub->run, rate_bytes);
        }
    } else if (in->u.scrub.action == SCRUB_STOP && scrub->run != NULL) {
        changed = !scrub->stopping;
        scrub->stopping = true;
    }
    if (status == KV_OK && !scrub_fill_status(flow, changed)) status = KV_NOMEM;
    if (status != KV_OK) flow_fail_status(flow, status);
    flow_finish(flow);
}
