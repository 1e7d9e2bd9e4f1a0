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

struct kv_quota_victim quota_victim(const struct shard *shard, const struct kv_session *session)
{
    const struct live *live = session->live;
    return (struct kv_quota_victim){
        .kind = KV_QUOTA_SESSION,
        .is_held = session->deleting || session->busy != NULL || session->flows > 0 ||
                   session->commits > 0 || session->load == KV_LOAD_RUNNING ||
                   (live != NULL && (live->busy || live->holder != NULL)),
        .used_ms = session->used_ms,
        .tokens = session->head_tokens,
        .session = session->id,
    };
}

/* The user's session that goes first; NULL: all are in use.  main_only: others give no room. */
static struct kv_session *first_victim(const struct shard *shard, const struct kv_user *user,
                                       bool main_only)
{
    struct kv_session *session = NULL, *best = NULL;
    struct kv_quota_victim best_victim = {.is_held = true};
    uint32_t bucket = 0;
    while ((session = kv_index_session_next(shard->store->index, &bucket, session)) != NULL) {
        if (session->user != user || (main_only && session->kind != 1)) continue;
        if (!main_only && session->pages == 0) continue;
        const struct kv_quota_victim victim = quota_victim(shard, session);
        if (victim.is_held) continue;
        if (best != NULL && !kv_quota_victim_before(&victim, &best_victim)) continue;
        best = session;
        best_victim = victim;
    }
    return best;
}

/* Deletes one; `again` runs when it is gone, or could not go (the flow has failed then). */
static bool make_room(struct flow *flow, const struct kv_user *user, enum kv_quota_kind kind,
                      uint64_t limit, uint64_t used, void (*again)(struct flow *flow))
{
    if (flow->quota_tries++ >= TRIES_MAX) return false;
    struct kv_session *victim = first_victim(flow->shard, user, kind == KV_QUOTA_SESSIONS);
    if (victim == NULL) return false;
    const struct kv_loss loss = {
        .cause = KV_REASON_QUOTA,
        .limit_of = kind == KV_QUOTA_SESSIONS ? KV_LIMIT_SESSIONS : KV_LIMIT_USER_BYTES,
        .limit = limit,
        .value = used,
    };
    flow->wake = again;
    if (!delete_for_quota(flow, victim, &loss)) return false;
    flow->shard->counters.quota_sessions++;
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
    const uint64_t used = user->main_sessions;
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
    if (make_room(flow, user, KV_QUOTA_BYTES_SSD, limit, used, again)) return FLOW_WAIT;
    flow->shard->counters.quota_refused[KV_QUOTA_BYTES_SSD]++;
    flow->req->out.save_reason = KV_REASON_QUOTA_BYTES_SSD;
    return FLOW_NEXT;
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
