/*
 * Start-up, when pages that records name cannot be had: their file is gone or was cut.
 *
 * The records go before the store serves anything: the place of a lost page is free, will be given
 * to somebody else, and no old record may then still claim it.  Checkpoints that list a lost page
 * go with it, and so do those below them when their tree is loaded.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/store_internal.h"

#include <stdlib.h>
#include <string.h>

struct lost_key {
    uint8_t bytes[KV_RECORD_KEY_MAX];
    uint32_t count;
};

struct lost {
    struct kv_store *store;
    uint64_t *uids; /* Of pages that cannot be had, sorted before nodes are looked at. */
    uint32_t uid_count, uid_capacity;
    struct lost_key *keys; /* Records to delete. */
    uint32_t key_count, key_capacity;
    uint64_t nodes;
};

static kv_status lost_add(struct lost *lost, const struct kv_manifest_put *put)
{
    if (lost->key_count == lost->key_capacity) {
        const uint32_t capacity = lost->key_capacity == 0 ? 64 : 2 * lost->key_capacity;
        struct lost_key *keys = realloc(lost->keys, capacity * sizeof(*keys));
        if (keys == NULL) return KV_NOMEM;
        lost->keys = keys;
        lost->key_capacity = capacity;
    }
    struct lost_key *key = &lost->keys[lost->key_count];
    if (put->key_bytes > sizeof(key->bytes)) return KV_OK; /* Not one of ours. */
    memcpy(key->bytes, put->key, put->key_bytes);
    key->count = put->key_bytes;
    lost->key_count++;
    return KV_OK;
}

static uint64_t uid_of_key(const struct kv_manifest_put *put)
{
    uint64_t uid = 0;
    for (uint32_t i = 0; i < 8; i++)
        uid = uid << 8 | put->key[18 + i];
    return uid;
}

/* Claims the place of every page; the first record of a place has it. */
static kv_status visit_pages(void *context, const struct kv_manifest_put *put)
{
    struct lost *lost = context;
    struct kv_store *store = lost->store;
    struct kv_record_page page;
    if (put->key_bytes < 26 || put->key[17] != 'P') return KV_OK;
    if (kv_record_page_decode(put->value, put->value_bytes, &page) == KV_OK &&
        kv_ssd_claim(store->ssd, page.ssd_page) == KV_OK) {
        store->recovery.pages++;
        store->recovery.bytes += store->layout.page_bytes;
        return KV_OK;
    }
    store->counters.missing_pages++;
    if (lost->uid_count == lost->uid_capacity) {
        const uint32_t capacity = lost->uid_capacity == 0 ? 64 : 2 * lost->uid_capacity;
        uint64_t *uids = realloc(lost->uids, capacity * sizeof(*uids));
        if (uids == NULL) return KV_NOMEM;
        lost->uids = uids;
        lost->uid_capacity = capacity;
    }
    lost->uids[lost->uid_count++] = uid_of_key(put);
    return lost_add(lost, put);
}

static int compare_uids(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static kv_status visit_nodes(void *context, const struct kv_manifest_put *put)
{
    struct lost *lost = context;
    struct kv_record_node node;
    if (put->key_bytes < 18 || put->key[17] != 'N') return KV_OK;
    bool bad = kv_record_node_decode(put->value, put->value_bytes, &node) != KV_OK;
    for (uint32_t i = 0; !bad && i < node.page_count && lost->uid_count > 0; i++) {
        const uint64_t uid = kv_load64(node.page_uids + 8u * i);
        bad = bsearch(&uid, lost->uids, lost->uid_count, sizeof(uid), compare_uids) != NULL;
    }
    if (!bad) {
        lost->store->recovery.checkpoints++;
        return KV_OK;
    }
    lost->nodes++;
    return lost_add(lost, put);
}

static kv_status delete_keys(struct lost *lost, struct kv_error *err)
{
    struct kv_manifest_put *puts = calloc(KV_MAX(lost->key_count, 1u), sizeof(*puts));
    if (puts == NULL) return KV_FAIL(err, KV_NOMEM, "drop %u records", lost->key_count);
    for (uint32_t i = 0; i < lost->key_count; i++)
        puts[i] =
            (struct kv_manifest_put){.key = lost->keys[i].bytes, .key_bytes = lost->keys[i].count};
    const kv_status status = kv_store_commit_now(lost->store, puts, lost->key_count, err);
    free(puts);
    return status;
}

kv_status kv_store_recover_trees(struct kv_store *store, struct kv_error *err)
{
    struct lost lost = {.store = store};
    const uint8_t *prefix = (const uint8_t *)"T";
    kv_status status = kv_manifest_scan_now(store->manifest, prefix, 1, visit_pages, &lost, err);
    if (status == KV_OK) {
        if (lost.uid_count > 0) qsort(lost.uids, lost.uid_count, sizeof(*lost.uids), compare_uids);
        status = kv_manifest_scan_now(store->manifest, prefix, 1, visit_nodes, &lost, err);
    }
    if (status == KV_OK && lost.key_count > 0) status = delete_keys(&lost, err);
    store->recovery.dropped = lost.nodes;
    free(lost.uids);
    free(lost.keys);
    return status;
}
