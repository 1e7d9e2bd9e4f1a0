/*
 * The calls of quotas: set, show, delete; plans; who has how much.
 *
 * A change is recorded first and counts from the moment it is durable, when the call is answered.
 * What a lower limit makes too much goes when room is next needed; --dry-run says what that is.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what a user has ---- */

struct kv_quota quota_of(const struct shard *shard, const struct kv_user *user)
{
    return kv_store_quota(shard->store, &user->id);
}

uint64_t quota_used(const struct shard *shard, const struct kv_user *user, enum kv_quota_kind kind)
{
    if (user == NULL) return 0;
    switch (kind) {
    case KV_QUOTA_SESSIONS:
        return user->mains;
    case KV_QUOTA_BYTES_SSD:
        return (uint64_t)user->pages * shard->layout->page_bytes;
    case KV_QUOTA_SAVES:
        return quota_saves(shard, user);
    default:
        return 0; /* Of a session, or of a second. */
    }
}

static struct request_quota *quota_alloc(struct flow *flow)
{
    struct request_quota *out = kv_arena_alloc(flow->req->arena, sizeof(*out));
    if (out == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        return NULL;
    }
    *out = (struct request_quota){.plan = KV_PLAN_DEFAULT};
    flow->req->out.quota = out;
    return out;
}

static void fill_limits(struct flow *flow, const struct kv_user *user,
                        const struct kv_quota_entry *own, struct request_quota *out)
{
    static const struct kv_quota_own nothing = {0};
    const struct kv_plan_entry *plan =
        kv_store_plan(flow->shard->store, own == NULL ? "" : own->plan);
    const struct kv_quota_own *set = own == NULL ? &nothing : &own->own;
    out->quota = kv_quota_merge(&plan->quota, set);
    out->ttl_ms = kv_store_quota_ttl_ms(flow->shard->store, &out->quota);
    out->own = set->set;
    out->plan = kv_arena_strdup(flow->req->arena, plan->name, strlen(plan->name));
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++)
        out->used[i] = quota_used(flow->shard, user, (enum kv_quota_kind)i);
    if (out->plan == NULL) flow_fail_status(flow, KV_NOMEM);
}

/* The user's sessions, best victim first; at most KV_QUOTA_NEXT_MAX are told.  Names come later. */
static void fill_next(struct flow *flow, const struct kv_user *user, struct request_quota *out)
{
    struct kv_quota_victim list[KV_QUOTA_NEXT_MAX + 1];
    const struct kv_session_entry *entry = NULL;
    uint32_t bucket = 0, count = 0;
    const struct kv_index *index = flow->shard->store->index;
    const uint64_t now_ms = kv_store_now_ms(flow->shard->store);
    while (user != NULL && (entry = kv_index_entry_next(index, &bucket, entry)) != NULL) {
        struct kv_session shape;
        if (entry->user != user) continue;
        const struct kv_session *session = kv_index_look(entry, &shape);
        if (session->deleting) continue;
        const struct kv_quota_victim victim = quota_victim(session);
        uint32_t at = count;
        while (at > 0 && kv_quota_victim_before(&victim, &list[at - 1]))
            at--;
        if (at == KV_QUOTA_NEXT_MAX) continue;
        memmove(&list[at + 1], &list[at], sizeof(list[0]) * (count - at));
        list[at] = victim;
        count = KV_MIN(count + 1, KV_QUOTA_NEXT_MAX);
    }
    for (uint32_t i = 0; i < count; i++) {
        entry = kv_index_entry_find(index, &list[i].session);
        const uint64_t idle_ms = now_ms > list[i].used_ms ? now_ms - list[i].used_ms : 0;
        out->next[i] = (struct request_quota_next){
            .id = list[i].session,
            .is_held = list[i].is_held,
            .would_go = !list[i].is_held && entry->ttl_ms == 0 && idle_ms > out->ttl_ms,
            .idle_ms = idle_ms,
            .bytes = (uint64_t)entry->pages * flow->shard->layout->page_bytes,
        };
        out->next_count++;
    }
}

