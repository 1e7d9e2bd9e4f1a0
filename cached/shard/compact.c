/*
 * Compaction: segments of which little still lives are emptied into the others.
 *
 * Which ones is decided in kvstore/plan/compact.c.  They are closed, so that nothing new is written
 * into them; one scan of the page records, in pieces, finds the sessions that have pages there.
 * Then session by session the tree is loaded, and its pages in those segments are moved
 * (store_move.c) in the order of its positions, so that what belongs together lies together
 * afterwards.  A move holds the session as a save does: calls wait for it, and it is neither
 * evicted nor expired.  A session that a call works on is passed over; what is left of a segment is
 * for another time.
 *
 * Where nothing in a segment was used for longer than any session keeps what it has, the same scan
 * finds who lists its pages, and what expired of those is dropped: the segment goes as a whole.
 *
 * The rate is bounded, and all of it ends when a save waits for room: closed segments are room.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/store/segments.h"

#include <assert.h>
#include <stdlib.h>

#define LOOK_NS 1000000000ull
#define RETRY_NS 60000000000ull /* After a round that moved nothing. */

static uint64_t page_bytes(const struct shard *shard)
{
    return shard->layout->page_bytes;
}

/* ---- which ---- */

static bool is_allowed(const struct shard *shard)
{
    const struct kv_manifest_stats manifest = kv_manifest_stats(shard->store->manifest);
    return shard->waiting_first == NULL && !shard->evict.is_evicting &&
           !kv_ssd_usage(shard->store->ssd).read_only && !manifest.failed && !manifest.no_room &&
           !shard->slow && !atomic_load(&shard->stopping);
}

/* Free pages that saves may need while segments are closed, as far as no more files can be made. */
static uint32_t reserve_of(const struct shard *shard)
{
    const struct kv_ssd_usage usage = kv_ssd_usage(shard->store->ssd);
    const uint32_t limit = kv_ssd_room(shard->store->ssd).limit;
    const uint32_t there = usage.pages_free + usage.pages_used + usage.pages_closed;
    const uint32_t want = 2 * kv_evict_reserve(limit);
    const uint32_t more = limit - KV_MIN(there, limit);
    return want - KV_MIN(more, want);
}

/* Segments beyond every life: what lists their pages is dropped, wherever it is. */
static bool choose_expired(struct shard *shard)
{
    struct kv_store *store = shard->store;
    const uint32_t count = kv_ssd_segment_max(store->ssd);
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < count && chosen < KV_COMPACT_SEGMENTS_MAX; i++) {
        const struct kv_segment segment = kv_store_segment(store, i);
        if (segment.pages_used == 0) continue;
        if (!kv_compact_expired(segment.used_ms, store->life_max_ms, kv_store_now_ms(store)))
            continue;
        kv_ssd_segment_close(store->ssd, i);
        chosen++;
    }
    shard->compact.segments = chosen;
    shard->compact.expires = chosen > 0;
    return chosen > 0;
}

/* True: segments are closed. */
static bool choose(struct shard *shard)
{
    if (choose_expired(shard)) return true;
    if (shard->options.compact_below_thousandths == 0) return false;
    struct kv_ssd *ssd = shard->store->ssd;
    const uint32_t count = kv_ssd_segment_max(ssd);
    const struct kv_compact_options options = {
        .below_thousandths = shard->options.compact_below_thousandths,
        .reserve = reserve_of(shard),
    };
    uint32_t numbers[KV_COMPACT_SEGMENTS_MAX];
    struct kv_compact_segment *segments = malloc(sizeof(*segments) * count);
    if (segments == NULL) return false;
    for (uint32_t i = 0; i < count; i++) {
        const struct kv_ssd_segment_use use = kv_ssd_segment_use(ssd, i);
        segments[i] = (struct kv_compact_segment){
            .number = i, .pages = use.pages, .used = use.used, .is_filling = use.is_filling};
    }
    const uint32_t chosen = kv_compact_choose(segments, count, &options, numbers);
    for (uint32_t i = 0; i < chosen; i++)
        kv_ssd_segment_close(ssd, numbers[i]);
    shard->compact.segments = chosen;
    free(segments);
    return chosen > 0;
}

