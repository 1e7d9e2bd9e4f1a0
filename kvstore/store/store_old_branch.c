/*
 * Branches that a compaction left, and when they go.
 *
 * All of them are in memory, because each is to go in time whether its session is used or not;
 * there are few, and an entry is 48 B.  A record stands for each, so the time outlives a restart.
 * An entry whose record is lost lives until its checkpoints expire, like any branch.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Else, as where a record is lost: the superblock could not be told of such records. */
static bool is_recorded(const struct kv_store *store)
{
    return (store->options.superblock.features & KV_FEATURE_HISTORY) != 0;
}

static kv_status remember(struct kv_store *store, const struct kv_record_old_branch *record)
{
    if (store->old_branch_count == store->old_branch_capacity) {
        const uint32_t capacity = KV_MAX(16u, 2 * store->old_branch_capacity);
        struct kv_record_old_branch *more = realloc(store->old_branches, capacity * sizeof(*more));
        if (more == NULL) return KV_NOMEM;
        store->old_branches = more;
        store->old_branch_capacity = capacity;
    }
    store->old_branches[store->old_branch_count++] = *record;
    return KV_OK;
}

static void forget(struct kv_store *store, uint32_t at)
{
    assert(at < store->old_branch_count);
    store->old_branches[at] = store->old_branches[--store->old_branch_count];
}

static kv_status batch_delete(struct kv_batch *batch, const struct kv_record_old_branch *record)
{
    uint8_t key[KV_KEY_OLD_BRANCH_BYTES];
    const struct kv_manifest_put put = {.key = key, .key_bytes = kv_key_old_branch(record, key)};
    return kv_batch_put(batch, &put);
}

kv_status kv_batch_old_branch(struct kv_batch *batch, struct kv_store *store,
                              const struct kv_record_old_branch *record)
{
    uint8_t key[KV_KEY_OLD_BRANCH_BYTES], value[KV_RECORD_OLD_BRANCH_BYTES];
    const struct kv_manifest_put put = {
        .key = key,
        .key_bytes = kv_key_old_branch(record, key),
        .value = value,
        .value_bytes = kv_record_old_branch_encode(record, value),
    };
    for (uint32_t i = 0; i < store->old_branch_count; i++) {
        struct kv_record_old_branch *old = &store->old_branches[i];
        if (!kv_id_equal(old->session.bytes, record->session.bytes) ||
            !kv_id_equal(old->end.bytes, record->end.bytes))
            continue;
        *old = *record; /* Left once more: the newer time holds. */
        return is_recorded(store) ? kv_batch_put(batch, &put) : KV_OK;
    }
    if (store->old_branch_count >= KV_OLD_BRANCHES_MAX) return KV_BUSY;
    kv_status status = KV_OK;
    if (is_recorded(store)) status = kv_batch_put(batch, &put);
    return status == KV_OK ? remember(store, record) : status;
}

void kv_store_old_branch_gone(struct kv_store *store, uint32_t at)
{
    struct kv_batch *dead = kv_store_dead_batch(store);
    if (dead == NULL || batch_delete(dead, &store->old_branches[at]) != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=old_branch");
    forget(store, at);
}

kv_status kv_batch_delete_old_branches(struct kv_batch *batch, struct kv_store *store,
                                       const struct kv_session_id *session)
{
    for (uint32_t i = store->old_branch_count; i-- > 0;) {
        if (!kv_id_equal(store->old_branches[i].session.bytes, session->bytes)) continue;
        const kv_status status = batch_delete(batch, &store->old_branches[i]);
        if (status != KV_OK) return status;
        forget(store, i);
    }
    return KV_OK;
}

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct kv_store *store = context;
    struct kv_record_old_branch record;
    if (kv_record_old_branch_decode(put->key, put->key_bytes, put->value, put->value_bytes,
                                    &record) == KV_OK)
        return remember(store, &record);
    kv_log(store->options.log, KV_LOG_ERROR, "record_damaged",
           "kind=old_branch text=\"a branch that was left lives until it expires\"");
    struct kv_batch *dead = kv_store_dead_batch(store);
    const struct kv_manifest_put gone = {.key = put->key, .key_bytes = put->key_bytes};
    if (dead == NULL || kv_batch_put(dead, &gone) != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=old_branch");
    return KV_OK;
}

kv_status kv_store_recover_old_branches(struct kv_store *store, struct kv_error *err)
{
    const kv_status status =
        kv_manifest_scan_now(store->manifest, (const uint8_t *)"L", 1, visit, store, err);
    if (status == KV_NOMEM) return KV_FAIL(err, KV_NOMEM, "read which branches were left");
    return status;
}