static void next_named(struct flow *flow)
{
    struct request_quota *out = flow->req->out.quota;
    for (uint32_t i = 0; i < out->next_count; i++)
        out->next[i].session = flow->names[i].name;
    flow_finish(flow);
}

/* The last step of a call that tells what goes next. */
static void finish_named(struct flow *flow)
{
    struct request_quota *out = flow->req->out.quota;
    flow->names = kv_arena_alloc(flow->req->arena, sizeof(*flow->names) * (KV_QUOTA_NEXT_MAX + 1u));
    if (flow->names == NULL) flow_fail_status(flow, KV_NOMEM);
    if (flow->failed) {
        flow_finish(flow);
        return;
    }
    for (uint32_t i = 0; i < out->next_count; i++)
        flow->names[i] = (struct session_name){.id = out->next[i].id};
    names_read(flow, flow->names, out->next_count, next_named);
}

/* Whether a change of that user, or of that plan, changes how long the session lives. */
static bool ttl_is_of(const struct shard *shard, const struct kv_session_entry *entry,
                      const struct kv_user *user, const char *plan)
{
    if (entry->ttl_ms != 0 || user != NULL) return entry->ttl_ms == 0 && entry->user == user;
    const struct kv_quota_entry *own = kv_store_quota_own(shard->store, &entry->user->id);
    const struct kv_plan_entry *his = kv_store_plan(shard->store, own == NULL ? "" : own->plan);
    const bool has_own = own != NULL && (own->own.set & 1u << KV_QUOTA_TTL_MS) != 0;
    return !has_own && his != NULL && strcmp(his->name, plan) == 0;
}

/* Sessions whose checkpoints go because nobody used them for out->ttl_ms.  A user, or a plan. */
static void fill_expired(struct flow *flow, const struct kv_user *user, const char *plan,
                         struct request_quota *out)
{
    const struct kv_session_entry *entry = NULL;
    uint32_t bucket = 0;
    const struct kv_index *index = flow->shard->store->index;
    const uint64_t now_ms = kv_store_now_ms(flow->shard->store);
    while ((entry = kv_index_entry_next(index, &bucket, entry)) != NULL)
        if (now_ms > entry->used_ms && now_ms - entry->used_ms > out->ttl_ms &&
            entry->recorded_nodes > 0 && ttl_is_of(flow->shard, entry, user, plan))
            out->expired++;
}

/* How many sessions, from the first of `next`, a lower limit would take. */
static void fill_would(struct flow *flow, const struct kv_user *user, struct request_quota *out)
{
    uint64_t sessions = quota_used(flow->shard, user, KV_QUOTA_SESSIONS);
    uint64_t bytes = quota_used(flow->shard, user, KV_QUOTA_BYTES_SSD);
    for (uint32_t i = 0; i < out->next_count && !out->next[i].is_held; i++) {
        if (kv_quota_over(&out->quota, KV_QUOTA_SESSIONS, sessions) == 0 &&
            kv_quota_over(&out->quota, KV_QUOTA_BYTES_SSD, bytes) == 0)
            break;
        out->next[i].would_go = true;
        if (sessions > 0) sessions--;
        bytes -= KV_MIN(bytes, out->next[i].bytes);
    }
}

/* ---- changes ---- */

struct quota_job {
    struct flow *flow;
    struct kv_quota_change change;
};

static void fill_user(struct flow *flow, const struct kv_quota_entry *entry)
{
    struct request_quota *out = flow->req->out.quota;
    const struct kv_user *user =
        kv_index_user_find(flow->shard->store->index, &flow->req->in.u.quota.user);
    fill_limits(flow, user, entry, out);
    out->found =
        user != NULL || kv_store_quota_own(flow->shard->store, &flow->req->in.u.quota.user) != NULL;
    fill_next(flow, user, out);
    fill_would(flow, user, out);
    if (user != NULL) fill_expired(flow, user, NULL, out);
}