/* ---- a round ends ---- */

static void let_session_go(struct shard *shard)
{
    struct kv_session *session = shard->compact.session;
    shard->compact.session = NULL;
    if (session == NULL) return;
    assert(session->tree->commits > 0);
    session->tree->commits--;
    shard_commit_ended(shard, session);
}

static void round_end(struct shard *shard)
{
    struct compact *compact = &shard->compact;
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    let_session_go(shard);
    kv_ssd_segments_open(shard->store->ssd);
    if (compact->moved > 0 && compact->expires) {
        kv_log(shard->options.log, KV_LOG_INFO, "segments_expired", "segments=%u pages=%llu",
               compact->segments, (unsigned long long)compact->moved);
    } else if (compact->moved > 0) {
        shard->counters.compact_rounds++;
        kv_log(shard->options.log, KV_LOG_INFO, "compacted", "segments=%u pages=%llu",
               compact->segments, (unsigned long long)compact->moved);
    }
    compact->look_ns = now_ns + (compact->moved > 0 ? LOOK_NS : RETRY_NS);
    compact->stage = COMPACT_IDLE;
    compact->moved = 0;
    free(compact->trees);
    compact->trees = NULL;
}

/* ---- one session ---- */

static int compare_positions(const struct compact_page *x, const struct compact_page *y)
{
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return x->page < y->page ? -1 : x->page > y->page;
}

static bool may_move(const struct shard *shard, const struct kv_page *object)
{
    return object->durable && object->ssd_page != KV_SSD_PAGE_NONE &&
           kv_ssd_closed(shard->store->ssd, object->ssd_page);
}

/* The next pages to move, at most KV_MOVE_PAGES_MAX of them, behind the position and page that the
 * last ones ended at. */
static uint32_t collect(struct shard *shard, struct kv_session *session, uint32_t *ret_pages)
{
    struct kv_index *index = shard->store->index;
    const struct compact_page last = shard->compact.last;
    struct compact_page best[KV_MOVE_PAGES_MAX];
    struct kv_node *node = NULL;
    uint32_t count = 0;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        for (uint32_t i = 0; i < node->page_count; i++) {
            const struct kv_page *object = kv_index_page(index, node->pages[i]);
            const struct compact_page page = {object->position, node->pages[i]};
            if (!may_move(shard, object)) continue;
            if (shard->compact.has_last && compare_positions(&page, &last) <= 0) continue;
            uint32_t at = count;
            while (at > 0 && compare_positions(&page, &best[at - 1]) < 0)
                at--;
            if (at > 0 && compare_positions(&page, &best[at - 1]) == 0) continue; /* Shared. */
            if (at == KV_MOVE_PAGES_MAX) continue;
            for (uint32_t k = KV_MIN(count, KV_MOVE_PAGES_MAX - 1); k > at; k--)
                best[k] = best[k - 1];
            best[at] = page;
            count = KV_MIN(count + 1, KV_MOVE_PAGES_MAX);
        }
    }
    for (uint32_t i = 0; i < count; i++)
        ret_pages[i] = best[i].page;
    shard->compact.has_last = count > 0;
    if (count > 0) shard->compact.last = best[count - 1];
    return count;
}

static void session_next(struct shard *shard)
{
    let_session_go(shard);
    shard->compact.at++;
    shard->compact.stage = COMPACT_TREE;
}

static void moved(void *context, uint32_t pages, kv_status status)
{
    struct shard *shard = context;
    struct compact *compact = &shard->compact;
    compact->moved += pages;
    compact->stage = COMPACT_MOVE;
    if (status != KV_OK && status != KV_CORRUPT) {
        kv_log(shard->options.log, KV_LOG_WARN, "compaction_stopped", "status=%s",
               kv_status_name(status));
        compact->is_over = true;
    }
}

static bool is_free(const struct kv_session *session)
{
    if (session->tree->commits > 0) return false;
    for (const struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at)) {
        const struct live *live = at->live;
        if (at->deleting || at->busy != NULL || at->flows > 0) return false;
        if (live != NULL && (live->busy || live->holder != NULL)) return false;
    }
    return true;
}

