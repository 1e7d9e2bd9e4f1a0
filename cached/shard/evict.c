/*
 * Room on the SSD tier: what goes when it is full, and saves that wait for it.
 *
 * Which session and which of its checkpoints is decided in kvstore/plan/evict.c.  Here the table of
 * sessions is walked, a bounded part a turn, for the best candidates; each is looked at again
 * before anything of it goes, because it may have been used meanwhile, and its tree is loaded if
 * need be. Its leaves then go one by one, least recently used first, until there is room.  Their
 * space is free when the deletion of their records is durable, as always.
 *
 * It begins before the tier is full, so saves seldom wait.  One that does waits in commit.c, is
 * tried again each turn, and is refused when a whole walk found nothing that may go.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>

#define WALK_SESSIONS_PER_TURN 4096u
#define NODES_PER_TURN 64u
#define LOADS_MAX 8u
#define WALK_AGAIN_NS 1000000000ull /* After one that found nothing. */
#define REFUSED_SHOWN_NS 5000000000ull

/* A call, a load or a save works on its tree. */
static bool is_in_use(const struct kv_session *session)
{
    const struct kv_tree *tree = session->tree;
    if (tree == NULL) return false; /* It is not in memory. */
    if (tree->commits > 0 || tree->load == KV_LOAD_RUNNING) return true;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        const struct live *live = at->live;
        if (at->deleting || at->busy != NULL || at->flows > 0) return true;
        if (live != NULL && (live->busy || live->holder != NULL)) return true;
    }
    return false;
}

static struct kv_evict_facts facts_of(const struct shard *shard, const struct kv_session *session)
{
    const struct live *live = session->live;
    const bool is_saved = session->tree != NULL && session->tree->commits > 0;
    return (struct kv_evict_facts){
        .used_ms = session->used_ms,
        .pages = session->pages,
        .user_pages = session->user->pages,
        .is_expired = sweep_is_due(shard, session),
        .is_idle = live != NULL && !live->busy && live->holder == NULL,
        .is_saving = is_saved && commit_waits(shard, session),
        .is_in_use = is_in_use(session),
    };
}

static struct kv_evict_rank rank_of(const struct shard *shard, const struct kv_session *session)
{
    const struct kv_evict_facts facts = facts_of(shard, session);
    const uint32_t limit = kv_ssd_room(shard->store->ssd).limit;
    const uint32_t users = kv_index_usage(shard->store->index).users_with_pages;
    return kv_evict_rank(&facts, kv_evict_share(limit, users));
}

/* ---- the walk ---- */

static void walk_begin(struct evict *evict)
{
    evict->list.count = 0;
    evict->at = 0;
    evict->bucket = 0;
    evict->gained = 0;
    evict->walking = evict->walked = true;
    evict->walk_ns = kv_clock_stopwatch_ns();
}

/* Whole buckets: a session may be gone by the next turn. */
static void walk(struct shard *shard)
{
    struct evict *evict = &shard->evict;
    const struct kv_session_entry *entry = NULL;
    uint32_t seen = 0;
    while (seen < WALK_SESSIONS_PER_TURN || entry->next != NULL) {
        struct kv_session shape;
        entry = kv_index_entry_next(shard->store->index, &evict->bucket, entry);
        if (entry == NULL) {
            evict->walking = false;
            return;
        }
        seen++;
        const struct kv_evict_rank rank = rank_of(shard, kv_index_look(entry, &shape));
        kv_evict_offer(&evict->list, &rank, &entry->id);
    }
    evict->bucket++;
}

/* ---- one victim ---- */

/* Of a tree that sessions share only what this one made or stands on goes, and nothing that one
 * used later stands on. */
static bool is_of(const struct kv_session *session, const struct kv_node *leaf)
{
    bool is_its = leaf->session == session;
    if (session->tree->session_count == 1) return true;
    for (const struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at)) {
        if (at->head != leaf) continue;
        if (at == session) is_its = true;
        if (at->used_ms > session->used_ms) return false;
    }
    return is_its;
}