static void changed(void *context, kv_status status)
{
    struct quota_job *job = context;
    struct flow *flow = job->flow;
    struct shard *shard = flow->shard;
    if (status != KV_OK) {
        flow_fail(flow, shard_unrecorded(shard, status), "manifest", NULL, NULL);
    } else {
        kv_store_quota_apply(shard->store, &job->change);
        kv_log(shard->options.log, KV_LOG_INFO, "quota_changed", "kind=%d", (int)job->change.kind);
        if (flow->req->method == REQUEST_SET_QUOTA)
            fill_user(flow, kv_store_quota_own(shard->store, &flow->req->in.u.quota.user));
    }
    free(job);
    if (flow->failed || flow->req->method != REQUEST_SET_QUOTA)
        flow_finish(flow);
    else
        finish_named(flow);
}

static void change_post(struct flow *flow, const struct kv_quota_change *change)
{
    struct kv_store *store = flow->shard->store;
    struct kv_error err = {0};
    struct quota_job *job = malloc(sizeof(*job));
    struct kv_batch *batch = kv_batch_create(store);
    kv_status status = job == NULL || batch == NULL ? KV_NOMEM : KV_OK;
    if (status == KV_OK) {
        *job = (struct quota_job){.flow = flow, .change = *change};
        status = kv_batch_quota(batch, store, change, &err);
    }
    if (status == KV_OK) {
        kv_batch_post(batch, changed, job);
        return;
    }
    kv_batch_discard(batch);
    free(job);
    if (status == KV_IO)
        flow_fail(flow, shard_unwritten(&err), "superblock", NULL, NULL);
    else
        flow_fail_status(flow, status);
    flow_finish(flow);
}

/* What is said takes the place of what was; false (and failed): a plan that is not there. */
static bool change_user(struct flow *flow, struct kv_quota_entry *entry)
{
    const struct request_in *in = &flow->req->in;
    const struct kv_quota_entry *known = kv_store_quota_own(flow->shard->store, &in->u.quota.user);
    if (known != NULL) *entry = *known;
    entry->id = in->u.quota.user;
    (void)snprintf(entry->name, sizeof(entry->name), "%s", in->u.quota.name);
    if (in->u.quota.plan[0] != '\0') {
        if (kv_store_plan(flow->shard->store, in->u.quota.plan) == NULL) {
            flow_fail(flow, KV_REASON_PLAN_NOT_FOUND, "plan", NULL, in->u.quota.plan);
            return false;
        }
        const bool is_default = strcmp(in->u.quota.plan, KV_PLAN_DEFAULT) == 0;
        (void)snprintf(entry->plan, sizeof(entry->plan), "%s", is_default ? "" : in->u.quota.plan);
    }
    entry->own.set |= in->u.quota.set;
    entry->own.set &= ~in->u.quota.unset;
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        if ((in->u.quota.set & 1u << i) != 0) entry->own.quota.limits[i] = in->u.quota.limits[i];
        if ((entry->own.set & 1u << i) == 0) entry->own.quota.limits[i] = 0;
    }
    return true;
}

void flow_set_quota(struct flow *flow)
{
    struct kv_quota_change change = {.kind = KV_QUOTA_CHANGE_USER};
    const struct request_in *in = &flow->req->in;
    struct request_quota *out = quota_alloc(flow);
    if (out == NULL || !change_user(flow, &change.user)) {
        flow_finish(flow);
        return;
    }
    if (kv_store_quota_room(flow->shard->store, &in->u.quota.user, NULL) != KV_OK) {
        flow_fail(flow, KV_REASON_QUOTAS_FULL, "user", request_u64(flow->req, KV_QUOTA_USERS_MAX),
                  in->u.quota.name);
        flow_finish(flow);
        return;
    }
    if (in->u.quota.dry_run) {
        fill_user(flow, &change.user);
        finish_named(flow);
        return;
    }
    change_post(flow, &change);
}

