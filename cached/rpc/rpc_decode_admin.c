/*
 * Messages of the calls of operators, checked field by field.
 */

#include "cached/rpc/rpc_decode_internal.h"

#include "admin.pb-c.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static bool decode_stats(struct rpc_decoder *d)
{
    return rpc_unpack(d, &cached__admin__v1__get_stats_request__descriptor) != NULL;
}

static bool decode_clock(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__AdvanceClockRequest *m =
        rpc_unpack(d, &cached__admin__v1__advance_clock_request__descriptor);
    if (m == NULL) return false;
    if (m->ms == 0 || m->ms > KV_CLOCK_STEP_MS_MAX) {
        request_fail(req, KV_REASON_CLOCK_STEP_INVALID, "ms", "1 to 31536000000",
                     request_u64(req, m->ms), NULL);
        return false;
    }
    req->in.u.advance.ms = m->ms;
    return true;
}

static bool decode_scrub(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__ScrubRequest *m =
        rpc_unpack(d, &cached__admin__v1__scrub_request__descriptor);
    if (m == NULL) return false;
    if ((int)m->action < SCRUB_STATUS || (int)m->action > SCRUB_RELEASE) {
        request_fail(req, KV_REASON_SCRUB_INVALID, "action", "1 to 4",
                     request_u64(req, (uint32_t)m->action), NULL);
        return false;
    }
    const bool is_start = (int)m->action == SCRUB_START;
    const bool in_range = m->rate_bytes >= KV_SCRUB_RATE_MIN && m->rate_bytes <= KV_SCRUB_RATE_MAX;
    if (m->rate_bytes != 0 && !(is_start && in_range)) {
        request_fail(req, KV_REASON_SCRUB_INVALID, "rate_bytes",
                     is_start ? "1048576 to 68719476736" : "0", request_u64(req, m->rate_bytes),
                     NULL);
        return false;
    }
    req->in.u.scrub.action = (enum request_scrub_action)m->action;
    req->in.u.scrub.rate_bytes = m->rate_bytes;
    return true;
}

/* A name as the token file may have it. */
static bool take_user(struct request *req, const char *name)
{
    const size_t count = strlen(name);
    const size_t good =
        strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    if (count >= 1 && count <= KV_USER_NAME_MAX && good == count) return true;
    request_fail(req, KV_REASON_USER_INVALID, "user", "1 to 64 of [A-Za-z0-9._-]",
                 request_u64(req, count), NULL);
    return false;
}

static bool decode_usage(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__DiskUsageRequest *m =
        rpc_unpack(d, &cached__admin__v1__disk_usage_request__descriptor);
    if (m == NULL) return false;
    req->in.u.usage.has_user = m->user[0] != '\0';
    if (req->in.u.usage.has_user && !take_user(req, m->user)) return false;
    req->in.u.usage.user_name = m->user;
    if (req->in.u.usage.has_user) req->in.u.usage.user = kv_user_id_of(m->user);
    return rpc_take_page_token(req, m->page_token, &req->in.u.usage.has_after,
                               &req->in.u.usage.after);
}

static bool decode_erase(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__EraseUserRequest *m =
        rpc_unpack(d, &cached__admin__v1__erase_user_request__descriptor);
    if (m == NULL || !take_user(req, m->user)) return false;
    req->in.u.remove.user = kv_user_id_of(m->user);
    req->in.u.remove.user_name = m->user;
    req->in.u.remove.dry_run = m->dry_run;
    return true;
}

static bool decode_rotate(struct rpc_decoder *d)
{
    return rpc_unpack(d, &cached__admin__v1__rotate_key_request__descriptor) != NULL;
}

static bool decode_why(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__WhyRequest *m =
        rpc_unpack(d, &cached__admin__v1__why_request__descriptor);
    if (m == NULL || !take_user(req, m->user)) return false;
    if (!rpc_check_name(req, "session_id", m->session_id)) return false;
    req->in.u.why.user = kv_user_id_of(m->user);
    req->in.session_name = m->session_id;
    req->in.session = kv_session_id_of(&req->in.u.why.user, m->session_id);
    req->in.u.why.has_position = m->has_position;
    req->in.u.why.position = m->position;
    const uint32_t max = m->has_position ? KV_PROMPT_TOKENS_MAX - 1 : 0;
    return rpc_check_max(req, KV_REASON_POSITION_INVALID, "position", m->position, max);
}

static bool decode_purge(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__PurgeModelRequest *m =
        rpc_unpack(d, &cached__admin__v1__purge_model_request__descriptor);
    if (m == NULL) return false;
    const size_t count = strlen(m->model);
    const bool is_other = strcmp(m->model, "other") == 0;
    if (!is_other && (count < 8 || count > 64 || strspn(m->model, "0123456789abcdef") != count)) {
        request_fail(req, KV_REASON_MODEL_INVALID, "model", "8 to 64 of [0-9a-f], or other",
                     request_u64(req, count), NULL);
        return false;
    }
    req->in.u.purge.digits = is_other ? "" : m->model;
    req->in.u.purge.digit_count = is_other ? 0 : (uint32_t)count;
    req->in.u.purge.dry_run = m->dry_run;
    return true;
}

