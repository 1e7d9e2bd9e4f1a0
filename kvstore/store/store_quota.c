/*
 * Plans and users' own limits: in memory as a whole, recorded when they change.
 *
 * A change counts from the moment its record is durable, so that what was acknowledged holds over a
 * crash and what was not never limited anybody.  The default plan is the configuration's until a
 * record of its name takes its place.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(KV_RECORD_QUOTA_LIMITS == KV_QUOTA_COUNT, "a record holds every limit");

struct kv_quotas {
    struct kv_plan_entry plans[KV_PLANS_MAX];
    uint32_t plan_count;
    struct kv_quota_entry *users; /* Sorted by id. */
    uint32_t user_count, user_capacity;
};

static const struct kv_plan_entry *plan_find(const struct kv_quotas *quotas, const char *name)
{
    for (uint32_t i = 0; i < quotas->plan_count; i++)
        if (strcmp(quotas->plans[i].name, name) == 0) return &quotas->plans[i];
    return NULL;
}

/* Where the user is, or belongs. */
static uint32_t user_at(const struct kv_quotas *quotas, const struct kv_user_id *user)
{
    uint32_t low = 0, high = quotas->user_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (memcmp(quotas->users[middle].id.bytes, user->bytes, sizeof(user->bytes)) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const struct kv_quota_entry *kv_store_quota_own(const struct kv_store *store,
                                                const struct kv_user_id *user)
{
    const struct kv_quotas *quotas = store->quotas;
    const uint32_t at = user_at(quotas, user);
    if (at == quotas->user_count || !kv_id_equal(quotas->users[at].id.bytes, user->bytes))
        return NULL;
    return &quotas->users[at];
}

const struct kv_plan_entry *kv_store_plan(const struct kv_store *store, const char *name)
{
    return plan_find(store->quotas, name[0] == '\0' ? KV_PLAN_DEFAULT : name);
}

const struct kv_plan_entry *kv_store_plan_at(const struct kv_store *store, uint32_t index)
{
    return index < store->quotas->plan_count ? &store->quotas->plans[index] : NULL;
}

const struct kv_quota_entry *kv_store_quota_at(const struct kv_store *store, uint32_t index)
{
    return index < store->quotas->user_count ? &store->quotas->users[index] : NULL;
}

struct kv_quota kv_store_quota(const struct kv_store *store, const struct kv_user_id *user)
{
    static const struct kv_quota_own nothing = {0};
    const struct kv_quota_entry *own = kv_store_quota_own(store, user);
    const struct kv_plan_entry *plan = kv_store_plan(store, own == NULL ? "" : own->plan);
    /* A plan that is gone is refused while somebody has it. */
    if (plan == NULL) plan = kv_store_plan(store, "");
    return kv_quota_merge(&plan->quota, own == NULL ? &nothing : &own->own);
}

uint64_t kv_store_quota_ttl_ms(const struct kv_store *store, const struct kv_quota *quota)
{
    const uint64_t ttl_ms = quota->limits[KV_QUOTA_TTL_MS];
    return ttl_ms == KV_QUOTA_UNLIMITED ? store->options.rows_ttl_ms : ttl_ms;
}

bool kv_store_records_plan_ttl(const struct kv_store *store)
{
    return (store->options.superblock.features & KV_FEATURE_PLAN_TTL) != 0;
}

/* Ages are judged by what stands with the user, so that no lookup has to search for a plan. */
static void settle_ttls(struct kv_store *store)
{
    struct kv_user *user = NULL;
    uint32_t bucket = 0;
    while ((user = kv_index_user_next(store->index, &bucket, user)) != NULL) {
        const struct kv_quota quota = kv_store_quota(store, &user->id);
        user->ttl_ms = kv_store_quota_ttl_ms(store, &quota);
        store->life_max_ms = KV_MAX(store->life_max_ms, user->ttl_ms);
    }
}

/* ---- changes, in memory ---- */

static kv_status plan_put(struct kv_quotas *quotas, const struct kv_plan_entry *plan)
{
    struct kv_plan_entry *known = (struct kv_plan_entry *)(uintptr_t)plan_find(quotas, plan->name);
    if (known != NULL) {
        *known = *plan;
        return KV_OK;
    }
    if (quotas->plan_count == KV_PLANS_MAX) return KV_BUSY;
    quotas->plans[quotas->plan_count++] = *plan;
    return KV_OK;
}

static kv_status user_put(struct kv_quotas *quotas, const struct kv_quota_entry *entry)
{
    const uint32_t at = user_at(quotas, &entry->id);
    if (at < quotas->user_count && kv_id_equal(quotas->users[at].id.bytes, entry->id.bytes)) {
        quotas->users[at] = *entry;
        return KV_OK;
    }
    if (quotas->user_count == KV_QUOTA_USERS_MAX) return KV_BUSY;
    if (quotas->user_count == quotas->user_capacity) {
        const uint32_t capacity = KV_MAX(2 * quotas->user_capacity, 64u);
        struct kv_quota_entry *users = realloc(quotas->users, capacity * sizeof(*users));
        if (users == NULL) return KV_NOMEM;
        quotas->users = users;
        quotas->user_capacity = capacity;
    }
    memmove(&quotas->users[at + 1], &quotas->users[at],
            sizeof(*quotas->users) * (quotas->user_count - at));
    quotas->users[at] = *entry;
    quotas->user_count++;
    return KV_OK;
}

/* The default plan is as it is configured then. */
static void plan_drop(struct kv_store *store, const char *name)
{
    struct kv_quotas *quotas = store->quotas;
    struct kv_plan_entry *plan = (struct kv_plan_entry *)(uintptr_t)plan_find(quotas, name);
    if (plan == NULL) return;
    if (strcmp(name, KV_PLAN_DEFAULT) == 0)
        *plan = (struct kv_plan_entry){.name = KV_PLAN_DEFAULT, .quota = store->options.quota};
    else
        *plan = quotas->plans[--quotas->plan_count];
}

kv_status kv_store_quota_room(struct kv_store *store, const struct kv_user_id *user,
                              const char *plan)
{
    const struct kv_quotas *quotas = store->quotas;
    if (user != NULL && kv_store_quota_own(store, user) == NULL &&
        quotas->user_count == KV_QUOTA_USERS_MAX)
        return KV_BUSY;
    if (plan != NULL && plan_find(quotas, plan) == NULL && quotas->plan_count == KV_PLANS_MAX)
        return KV_BUSY;
    return KV_OK;
}

void kv_store_quota_apply(struct kv_store *store, const struct kv_quota_change *change)
{
    struct kv_quotas *quotas = store->quotas;
    kv_status status = KV_OK;
    if (change->kind == KV_QUOTA_CHANGE_PLAN) {
        status = plan_put(quotas, &change->plan);
    } else if (change->kind == KV_QUOTA_CHANGE_NO_PLAN) {
        plan_drop(store, change->plan.name);
    } else if (change->kind == KV_QUOTA_CHANGE_USER) {
        status = user_put(quotas, &change->user);
    } else {
        const uint32_t at = user_at(quotas, &change->user.id);
        if (at < quotas->user_count &&
            kv_id_equal(quotas->users[at].id.bytes, change->user.id.bytes)) {
            quotas->user_count--;
            memmove(&quotas->users[at], &quotas->users[at + 1],
                    sizeof(*quotas->users) * (quotas->user_count - at));
        }
    }
    if (status != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "quota_not_in_memory",
               "status=%s text=\"it counts from the next start\"", kv_status_name(status));
    settle_ttls(store);
}

/* ---- changes, recorded ---- */

static kv_status set_feature(struct kv_store *store, struct kv_error *err)
{
    struct kv_store_options *options = &store->options;
    if ((options->superblock.features & KV_FEATURE_QUOTAS) != 0) return KV_OK;
    return kv_directory_add_feature(options->disk, options->dir, KV_FEATURE_QUOTAS,
                                    &options->superblock, err);
}

kv_status kv_batch_quota(struct kv_batch *batch, struct kv_store *store,
                         const struct kv_quota_change *change, struct kv_error *err)
{
    uint8_t key[KV_KEY_QUOTA_MAX], value[KV_RECORD_QUOTA_MAX];
    struct kv_manifest_put put = {.key = key};
    const bool is_plan =
        change->kind == KV_QUOTA_CHANGE_PLAN || change->kind == KV_QUOTA_CHANGE_NO_PLAN;
    put.key_bytes =
        is_plan ? kv_key_plan(change->plan.name, key) : kv_key_quota(&change->user.id, key);
    if (change->kind == KV_QUOTA_CHANGE_PLAN) {
        struct kv_record_plan record = {0};
        (void)snprintf(record.name, sizeof(record.name), "%s", change->plan.name);
        memcpy(record.limits, change->plan.quota.limits, sizeof(record.limits));
        put.value_bytes = kv_record_plan_encode(&record, value);
    } else if (change->kind == KV_QUOTA_CHANGE_USER) {
        struct kv_record_quota record = {.set = change->user.own.set};
        (void)snprintf(record.user, sizeof(record.user), "%s", change->user.name);
        (void)snprintf(record.plan, sizeof(record.plan), "%s", change->user.plan);
        for (uint32_t i = 0; i < KV_QUOTA_COUNT; i++)
            if ((record.set & 1u << i) != 0) record.limits[i] = change->user.own.quota.limits[i];
        put.value_bytes = kv_record_quota_encode(&record, value);
    }
    if (put.value_bytes > 0) put.value = value;
    const kv_status status = set_feature(store, err);
    return status == KV_OK ? kv_batch_put(batch, &put) : status;
}

/* ---- start ---- */

/* An older build would take such a session for one that lives for no time at all. */
static void plan_ttl_feature(struct kv_store *store)
{
    struct kv_store_options *options = &store->options;
    struct kv_error err = {0};
    if (kv_store_records_plan_ttl(store)) return;
    if (kv_directory_add_feature(options->disk, options->dir, KV_FEATURE_PLAN_TTL,
                                 &options->superblock, &err) != KV_OK)
        kv_log(options->log, KV_LOG_WARN, "plan_ttl_not_kept",
               "cause=\"%s\" text=\"sessions opened without a ttl keep the one of their plan as it "
               "is then\"",
               err.text);
}

static kv_status visit_plan(void *context, const struct kv_manifest_put *put)
{
    struct kv_store *store = context;
    struct kv_record_plan record;
    struct kv_plan_entry plan = {.is_recorded = true};
    if (kv_record_plan_decode(put->value, put->value_bytes, &record) != KV_OK) {
        kv_log(store->options.log, KV_LOG_ERROR, "record_damaged", "kind=plan");
        return KV_OK;
    }
    memcpy(plan.name, record.name, sizeof(plan.name));
    memcpy(plan.quota.limits, record.limits, sizeof(plan.quota.limits));
    return plan_put(store->quotas, &plan) == KV_NOMEM ? KV_NOMEM : KV_OK;
}

static kv_status visit_user(void *context, const struct kv_manifest_put *put)
{
    struct kv_store *store = context;
    struct kv_record_quota record;
    struct kv_quota_entry entry = {0};
    if (kv_record_quota_decode(put->value, put->value_bytes, &record) != KV_OK) {
        kv_log(store->options.log, KV_LOG_ERROR, "record_damaged", "kind=quota");
        return KV_OK;
    }
    entry.id = kv_user_id_of(record.user);
    memcpy(entry.name, record.user, sizeof(entry.name));
    memcpy(entry.plan, record.plan, sizeof(entry.plan));
    entry.own.set = record.set;
    memcpy(entry.own.quota.limits, record.limits, sizeof(entry.own.quota.limits));
    return user_put(store->quotas, &entry) == KV_NOMEM ? KV_NOMEM : KV_OK;
}

kv_status kv_store_quota_open(struct kv_store *store, struct kv_error *err)
{
    struct kv_plan_entry plan = {.name = KV_PLAN_DEFAULT, .quota = store->options.quota};
    store->quotas = calloc(1, sizeof(*store->quotas));
    if (store->quotas == NULL) return KV_FAIL(err, KV_NOMEM, "make the table of quotas");
    if (plan_put(store->quotas, &plan) != KV_OK) return KV_FAIL(err, KV_NOMEM, "default plan");
    plan_ttl_feature(store);
    settle_ttls(store);
    if ((store->options.superblock.features & KV_FEATURE_QUOTAS) == 0) return KV_OK;
    kv_status status =
        kv_manifest_scan_now(store->manifest, (const uint8_t *)"Y", 1, visit_plan, store, err);
    if (status == KV_OK)
        status =
            kv_manifest_scan_now(store->manifest, (const uint8_t *)"B", 1, visit_user, store, err);
    settle_ttls(store);
    return status == KV_NOMEM ? KV_FAIL(err, KV_NOMEM, "read quotas") : status;
}

void kv_store_quota_close(struct kv_store *store)
{
    if (store->quotas == NULL) return;
    free(store->quotas->users);
    free(store->quotas);
}