void flow_get_quota(struct flow *flow)
{
    struct request *req = flow->req;
    if (!req->is_ops && !kv_id_equal(req->in.u.quota.user.bytes, req->user.bytes))
        flow_fail(flow, KV_REASON_ROLE_DENIED, "user", "ops", "harness");
    else if (quota_alloc(flow) != NULL)
        fill_user(flow, kv_store_quota_own(flow->shard->store, &req->in.u.quota.user));
    if (flow->failed)
        flow_finish(flow);
    else
        finish_named(flow);
}

void flow_delete_quota(struct flow *flow)
{
    struct kv_quota_change change = {.kind = KV_QUOTA_CHANGE_NO_USER};
    change.user.id = flow->req->in.u.quota.user;
    struct request_quota *out = quota_alloc(flow);
    const bool known = kv_store_quota_own(flow->shard->store, &change.user.id) != NULL;
    if (out != NULL) out->found = known;
    if (out == NULL || !known || flow->req->in.u.quota.dry_run) {
        flow_finish(flow);
        return;
    }
    change_post(flow, &change);
}

/* ---- plans ---- */

static uint32_t users_of(const struct shard *shard, const char *plan)
{
    const struct kv_quota_entry *entry;
    uint32_t count = 0;
    for (uint32_t i = 0; (entry = kv_store_quota_at(shard->store, i)) != NULL; i++)
        count += strcmp(entry->plan, plan) == 0;
    return count;
}

void flow_set_plan(struct flow *flow)
{
    struct request *req = flow->req;
    const struct request_in *in = &req->in;
    struct kv_store *store = flow->shard->store;
    struct kv_quota_change change = {.kind = in->u.quota.remove ? KV_QUOTA_CHANGE_NO_PLAN
                                                                : KV_QUOTA_CHANGE_PLAN};
    const struct kv_plan_entry *known = kv_store_plan(store, in->u.quota.plan);
    struct request_quota *out = quota_alloc(flow);
    if (out == NULL) {
        flow_finish(flow);
        return;
    }
    change.plan = (struct kv_plan_entry){.quota = kv_quota_unlimited(), .is_recorded = true};
    if (known != NULL) change.plan.quota = known->quota;
    (void)snprintf(change.plan.name, sizeof(change.plan.name), "%s", in->u.quota.plan);
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        if ((in->u.quota.set & 1u << i) != 0) change.plan.quota.limits[i] = in->u.quota.limits[i];
        if ((in->u.quota.unset & 1u << i) != 0) change.plan.quota.limits[i] = KV_QUOTA_UNLIMITED;
    }
    out->found = known != NULL && known->is_recorded;
    out->plan = in->u.quota.plan;
    out->quota = change.plan.quota;
    out->ttl_ms = kv_store_quota_ttl_ms(store, &out->quota);
    const uint32_t users = users_of(flow->shard, in->u.quota.plan);
    if (in->u.quota.remove && users > 0)
        flow_fail(flow, KV_REASON_PLAN_IN_USE, "plan", "0", request_u64(req, users));
    else if (in->u.quota.remove && known == NULL)
        flow_fail(flow, KV_REASON_PLAN_NOT_FOUND, "plan", NULL, in->u.quota.plan);
    else if (!in->u.quota.remove && kv_store_quota_room(store, NULL, in->u.quota.plan) != KV_OK)
        flow_fail(flow, KV_REASON_QUOTAS_FULL, "plan", request_u64(req, KV_PLANS_MAX),
                  in->u.quota.plan);
    if (!in->u.quota.remove) fill_expired(flow, NULL, in->u.quota.plan, out);
    if (flow->failed || in->u.quota.dry_run || (in->u.quota.remove && !known->is_recorded)) {
        flow_finish(flow);
        return;
    }
    change_post(flow, &change);
}