/* Each limit once, in its range, or none of it. */
static bool take_limits(struct request *req, Cached__Admin__V1__SetLimit **limits, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const Cached__Admin__V1__SetLimit *m = limits[i];
        enum kv_quota_kind kind;
        const bool known = kv_quota_find(m->name, &kind);
        const uint32_t bit = known ? 1u << kind : 0;
        if (!known || ((req->in.u.quota.set | req->in.u.quota.unset) & bit) != 0) {
            request_fail(req, KV_REASON_QUOTA_INVALID, "limits.name",
                         "sessions, turns, bytes_ssd, requests_per_s, tokens_per_s, saves, ttl_ms; "
                         "once",
                         m->name, NULL);
            return false;
        }
        const bool has_value = !m->unlimited && !m->remove;
        if ((m->unlimited && m->remove) || (!has_value && m->limit != 0) ||
            (has_value && (m->limit == KV_QUOTA_UNLIMITED || !kv_quota_is_valid(kind, m->limit)))) {
            char range[64];
            const int used = snprintf(range, sizeof(range), "%llu to %llu, or none",
                                      (unsigned long long)kv_quota_least(kind),
                                      (unsigned long long)kv_quota_most(kind));
            request_fail(req, KV_REASON_QUOTA_INVALID, m->name,
                         kv_arena_strdup(req->arena, range, (size_t)used),
                         request_u64(req, m->limit), NULL);
            return false;
        }
        if (m->remove)
            req->in.u.quota.unset |= bit;
        else
            req->in.u.quota.set |= bit;
        req->in.u.quota.limits[kind] = m->unlimited ? KV_QUOTA_UNLIMITED : m->limit;
    }
    return true;
}

static bool take_plan(struct request *req, const char *field, const char *name)
{
    const size_t count = strlen(name);
    const size_t good =
        strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    req->in.u.quota.plan = name;
    if (count >= 1 && count <= KV_PLAN_NAME_MAX && good == count) return true;
    request_fail(req, KV_REASON_PLAN_INVALID, field, "1 to 64 of [A-Za-z0-9._-]",
                 request_u64(req, count), NULL);
    return false;
}

static bool take_quota_user(struct request *req, const char *name)
{
    if (!take_user(req, name)) return false;
    req->in.u.quota.user = kv_user_id_of(name);
    req->in.u.quota.name = name;
    req->in.u.quota.plan = "";
    return true;
}

static bool decode_set_quota(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__SetQuotaRequest *m =
        rpc_unpack(d, &cached__admin__v1__set_quota_request__descriptor);
    if (m == NULL || !take_quota_user(req, m->user)) return false;
    if (m->plan[0] != '\0' && !take_plan(req, "plan", m->plan)) return false;
    req->in.u.quota.dry_run = m->dry_run;
    return take_limits(req, m->limits, m->n_limits);
}

static bool decode_get_quota(struct rpc_decoder *d)
{
    const Cached__Admin__V1__GetQuotaRequest *m =
        rpc_unpack(d, &cached__admin__v1__get_quota_request__descriptor);
    return m != NULL && take_quota_user(d->req, m->user);
}

static bool decode_delete_quota(struct rpc_decoder *d)
{
    const Cached__Admin__V1__DeleteQuotaRequest *m =
        rpc_unpack(d, &cached__admin__v1__delete_quota_request__descriptor);
    if (m == NULL || !take_quota_user(d->req, m->user)) return false;
    d->req->in.u.quota.dry_run = m->dry_run;
    return true;
}

static bool decode_set_plan(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__SetPlanRequest *m =
        rpc_unpack(d, &cached__admin__v1__set_plan_request__descriptor);
    if (m == NULL || !take_plan(req, "name", m->name)) return false;
    req->in.u.quota.dry_run = m->dry_run;
    req->in.u.quota.remove = m->remove;
    return take_limits(req, m->limits, m->n_limits);
}

static bool decode_list_plans(struct rpc_decoder *d)
{
    return rpc_unpack(d, &cached__admin__v1__list_plans_request__descriptor) != NULL;
}

static bool decode_list_users(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__ListUsersRequest *m =
        rpc_unpack(d, &cached__admin__v1__list_users_request__descriptor);
    if (m == NULL || !rpc_check_max(req, KV_REASON_PAGE_SIZE_INVALID, "page_size", m->page_size,
                                    KV_USAGE_ROWS_MAX))
        return false;
    req->in.u.list.page_size = m->page_size == 0 ? LIST_PAGE_DEFAULT : m->page_size;
    return rpc_take_page_token(req, m->page_token, &req->in.u.list.has_after,
                               &req->in.u.list.after);
}

rpc_decode_fn *rpc_decode_admin(enum request_method method)
{
    static rpc_decode_fn *const decoders[REQUEST_METHOD_COUNT] = {
        [REQUEST_GET_STATS] = decode_stats,
        [REQUEST_ADVANCE_CLOCK] = decode_clock,
        [REQUEST_SCRUB] = decode_scrub,
        [REQUEST_DISK_USAGE] = decode_usage,
        [REQUEST_ERASE_USER] = decode_erase,
        [REQUEST_ROTATE_KEY] = decode_rotate,
        [REQUEST_WHY] = decode_why,
        [REQUEST_PURGE_MODEL] = decode_purge,
        [REQUEST_SET_QUOTA] = decode_set_quota,
        [REQUEST_GET_QUOTA] = decode_get_quota,
        [REQUEST_DELETE_QUOTA] = decode_delete_quota,
        [REQUEST_SET_PLAN] = decode_set_plan,
        [REQUEST_LIST_PLANS] = decode_list_plans,
        [REQUEST_LIST_USERS] = decode_list_users,
    };
    assert(method < REQUEST_METHOD_COUNT);
    return decoders[method];
}
