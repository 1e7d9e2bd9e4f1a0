/*
 * Answers of the calls of quotas.
 */

#include "cached/rpc/rpc_encode.h"

#include "admin.pb-c.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

typedef Cached__Admin__V1__QuotaLimit pb_limit;
typedef Cached__Admin__V1__QuotaNext pb_next;

#define FILL(message, init)                                                                        \
    do {                                                                                           \
        if ((message) == NULL) return NULL;                                                        \
        *(message) = (__typeof__(*(message)))init;                                                 \
    } while (0)

static char *text(const char *value)
{
    return (char *)(uintptr_t)(value == NULL ? "" : value);
}

static uint64_t or_zero(uint64_t limit)
{
    return limit == KV_QUOTA_UNLIMITED ? 0 : limit;
}

/* KV_QUOTA_COUNT of them.  ttl_ms: what counts where the quota has none. */
static pb_limit **limits(struct kv_arena *arena, const struct kv_quota *quota, uint64_t ttl_ms,
                         uint32_t own, const uint64_t *used)
{
    pb_limit **list = kv_arena_alloc(arena, KV_QUOTA_COUNT * sizeof(*list));
    pb_limit *items = kv_arena_alloc(arena, KV_QUOTA_COUNT * sizeof(*items));
    if (list == NULL || items == NULL) return NULL;
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        cached__admin__v1__quota_limit__init(&items[i]);
        items[i].name = text(kv_quota_name((enum kv_quota_kind)i));
        items[i].limit = or_zero(quota->limits[i]);
        items[i].unlimited = quota->limits[i] == KV_QUOTA_UNLIMITED;
        items[i].own = (own & 1u << i) != 0;
        items[i].used = used == NULL ? 0 : used[i];
        list[i] = &items[i];
    }
    items[KV_QUOTA_TTL_MS].limit = ttl_ms;
    return list;
}

static pb_next **next(struct kv_arena *arena, const struct request_quota *quota)
{
    pb_next **list = kv_arena_alloc(arena, (KV_QUOTA_NEXT_MAX + 1) * sizeof(*list));
    pb_next *items = kv_arena_alloc(arena, (KV_QUOTA_NEXT_MAX + 1) * sizeof(*items));
    if (list == NULL || items == NULL) return NULL;
    for (uint32_t i = 0; i < quota->next_count; i++) {
        cached__admin__v1__quota_next__init(&items[i]);
        items[i].session_id = text(quota->next[i].session);
        items[i].idle_ms = quota->next[i].idle_ms;
        items[i].bytes = quota->next[i].bytes;
        items[i].in_use = quota->next[i].is_held;
        items[i].over = quota->next[i].would_go;
        list[i] = &items[i];
    }
    return list;
}

static const ProtobufCMessage *encode_set(struct request *req)
{
    const struct request_quota *quota = req->out.quota;
    Cached__Admin__V1__SetQuotaResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__SET_QUOTA_RESPONSE__INIT);
    m->plan = text(quota->plan);
    m->n_limits = KV_QUOTA_COUNT;
    m->limits = limits(req->arena, &quota->quota, quota->ttl_ms, quota->own, quota->used);
    m->n_next = quota->next_count;
    m->next = next(req->arena, quota);
    m->expired_sessions = quota->expired;
    return m->limits == NULL || m->next == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_get(struct request *req)
{
    const struct request_quota *quota = req->out.quota;
    Cached__Admin__V1__GetQuotaResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__GET_QUOTA_RESPONSE__INIT);
    m->plan = text(quota->plan);
    m->found = quota->found;
    m->n_limits = KV_QUOTA_COUNT;
    m->limits = limits(req->arena, &quota->quota, quota->ttl_ms, quota->own, quota->used);
    m->n_next = quota->next_count;
    m->next = next(req->arena, quota);
    return m->limits == NULL || m->next == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_delete(struct request *req)
{
    Cached__Admin__V1__DeleteQuotaResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__DELETE_QUOTA_RESPONSE__INIT);
    m->found = req->out.quota->found;
    return &m->base;
}

static const ProtobufCMessage *encode_plan(struct request *req)
{
    Cached__Admin__V1__SetPlanResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__SET_PLAN_RESPONSE__INIT);
    m->found = req->out.quota->found;
    m->n_limits = KV_QUOTA_COUNT;
    m->limits = limits(req->arena, &req->out.quota->quota, req->out.quota->ttl_ms, 0, NULL);
    m->expired_sessions = req->out.quota->expired;
    return m->limits == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_plans(struct request *req)
{
    const uint32_t count = req->out.plan_count;
    Cached__Admin__V1__ListPlansResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__LIST_PLANS_RESPONSE__INIT);
    Cached__Admin__V1__Plan *items = kv_arena_alloc(req->arena, (count + 1u) * sizeof(*items));
    m->plans = kv_arena_alloc(req->arena, (count + 1u) * sizeof(*m->plans));
    if (items == NULL || m->plans == NULL) return NULL;
    for (uint32_t i = 0; i < count; i++) {
        const struct request_plan *plan = &req->out.plans[i];
        cached__admin__v1__plan__init(&items[i]);
        items[i].name = text(plan->name);
        items[i].users = plan->users;
        items[i].configured = plan->is_configured;
        items[i].n_limits = KV_QUOTA_COUNT;
        items[i].limits = limits(req->arena, &plan->quota, plan->ttl_ms, 0, NULL);
        if (items[i].limits == NULL) return NULL;
        m->plans[i] = &items[i];
    }
    m->n_plans = count;
    return &m->base;
}

static const ProtobufCMessage *encode_users(struct request *req)
{
    const uint32_t count = req->out.user_count;
    Cached__Admin__V1__ListUsersResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__LIST_USERS_RESPONSE__INIT);
    Cached__Admin__V1__UserInfo *items = kv_arena_alloc(req->arena, (count + 1u) * sizeof(*items));
    m->users = kv_arena_alloc(req->arena, (count + 1u) * sizeof(*m->users));
    if (items == NULL || m->users == NULL) return NULL;
    for (uint32_t i = 0; i < count; i++) {
        const struct request_user_row *row = &req->out.users[i];
        cached__admin__v1__user_info__init(&items[i]);
        items[i].user = text(row->name);
        items[i].plan = text(row->plan);
        items[i].own = row->has_own;
        items[i].sessions = row->sessions;
        items[i].sessions_limit = or_zero(row->sessions_limit);
        items[i].bytes_ssd = row->bytes;
        items[i].bytes_ssd_limit = or_zero(row->bytes_limit);
        m->users[i] = &items[i];
    }
    m->n_users = count;
    if (!req->out.list_more) return &m->base;
    m->next_page_token = rpc_page_token(req->arena, &req->out.list_last);
    return m->next_page_token == NULL ? NULL : &m->base;
}

const ProtobufCMessage *rpc_encode_quota(struct request *req)
{
    switch (req->method) {
    case REQUEST_SET_QUOTA:
        return encode_set(req);
    case REQUEST_GET_QUOTA:
        return encode_get(req);
    case REQUEST_DELETE_QUOTA:
        return encode_delete(req);
    case REQUEST_SET_PLAN:
        return encode_plan(req);
    case REQUEST_LIST_PLANS:
        return encode_plans(req);
    default:
        assert(req->method == REQUEST_LIST_USERS);
        return encode_users(req);
    }
}