static struct kv_node *next_leaf(const struct shard *shard, struct kv_session *session)
{
    struct kv_evict_leaf best = {.is_kept = true};
    struct kv_node *victim = NULL, *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        if (node->child != NULL || !is_of(session, node)) continue;
        const struct kv_evict_leaf leaf = {
            .used_ms = node->used_ms,
            .tokens = node->tokens,
            .is_kept = (session->tree->commits > 0 && commit_needs(shard, node)) ||
                       kv_store_pin_find(shard->store, node) != NULL,
        };
        if (leaf.is_kept || (victim != NULL && !kv_evict_leaf_before(&leaf, &best))) continue;
        best = leaf;
        victim = node;
    }
    return victim;
}

/* Heads that stand on a leaf which goes now. */
static void mark_heads(const struct kv_node *leaf)
{
    const struct kv_tree *tree = leaf->session->tree;
    for (struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        if (at->head == leaf) at->head_falls = true;
}

/* Its head went: a Decode would go on from somewhere else than its caller thinks. */
static void head_fell(struct shard *shard, struct kv_session *session)
{
    const struct kv_node *head = session->head;
    session->head_falls = false;
    session->fell_back = true;
    session->has_head = head != NULL;
    session->head_tokens = head == NULL ? 0 : head->tokens;
    if (head != NULL) session->head_id = head->id;
    struct kv_batch *batch = kv_batch_create(shard->store);
    if (batch == NULL || kv_batch_session(batch, session) != KV_OK) {
        kv_batch_discard(batch); /* A record that names a head that is gone is true enough. */
        return;
    }
    kv_batch_post(batch, NULL, NULL);
}

/* False: more of it may go in another turn. */
static bool evict_session(struct shard *shard, struct kv_session *session, enum kv_evict_class kind,
                          uint32_t need)
{
    struct kv_store *store = shard->store;
    const uint32_t before = store->freeing;
    assert(session->tree->load == KV_LOAD_DONE);
    if (session->tree->commits == 0) live_release(shard, session->live);
    if (kind == KV_EVICT_EXPIRED) {
        sweep_session(shard, session); /* It may be gone. */
        shard->evict.gained += store->freeing - before;
        return true;
    }
    struct kv_node *leaf = NULL;
    for (uint32_t i = 0; i < NODES_PER_TURN && store->freeing - before < need; i++) {
        leaf = next_leaf(shard, session);
        if (leaf == NULL) break;
        shard_before_drop(session, leaf);
        mark_heads(leaf);
        kv_store_drop_node(store, leaf, KV_REASON_CAPACITY);
    }
    for (struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at))
        if (at->head_falls) head_fell(shard, at);
    shard->evict.gained += store->freeing - before;
    return leaf == NULL || store->freeing - before >= need;
}

static uint32_t need_of(const struct shard *shard)
{
    const struct kv_ssd_room room = kv_ssd_room(shard->store->ssd);
    const struct kv_evict_space space = {
        .limit = room.limit,
        .used = room.used,
        .freeing = KV_MIN(shard->store->freeing + shard->evict.loading, room.used),
        .waiting = shard->waiting_pages,
        .is_evicting = shard->evict.is_evicting,
    };
    return kv_evict_need(&space);
}

static bool same_rank(const struct kv_evict_rank *a, const struct kv_evict_rank *b)
{
    return a->kind == b->kind && a->held == b->held && a->used_ms == b->used_ms;
}

struct evict_load {
    struct shard *shard;
    struct kv_evict_rank rank;
    uint32_t pages;
};

static void evict_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct evict_load *load = context;
    struct shard *shard = load->shard;
    const struct kv_evict_rank rank = load->rank;
    shard->evict.loads--;
    shard->evict.loading -= load->pages;
    free(load);
    /* What came for it meanwhile waited for the same load. */
    flow_wake_loaded(session, status);
    if (status != KV_OK) return;
    const struct kv_evict_rank now = rank_of(shard, session);
    const uint32_t need = need_of(shard);
    if (need > 0 && same_rank(&now, &rank)) (void)evict_session(shard, session, now.kind, need);
}

