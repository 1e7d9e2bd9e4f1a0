/*
 * Quotas: limits, admission, victims.
 *
 * Every sum is taken so that it cannot overflow: what a client or an operator says may be as large
 * as a number can be.
 */

#include "kvstore/plan/quota.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

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
    case KV_QUOTA_BYTES_SSD:
        return 1u << KV_QUOTA_SESSION; /* A turn's rows stay in the next one. */
    case KV_QUOTA_REQUESTS_PER_S:
    case KV_QUOTA_TOKENS_PER_S:
    case KV_QUOTA_SAVES:
    case KV_QUOTA_TTL_MS:
    case KV_QUOTA_COUNT:
        break;
    }
    return 0; /* Time does. */
}
