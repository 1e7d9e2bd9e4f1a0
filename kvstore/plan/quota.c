/*
 * Quotas: limits, admission, rates, victims.
 *
 * Every sum is taken so that it cannot overflow: what a client or an operator says may be as large
 * as a number can be.
 */

#include "kvstore/plan/quota.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define NS_PER_S 1000000000ull

static const struct {
    const char *name;
    uint64_t least, most;
} kinds[KV_QUOTA_COUNT] = {
    [KV_QUOTA_SESSIONS] = {"sessions", 1, 1000000},
    [KV_QUOTA_TURNS] = {"turns", 1, 1000000},
    [KV_QUOTA_BYTES_HBM] = {"bytes_hbm", 1u << 20, 1ull << 50},
    [KV_QUOTA_BYTES_POOL] = {"bytes_pool", 0, 1ull << 50},
    [KV_QUOTA_BYTES_SSD] = {"bytes_ssd", 1u << 20, 1ull << 50},
    [KV_QUOTA_REQUESTS_PER_S] = {"requests_per_s", 1, 1000000000},
    [KV_QUOTA_TOKENS_PER_S] = {"tokens_per_s", 1, 1000000000},
    [KV_QUOTA_SAVES] = {"saves", 1, 1000000},
    [KV_QUOTA_PINS] = {"pins", 0, 1000000},
};

const char *kv_quota_name(enum kv_quota_kind kind)
{
    assert(kind < KV_QUOTA_COUNT);
    return kinds[kind].name;
}

bool kv_quota_find(const char *name, enum kv_quota_kind *ret_kind)
{
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        if (strcmp(kinds[i].name, name) != 0) continue;
        *ret_kind = (enum kv_quota_kind)i;
        return true;
    }
    return false;
}

uint64_t kv_quota_least(enum kv_quota_kind kind)
{
    assert(kind < KV_QUOTA_COUNT);
    return kinds[kind].least;
}

uint64_t kv_quota_most(enum kv_quota_kind kind)
{
    assert(kind < KV_QUOTA_COUNT);
    return kinds[kind].most;
}

bool kv_quota_is_valid(enum kv_quota_kind kind, uint64_t limit)
{
    return limit == KV_QUOTA_UNLIMITED ||
           (limit >= kv_quota_least(kind) && limit <= kv_quota_most(kind));
}

struct kv_quota kv_quota_unlimited(void)
{
    struct kv_quota quota;
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++)
        quota.limits[i] = KV_QUOTA_UNLIMITED;
    return quota;
}

struct kv_quota kv_quota_merge(const struct kv_quota *plan, const struct kv_quota_own *own)
{
    struct kv_quota quota = *plan;
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++)
        if ((own->set & 1u << i) != 0) quota.limits[i] = own->quota.limits[i];
    return quota;
}

bool kv_quota_admits(const struct kv_quota *quota, enum kv_quota_kind kind, uint64_t used,
                     uint64_t more)
{
    const uint64_t limit = quota->limits[kind];
    if (limit == KV_QUOTA_UNLIMITED) return true;
    return used <= limit && more <= limit - used;
}

uint64_t kv_quota_over(const struct kv_quota *quota, enum kv_quota_kind kind, uint64_t used)
{
    const uint64_t limit = quota->limits[kind];
    return used > limit ? used - limit : 0;
}

/* ---- rates ---- */

static void refill(struct kv_rate *rate, uint64_t per_s, uint64_t now_ns)
{
    const double full = (double)per_s;
    if (!rate->begun) {
        *rate = (struct kv_rate){.balance = full, .at_ns = now_ns, .begun = true};
        return;
    }
    if (now_ns > rate->at_ns) {
        rate->balance += full * ((double)(now_ns - rate->at_ns) / (double)NS_PER_S);
        rate->at_ns = now_ns;
    }
    rate->balance = KV_MIN(rate->balance, full);
}

bool kv_rate_take(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns,
                  uint64_t *ret_wait_ns)
{
    if (per_s == KV_QUOTA_UNLIMITED || amount == 0) return true;
    refill(rate, per_s, now_ns);
    /* More than a second's worth is let through by a full bucket, and paid off afterwards. */
    const double need = KV_MIN((double)amount, (double)per_s);
    if (rate->balance + 1e-6 >= need) { /* Sums of fractions. */
        rate->balance -= (double)amount;
        return true;
    }
    *ret_wait_ns = (uint64_t)((need - rate->balance) / (double)per_s * (double)NS_PER_S) + 1;
    return false;
}

void kv_rate_charge(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns)
{
    if (per_s == KV_QUOTA_UNLIMITED) return;
    refill(rate, per_s, now_ns);
    rate->balance -= (double)amount;
}

/* ---- victims ---- */

bool kv_quota_victim_before(const struct kv_quota_victim *a, const struct kv_quota_victim *b)
{
    if (a->is_held || b->is_held) return !a->is_held && b->is_held;
    if (a->kind != b->kind) return a->kind < b->kind;
    if (a->used_ms != b->used_ms) return a->used_ms < b->used_ms;
    if (a->tokens != b->tokens) return a->tokens < b->tokens;
    return memcmp(a->session.bytes, b->session.bytes, sizeof(a->session.bytes)) < 0;
}

uint32_t kv_quota_helps(enum kv_quota_kind kind)
{
    switch (kind) {
    case KV_QUOTA_SESSIONS:
        return 1u << KV_QUOTA_SESSION;
    case KV_QUOTA_TURNS:
        return 1u << KV_QUOTA_TURN;
    case KV_QUOTA_BYTES_POOL:
        return 1u << KV_QUOTA_WINDOW | 1u << KV_QUOTA_SESSION;
    case KV_QUOTA_BYTES_SSD:
    case KV_QUOTA_BYTES_HBM:
        return 1u << KV_QUOTA_SESSION; /* A turn's rows stay in the next one. */
    case KV_QUOTA_REQUESTS_PER_S:
    case KV_QUOTA_TOKENS_PER_S:
    case KV_QUOTA_SAVES:
    case KV_QUOTA_PINS:
    case KV_QUOTA_COUNT:
        break;
    }
    return 0; /* Time does. */
}
