/*
 * Admission: what a user's quota lets through, and what of his own goes to make room.
 *
 * Sums are kept where things are counted (sessions and pages in the index, saves in the list of
 * commits), so a decision costs a look at the user, and what is in flight is in the sum already.
 * When a sum has no room for more, the user's least recently used session that nobody works on is
 * deleted, one after the other, each with the cause QUOTA; who asked waits for that, and asks
 * again. Where all of them are in use the call is refused, or what it computed is not stored.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define TRIES_MAX 64u /* Sessions that go for one call. */

uint64_t quota_saves(const struct shard *shard, const struct kv_user *user)
{
    uint64_t count = 0;
    for (const struct commit *commit = shard->commits; commit != NULL; commit = commit->next)
        count += commit->session->user == user;
    return count;
}

struct kv_quota_victim quota_victim(const struct kv_session *session)
{
    const struct live *live = session->live;
    const struct kv_tree *tree = session->tree; /* NULL: it is not in memory. */
    return (struct kv_quota_victim){
        .kind = KV_QUOTA_SESSION,
        .is_held = session->deleting || session->busy != NULL || session->flows > 0 ||
                   (tree != NULL && (tree->commits > 0 || tree->load == KV_LOAD_RUNNING)) ||
                   (live != NULL && (live->busy || live->holder != NULL)),
        .used_ms = session->used_ms,
        .tokens = session->head_tokens,
        .session = session->id,
    };
}

/* The user's session that goes first; false: all are in use.  main_only: others give no room. */
static bool first_victim(const struct shard *shard, const struct kv_user *user, bool main_only,
                         struct kv_quota_victim *ret_victim)
{
    const struct kv_session_entry *entry = NULL;
    struct kv_quota_victim best = {.is_held = true};
    uint32_t bucket = 0;
    while ((entry = kv_index_entry_next(shard->store->index, &bucket, entry)) != NULL) {
        struct kv_session shape;
        if (entry->user != user || (main_only ? entry->kind != 1 : entry->pages == 0)) continue;
        const struct kv_quota_victim victim = quota_victim(kv_index_look(entry, &shape));
        if (kv_quota_victim_before(&victim, &best)) best = victim;
    }
    *ret_victim = best;
    return !best.is_held;
}

/* Deletes one; `again` runs when it is gone, or could not go (the flow has failed then). */
static bool make_room(struct flow *flow, const struct kv_user *user, enum kv_quota_kind kind,
                      uint64_t limit, uint64_t used, void (*again)(struct flow *flow))
{
    if (flow->quota_tries++ >= TRIES_MAX) return false;
    struct kv_quota_victim first;
    if (!first_victim(flow->shard, user, kind == KV_QUOTA_SESSIONS, &first)) return false;
    struct kv_session *victim = kv_index_session_find(flow->shard->store->index, &first.session);
    if (victim == NULL) return false; /* No memory. */
    const struct kv_loss loss = {
        .cause = KV_REASON_QUOTA,
        .limit_of = kind == KV_QUOTA_SESSIONS ? KV_LIMIT_SESSIONS : KV_LIMIT_USER_BYTES,
        .limit = limit,
        .value = used,
    };
    struct shard *shard = flow->shard;
    flow->wake = again;
    if (!delete_for_quota(flow, victim, &loss)) return false;
    shard->counters.quota_sessions++; /* The flow may have ended. */
    return true;
}

static void refuse(struct flow *flow, enum kv_reason reason, enum kv_quota_kind kind,
                   uint64_t limit, uint64_t used)
{
    flow->shard->counters.quota_refused[kind]++;
    flow_fail(flow, reason, kv_quota_name(kind), request_u64(flow->req, limit),
              request_u64(flow->req, used));
}

/* ---- sessions ---- */

enum flow_next admit_session(struct flow *flow, void (*again)(struct flow *flow))
{
    const struct kv_user *user = kv_index_user_find(flow->shard->store->index, &flow->req->user);
    if (user == NULL) return FLOW_NEXT; /* Every limit is at least 1. */
    const struct kv_quota quota = quota_of(flow->shard, user);
    const uint64_t used = user->mains;
    if (kv_quota_admits(&quota, KV_QUOTA_SESSIONS, used, 1)) return FLOW_NEXT;
    const uint64_t limit = quota.limits[KV_QUOTA_SESSIONS];
    if (make_room(flow, user, KV_QUOTA_SESSIONS, limit, used, again)) return FLOW_WAIT;
    refuse(flow, KV_REASON_QUOTA_SESSIONS, KV_QUOTA_SESSIONS, limit, used);
    flow->req->out.failure.retry_ms = 1000;
    return FLOW_NEXT;
}

/* ---- bytes ---- */

enum flow_next admit_pages(struct flow *flow, uint32_t pages, void (*again)(struct flow *flow))
{
    const struct kv_user *user = flow->session->user;
    const struct kv_quota quota = quota_of(flow->shard, user);
    const uint64_t page_bytes = flow->shard->layout->page_bytes;
    const uint64_t limit = quota.limits[KV_QUOTA_BYTES_SSD];
    const uint64_t used = quota_used(flow->shard, user, KV_QUOTA_BYTES_SSD);
    if (kv_quota_admits(&quota, KV_QUOTA_BYTES_SSD, used, pages * page_bytes)) return FLOW_NEXT;
    /* Nothing goes for a session that is too large by itself. */
    const bool may_fit = kv_quota_admits(&quota, KV_QUOTA_BYTES_SSD,
                                         flow->session->pages * page_bytes, pages * page_bytes);
    if (may_fit && make_room(flow, user, KV_QUOTA_BYTES_SSD, limit, used, again)) return FLOW_WAIT;
    flow->shard->counters.quota_refused[KV_QUOTA_BYTES_SSD]++;
    flow->req->out.save_reason = KV_REASON_QUOTA_BYTES_SSD;
    return FLOW_NEXT;
}