void flow_list_plans(struct flow *flow)
{
    struct request *req = flow->req;
    const struct kv_plan_entry *plan;
    struct request_plan *list = kv_arena_alloc(req->arena, sizeof(*list) * KV_PLANS_MAX);
    if (list == NULL) flow_fail_status(flow, KV_NOMEM);
    for (uint32_t i = 0; list != NULL && (plan = kv_store_plan_at(flow->shard->store, i)) != NULL;
         i++) {
        const bool is_default = strcmp(plan->name, KV_PLAN_DEFAULT) == 0;
        list[i] = (struct request_plan){
            .name = kv_arena_strdup(req->arena, plan->name, strlen(plan->name)),
            .quota = plan->quota,
            .ttl_ms = kv_store_quota_ttl_ms(flow->shard->store, &plan->quota),
            .users = users_of(flow->shard, is_default ? "" : plan->name),
            .is_configured = !plan->is_recorded,
        };
        if (list[i].name == NULL) break;
        req->out.plan_count++;
    }
    req->out.plans = list;
    flow_finish(flow);
}

/* ---- users ---- */

static int compare_rows(const void *a, const void *b)
{
    return memcmp(((const struct request_user_row *)a)->id.bytes,
                  ((const struct request_user_row *)b)->id.bytes, 16);
}

/* Whether the name is of a user that has sessions. */
static bool add_row(struct flow *flow, struct request_user_row *row, const struct kv_user_id *id,
                    const char *name, const struct kv_user *user)
{
    const struct kv_quota_entry *own = kv_store_quota_own(flow->shard->store, id);
    const struct kv_quota quota = kv_store_quota(flow->shard->store, id);
    const struct kv_plan_entry *plan =
        kv_store_plan(flow->shard->store, own == NULL ? "" : own->plan);
    *row = (struct request_user_row){
        .id = *id,
        .name = kv_arena_strdup(flow->req->arena, name, strlen(name)),
        .plan = kv_arena_strdup(flow->req->arena, plan->name, strlen(plan->name)),
        .has_own = own != NULL && own->own.set != 0,
        .sessions = quota_used(flow->shard, user, KV_QUOTA_SESSIONS),
        .sessions_limit = quota.limits[KV_QUOTA_SESSIONS],
        .bytes = quota_used(flow->shard, user, KV_QUOTA_BYTES_SSD),
        .bytes_limit = quota.limits[KV_QUOTA_BYTES_SSD],
    };
    return row->name != NULL && row->plan != NULL;
}

/* All of them sorted by id, then one page: users are few beside sessions. */
void flow_list_users(struct flow *flow)
{
    struct request *req = flow->req;
    struct kv_store *store = flow->shard->store;
    const struct request_in *in = &req->in;
    const struct kv_quota_entry *own;
    struct kv_user *user = NULL;
    uint32_t bucket = 0, count = 0;
    const uint32_t most = kv_index_usage(store->index).users + KV_QUOTA_USERS_MAX;
    struct request_user_row *rows = malloc(sizeof(*rows) * KV_MAX(most, 1u));
    bool good = rows != NULL;
    while (good && (user = kv_index_user_next(store->index, &bucket, user)) != NULL)
        if (!in->u.list.has_after || memcmp(user->id.bytes, in->u.list.after.bytes, 16) > 0)
            good = add_row(flow, &rows[count++], &user->id, user->name, user);
    for (uint32_t i = 0; good && (own = kv_store_quota_at(store, i)) != NULL; i++)
        if (kv_index_user_find(store->index, &own->id) == NULL &&
            (!in->u.list.has_after || memcmp(own->id.bytes, in->u.list.after.bytes, 16) > 0))
            good = add_row(flow, &rows[count++], &own->id, own->name, NULL);
    if (good && count > 0) qsort(rows, count, sizeof(*rows), compare_rows);
    req->out.user_count = KV_MIN(count, in->u.list.page_size);
    req->out.users = kv_arena_alloc(req->arena, sizeof(*rows) * (req->out.user_count + 1u));
    if (!good || req->out.users == NULL) {
        req->out.user_count = 0;
        flow_fail_status(flow, KV_NOMEM);
    } else if (req->out.user_count > 0) {
        memcpy(req->out.users, rows, sizeof(*rows) * req->out.user_count);
        req->out.list_more = count > req->out.user_count;
        memcpy(req->out.list_last.bytes, rows[req->out.user_count - 1].id.bytes, 16);
    }
    free(rows);
    flow_finish(flow);
}