static void session_begin(struct shard *shard, struct kv_session *session)
{
    session->tree->commits++;
    shard->compact.session = session;
    shard->compact.held_ns = kv_clock_stopwatch_ns();
    shard->compact.has_last = false;
    shard->compact.stage = COMPACT_MOVE;
}

static void compact_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct shard *shard = context;
    /* What came for it meanwhile waited for the same load. */
    flow_wake_loaded(session, status);
    if (status == KV_OK && is_free(session))
        session_begin(shard, session);
    else
        session_next(shard);
}

static void session_start(struct shard *shard)
{
    struct compact *compact = &shard->compact;
    struct kv_session *session =
        kv_index_tree_session(shard->store->index, &compact->trees[compact->at]);
    if (session == NULL || !is_free(session) || session->tree->load == KV_LOAD_RUNNING) {
        compact->at++;
    } else if (session->tree->load == KV_LOAD_DONE) {
        session_begin(shard, session);
    } else {
        compact->stage = COMPACT_WAIT;
        kv_store_load_start(shard->store, session, compact_loaded, shard);
    }
}

static void drop_expired(struct shard *shard)
{
    struct kv_session *session = shard->compact.session;
    struct kv_store *store = shard->store;
    const uint32_t before = store->freeing;
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        if (kv_index_expired(node, kv_store_now_ms(store))) shard_before_drop(session, node);
    }
    kv_store_drop_expired(store, session);
    shard->compact.moved += store->freeing - before;
    session_next(shard);
}

static void move_next(struct shard *shard)
{
    struct compact *compact = &shard->compact;
    if (compact->expires) {
        drop_expired(shard);
        return;
    }
    uint32_t pages[KV_MOVE_PAGES_MAX];
    const uint32_t count = collect(shard, compact->session, pages);
    if (count == 0) {
        session_next(shard);
        return;
    }
    compact->stage = COMPACT_WAIT;
    compact->next_ns = kv_compact_next_ns(compact->next_ns, kv_clock_stopwatch_ns(),
                                          count * page_bytes(shard), shard->options.compact_rate);
    (void)live_make_room(shard, NULL, count);
    if (kv_store_move_start(shard->store, pages, count, moved, shard) != KV_OK) {
        compact->stage = COMPACT_MOVE;
        compact->is_over = true; /* No memory for it now. */
    }
}

/* ---- each turn ---- */

static void found(void *context, uint32_t count, kv_status status)
{
    struct compact *compact = &((struct shard *)context)->compact;
    compact->count = status == KV_OK ? count : 0;
    compact->at = 0;
    compact->stage = COMPACT_TREE;
}

static void round_begin(struct shard *shard)
{
    struct compact *compact = &shard->compact;
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    if (now_ns < compact->look_ns || !is_allowed(shard)) return;
    compact->look_ns = now_ns + LOOK_NS;
    if (!choose(shard)) return;
    compact->is_over = false;
    compact->moved = 0;
    compact->stage = COMPACT_WAIT;
    compact->trees = malloc(sizeof(*compact->trees) * COMPACT_TREES_MAX);
    if (compact->trees == NULL || kv_store_places_start(shard->store, compact->trees,
                                                        COMPACT_TREES_MAX, found, shard) != KV_OK)
        round_end(shard);
}

bool compact_tick(struct shard *shard)
{
    struct compact *compact = &shard->compact;
    if (compact->stage == COMPACT_IDLE) {
        round_begin(shard);
        return false;
    }
    if (compact->stage == COMPACT_WAIT) return false;
    if (compact->is_over || !is_allowed(shard)) {
        round_end(shard);
        return false;
    }
    if (kv_clock_stopwatch_ns() < compact->next_ns) return false;
    if (compact->stage == COMPACT_MOVE)
        move_next(shard);
    else if (compact->at < compact->count)
        session_start(shard);
    else
        round_end(shard);
    return compact->stage == COMPACT_MOVE || compact->stage == COMPACT_TREE;
}