/* ---- turns ---- */

/* Somebody holds a pointer to it, or goes on from it. */
static bool is_held(const struct shard *shard, const struct kv_node *node)
{
    const struct kv_tree *tree = node->session->tree;
    if (!node->durable || node->foreign) return true;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        const struct live *live = at->live;
        if (at->head == node) return true;
        if (live != NULL && (live->node == node || live->branch == node)) return true;
    }
    for (const struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (flow->session == NULL || flow->session->tree != tree) continue;
        if (flow->node == node) return true;
        for (uint32_t i = 0; i < flow->point_count; i++)
            if (flow->points[i].node == node) return true;
    }
    return false;
}

static void before_drop(struct kv_node *node)
{
    for (struct kv_session *at = kv_index_head_next(node->session->tree, NULL); at != NULL;
         at = kv_index_head_next(node->session->tree, at))
        shard_before_drop(at, node);
}

/* Branches beside the one that goes on lose their rows. */
static bool drop_beside(struct shard *shard, const struct kv_node *node, const struct kv_node *path,
                        const struct kv_loss *loss)
{
    const struct kv_loss rows = {.cause = loss->cause,
                                 .limit_of = loss->limit_of,
                                 .limit = loss->limit,
                                 .value = loss->value};
    struct kv_node *child = node->child;
    while (child != NULL) {
        struct kv_node *next = child->sibling;
        if (child != path) {
            if (commit_needs(shard, child) || kv_index_stands(child, NULL) != NULL) return false;
            before_drop(child);
            kv_store_drop_node_for(shard->store, child, &rows);
        }
        child = next;
    }
    return true;
}

/* The turn whose PREFILL_END is the limit-th from the end keeps its checkpoints, those above it
 * become part of it: their rows stay, so any position can still be gone back to. */
void admit_turns(struct shard *shard, struct kv_session *session)
{
    const struct kv_quota quota = quota_of(shard, session->user);
    const uint64_t limit = quota.limits[KV_QUOTA_TURNS];
    struct kv_node *first = NULL;
    uint64_t turns = 0;
    if (limit == KV_QUOTA_UNLIMITED || session->tree->commits > 0) return;
    for (struct kv_node *node = session->head; node != NULL; node = node->parent) {
        if (node->kind != KIND_PREFILL_END) continue;
        if (++turns == limit) first = node;
    }
    if (turns <= limit) return;
    const struct kv_loss loss = {.cause = KV_REASON_QUOTA,
                                 .limit_of = KV_LIMIT_TURNS,
                                 .keeps_rows = true,
                                 .limit = limit,
                                 .value = turns};
    struct kv_node *path = first;
    for (struct kv_node *node = first->parent; node != NULL;) {
        struct kv_node *above = node->parent;
        const bool stays = node->kind == KIND_ANCHOR || is_held(shard, node) || !path->durable ||
                           !kv_index_may_join(node, path) || !drop_beside(shard, node, path, &loss);
        if (stays) {
            path = node;
        } else {
            kv_store_join_node(shard->store, node, &loss);
            shard->counters.quota_turns++;
        }
        node = above;
    }
}

/* ---- rates and saves ---- */

static bool take_rate(struct flow *flow, struct kv_rate *rate, enum kv_quota_kind kind,
                      enum kv_reason reason, uint64_t per_s)
{
    uint64_t wait_ns = 0;
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    if (kv_rate_take(rate, per_s, 1, now_ns, &wait_ns)) return true;
    refuse(flow, reason, kind, per_s, per_s + 1);
    flow->req->out.failure.retry_ms = (uint32_t)KV_MIN(wait_ns / 1000000u + 1, 60000u);
    return false;
}

bool admit_request(struct flow *flow)
{
    struct kv_user *user = kv_index_user_find(flow->shard->store->index, &flow->req->user);
    if (user == NULL) return true;
    const struct kv_quota quota = quota_of(flow->shard, user);
    return take_rate(flow, &user->requests, KV_QUOTA_REQUESTS_PER_S, KV_REASON_QUOTA_REQUESTS,
                     quota.limits[KV_QUOTA_REQUESTS_PER_S]);
}

bool admit_turn(struct flow *flow)
{
    struct kv_user *user = flow->session->user;
    const struct kv_quota quota = quota_of(flow->shard, user);
    const uint64_t saves = quota_saves(flow->shard, user);
    if (!kv_quota_admits(&quota, KV_QUOTA_SAVES, saves, 1)) {
        refuse(flow, KV_REASON_QUOTA_SAVES, KV_QUOTA_SAVES, quota.limits[KV_QUOTA_SAVES], saves);
        flow->req->out.failure.retry_ms = 50;
        return false;
    }
    return take_rate(flow, &user->tokens, KV_QUOTA_TOKENS_PER_S, KV_REASON_QUOTA_TOKENS,
                     quota.limits[KV_QUOTA_TOKENS_PER_S]);
}

void admit_computed(struct flow *flow, uint64_t tokens)
{
    struct kv_user *user = flow->session->user;
    const struct kv_quota quota = quota_of(flow->shard, user);
    if (tokens > 1) /* One was taken before. */
        kv_rate_charge(&user->tokens, quota.limits[KV_QUOTA_TOKENS_PER_S], tokens - 1,
                       kv_clock_stopwatch_ns());
}
