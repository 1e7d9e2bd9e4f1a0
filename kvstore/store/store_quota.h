#pragma once

/*
 * Plans, and what users have of their own.  Owned by the shard, like the store.
 */

#include "kvstore/store/store.h"

#define KV_PLAN_DEFAULT "default"

struct kv_plan_entry {
    char name[KV_PLAN_NAME_MAX + 1];
    struct kv_quota quota;
    bool is_recorded; /* False: the default plan as it is configured. */
};
struct kv_quota_entry {
    struct kv_user_id id;
    char name[KV_USER_NAME_MAX + 1];
    char plan[KV_PLAN_NAME_MAX + 1]; /* "": the default one. */
    struct kv_quota_own own;
};

/* What a user may have now. */
struct kv_quota kv_store_quota(const struct kv_store *store, const struct kv_user_id *user);
/* How long rows of his sessions live that have no ttl of their own: what the quota says, or
 * ssd.ttl. */
uint64_t kv_store_quota_ttl_ms(const struct kv_store *store, const struct kv_quota *quota);
/* Sessions without a ttl of their own may be recorded as such. */
bool kv_store_records_plan_ttl(const struct kv_store *store);
/* NULL: he has nothing of his own.  Valid until the next apply, like the next three. */
const struct kv_quota_entry *kv_store_quota_own(const struct kv_store *store,
                                                const struct kv_user_id *user);
const struct kv_plan_entry *kv_store_plan(const struct kv_store *store, const char *name);
/* NULL: behind the last one. */
const struct kv_plan_entry *kv_store_plan_at(const struct kv_store *store, uint32_t index);
const struct kv_quota_entry *kv_store_quota_at(const struct kv_store *store, uint32_t index);

enum kv_quota_change_kind {
    KV_QUOTA_CHANGE_PLAN,    /* plan is new or another now. */
    KV_QUOTA_CHANGE_NO_PLAN, /* plan.name is gone; the default one is as configured. */
    KV_QUOTA_CHANGE_USER,    /* user likewise. */
    KV_QUOTA_CHANGE_NO_USER, /* user.id has nothing of its own. */
};
struct kv_quota_change {
    enum kv_quota_change_kind kind;
    struct kv_plan_entry plan;
    struct kv_quota_entry user;
};
/* KV_BUSY: KV_QUOTA_USERS_MAX or KV_PLANS_MAX are there.  NULL: not asked about. */
kv_status kv_store_quota_room(struct kv_store *store, const struct kv_user_id *user,
                              const char *plan) KV_MUST_CHECK;
/* Its record; it counts when kv_store_quota_apply() is called, which is when that is durable. */
kv_status kv_batch_quota(struct kv_batch *batch, struct kv_store *store,
                         const struct kv_quota_change *change, struct kv_error *err) KV_MUST_CHECK;
void kv_store_quota_apply(struct kv_store *store, const struct kv_quota_change *change);