static void load_start(struct shard *shard, struct kv_session *session,
                       const struct kv_evict_rank *rank)
{
    struct evict_load *load = malloc(sizeof(*load));
    if (load == NULL) return;
    *load = (struct evict_load){.shard = shard, .rank = *rank, .pages = session->pages};
    shard->evict.loads++;
    shard->evict.loading += load->pages;
    kv_store_load_start(shard->store, session, evict_loaded, load);
}

/* True: it was looked at, and the next one may be. */
static bool try_candidate(struct shard *shard, const struct kv_evict_candidate *candidate,
                          uint32_t need)
{
    struct kv_session *session = kv_index_session_find(shard->store->index, &candidate->session);
    if (session == NULL) return true;
    const struct kv_evict_rank rank = rank_of(shard, session);
    if (!same_rank(&rank, &candidate->rank)) return true;
    if (session->tree->load == KV_LOAD_DONE) return evict_session(shard, session, rank.kind, need);
    if (shard->evict.loads == LOADS_MAX) return false;
    load_start(shard, session, &rank);
    return true;
}

/* ---- each turn ---- */

/* Deleting records is no use where they cannot be written. */
static bool is_possible(const struct shard *shard)
{
    const struct kv_manifest_stats manifest = kv_manifest_stats(shard->store->manifest);
    return !kv_ssd_usage(shard->store->ssd).read_only && !manifest.failed && !manifest.no_room &&
           !atomic_load(&shard->stopping);
}

/* A whole walk is over and all its candidates were looked at. */
static void walk_over(struct shard *shard)
{
    struct evict *evict = &shard->evict;
    if (evict->gained > 0 || evict->loads > 0 || shard->store->freeing > 0) return;
    commit_retry(shard, evict->walk_ns);
    if (shard->waiting_first == NULL) evict->hopeless_ns = kv_clock_stopwatch_ns();
}

static bool make_room(struct shard *shard)
{
    struct evict *evict = &shard->evict;
    if (evict->walking) {
        walk(shard);
        return true;
    }
    uint32_t need = need_of(shard);
    for (; need > 0 && evict->at < evict->list.count; need = need_of(shard)) {
        if (!try_candidate(shard, &evict->list.candidates[evict->at], need))
            return evict->loads == 0;
        evict->at++;
    }
    if (need == 0) return false;
    if (!evict->walked) {
        walk_begin(evict);
        return true;
    }
    walk_over(shard);
    evict->walked = false;
    /* Without a gain the next one waits for what is on its way, or for a save that came meanwhile.
     */
    if (evict->hopeless_ns != 0 || evict->gained == 0) return false;
    walk_begin(evict);
    return true;
}

bool evict_tick(struct shard *shard)
{
    struct evict *evict = &shard->evict;
    if (shard->waiting_first != NULL) commit_retry(shard, 0);
    const bool is_needed = need_of(shard) > 0;
    if (!is_needed || !is_possible(shard)) {
        evict->is_evicting = evict->walking = evict->walked = false;
        evict->list.count = evict->at = 0;
        if (!is_needed) evict->hopeless_ns = 0;
        return false;
    }
    evict->is_evicting = true;
    if (evict->hopeless_ns != 0) {
        if (kv_clock_stopwatch_ns() - evict->hopeless_ns < WALK_AGAIN_NS) return false;
        evict->hopeless_ns = 0;
    }
    return make_room(shard);
}

const char *evict_health(const struct shard *shard)
{
    const uint64_t refused_ns = shard->evict.refused_ns;
    if (kv_manifest_stats(shard->store->manifest).no_room)
        return "the file system of state.dir is full: saves are refused until it has room";
    if (refused_ns == 0 || !kv_ssd_room(shard->store->ssd).is_bounded) return NULL;
    if (kv_clock_stopwatch_ns() - refused_ns > REFUSED_SHOWN_NS) return NULL;
    return "the file system of state.dir is full and nothing may be evicted: saves are refused";
}
