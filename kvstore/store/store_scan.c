/*
 * Start-up, when the trees have to be read: segment records are not there yet or cannot be relied
 * on, or pages that records name cannot be had, because their file is gone or was cut.
 *
 * What goes does so before the store serves anything: the place of a lost page is free, will be
 * given to somebody else, and no old record may then still claim it.  Checkpoints that list a lost
 * page go with it, and so do those below them when their tree is loaded.
 *
 * Two passes over the trees, pages first.  Keys begin with session ids, which are hashes: how far a
 * pass has come is read from the key.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/store_internal.h"

#include <stdlib.h>
#include <string.h>

#define TELL_EVERY 1024u /* Records. */

struct scan {
    struct kv_store *store;
    struct kv_batch *batch; /* What puts the records right. */
    struct kv_error *err;
    uint64_t *uids; /* Of pages that cannot be had, sorted before nodes are looked at. */
    uint32_t uid_count, uid_capacity;
    struct kv_history history; /* Of history_of; its record comes before those of nodes. */
    struct kv_session_id history_of;
    bool has_history, history_changed;
    uint32_t *found;  /* Checkpoints of each session, by its number in the index. */
    uint64_t used_ms; /* Latest of all. */
    uint64_t seen;
    uint32_t pass; /* 0, 1 */
};

static void tell(struct scan *scan, const struct kv_manifest_put *put)
{
    if (scan->seen++ % TELL_EVERY != 0 || put->key_bytes < 3) return;
    const uint32_t at = (uint32_t)put->key[1] << 8 | put->key[2];
    kv_store_tell_progress(scan->store, "reading trees",
                           50 * scan->pass + (uint32_t)((uint64_t)at * 50 / 65536));
}

static kv_status drop(struct scan *scan, const struct kv_manifest_put *put)
{
    const struct kv_manifest_put gone = {.key = put->key, .key_bytes = put->key_bytes};
    const kv_status status = kv_batch_put(scan->batch, &gone);
    return status == KV_OK ? KV_OK : KV_FAIL(scan->err, status, "drop a record");
}

static uint64_t uid_of_key(const struct kv_manifest_put *put)
{
    uint64_t uid = 0;
    for (uint32_t i = 0; i < 8; i++)
        uid = uid << 8 | put->key[18 + i];
    return uid;
}

/* Claims the place of every page; the first record of a place has it. */
static kv_status visit_page(void *context, const struct kv_manifest_put *put)
{
    struct scan *scan = context;
    struct kv_store *store = scan->store;
    struct kv_record_page page;
    tell(scan, put);
    if (put->key_bytes < 26 || put->key[17] != 'P') return KV_OK;
    if (kv_record_page_decode(put->value, put->value_bytes, &page) == KV_OK &&
        kv_ssd_claim(store->ssd, page.ssd_page) == KV_OK) {
        kv_segments_set(store->segments, page.ssd_page, true);
        store->recovery.pages++;
        return KV_OK;
    }
    store->counters.missing_pages++;
    store->recovery.dropped_pages++;
    if (scan->uid_count == scan->uid_capacity) {
        const uint32_t capacity = scan->uid_capacity == 0 ? 64 : 2 * scan->uid_capacity;
        uint64_t *uids = realloc(scan->uids, capacity * sizeof(*uids));
        if (uids == NULL) return KV_FAIL(scan->err, KV_NOMEM, "note lost pages");
        scan->uids = uids;
        scan->uid_capacity = capacity;
    }
    scan->uids[scan->uid_count++] = uid_of_key(put);
    return drop(scan, put);
}

static int compare_uids(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static bool lists_lost(const struct scan *scan, const struct kv_record_node *node)
{
    for (uint32_t i = 0; i < node->page_count && scan->uid_count > 0; i++) {
        const uint64_t uid = kv_load64(node->page_uids + 8u * i);
        if (bsearch(&uid, scan->uids, scan->uid_count, sizeof(uid), compare_uids) != NULL)
            return true;
    }
    return false;
}

/* NULL: no session has a head in the tree.  A maker without a record left it to another one. */
static const struct kv_session_entry *maker_of(const struct scan *scan,
                                               const struct kv_manifest_put *put,
                                               const struct kv_record_node *node)
{
    const struct kv_index *index = scan->store->index;
    struct kv_session_id tree;
    memcpy(tree.bytes, put->key + 1, sizeof(tree.bytes));
    const struct kv_session_id *id = node->has_maker ? &node->maker : &tree;
    const struct kv_session_entry *maker = kv_index_entry_find(index, id);
    if (maker != NULL && kv_id_equal(kv_index_tree_id(maker)->bytes, tree.bytes)) return maker;
    return kv_index_tree_entry(index, &tree);
}

/* What the history of the last session became. */
static kv_status history_end(struct scan *scan)
{
    kv_status status = KV_OK;
    if (scan->history_changed)
        status = kv_batch_history(scan->batch, &scan->history_of, &scan->history);
    scan->history_changed = scan->has_history = false;
    return status == KV_OK ? KV_OK : KV_FAIL(scan->err, status, "record what was dropped");
}

/* Makes the history the one of this record's session, empty if it has none. */
static kv_status history_begin(struct scan *scan, const struct kv_manifest_put *put)
{
    if (scan->has_history && kv_id_equal(scan->history_of.bytes, put->key + 1)) return KV_OK;
    const kv_status status = history_end(scan);
    scan->history = (struct kv_history){0};
    memcpy(scan->history_of.bytes, put->key + 1, sizeof(scan->history_of.bytes));
    scan->has_history = true;
    return status;
}

static kv_status visit_history(struct scan *scan, const struct kv_manifest_put *put)
{
    struct kv_history history;
    const kv_status status = history_begin(scan, put);
    if (status != KV_OK) return status;
    if (kv_record_history_decode(put->value, put->value_bytes, &history) != KV_OK)
        return drop(scan, put);
    scan->history = history;
    return KV_OK;
}

/* A checkpoint whose page is gone. */
static kv_status note_lost(struct scan *scan, const struct kv_manifest_put *put,
                           const struct kv_record_node *node)
{
    const uint32_t last = kv_pages_for(node->tokens);
    const struct kv_removal removal = {
        .cause = KV_REASON_CORRUPT,
        .part = KV_REMOVED_ROWS,
        .from = (last - KV_MIN(last, node->page_count)) * KV_PAGE_TOKENS,
        .to = node->tokens,
        .checkpoints = 1,
        .removed_ms = kv_store_now_ms(scan->store),
    };
    if ((scan->store->options.superblock.features & KV_FEATURE_HISTORY) == 0) return KV_OK;
    const kv_status status = history_begin(scan, put);
    if (status != KV_OK || removal.from >= removal.to) return status;
    kv_history_add(&scan->history, &removal, &node->id);
    scan->history_changed = true;
    return KV_OK;
}

static kv_status visit_node(void *context, const struct kv_manifest_put *put)
{
    struct scan *scan = context;
    struct kv_store_recovery *recovery = &scan->store->recovery;
    struct kv_record_node node;
    tell(scan, put);
    if (put->key_bytes == KV_KEY_HISTORY_BYTES && put->key[17] == 'H')
        return visit_history(scan, put);
    if (put->key_bytes < 18 || put->key[17] != 'N') return KV_OK;
    if (kv_record_node_decode(put->value, put->value_bytes, &node) != KV_OK) {
        recovery->dropped_damaged++;
        return drop(scan, put);
    }
    if (lists_lost(scan, &node)) {
        recovery->dropped_lost++;
        const kv_status status = note_lost(scan, put, &node);
        return status == KV_OK ? drop(scan, put) : status;
    }
    scan->used_ms = KV_MAX(scan->used_ms, node.used_ms);
    const struct kv_session_entry *maker = maker_of(scan, put, &node);
    if (maker == NULL)
        recovery->dropped_orphans++; /* Not deleted: nobody knows whose it is. */
    else
        scan->found[kv_index_entry_number(scan->store->index, maker)]++;
    return KV_OK;
}

struct recount {
    struct scan *scan;
    uint32_t found;
};

/* The record as it is, but for the number of checkpoints. */
static kv_status visit_counted(void *context, const struct kv_manifest_put *put)
{
    const struct recount *recount = context;
    struct kv_record_session record;
    uint8_t value[KV_RECORD_SESSION_MAX];
    if (kv_record_session_decode(put->value, put->value_bytes, &record) != KV_OK) return KV_CORRUPT;
    record.checkpoints = recount->found;
    const struct kv_manifest_put counted = {.key = put->key,
                                            .key_bytes = put->key_bytes,
                                            .value = value,
                                            .value_bytes =
                                                kv_record_session_encode(&record, value)};
    return kv_batch_put(recount->scan->batch, &counted);
}

/* Sessions whose record says another number of checkpoints than there are. */
static kv_status count_sessions(struct scan *scan)
{
    struct kv_store *store = scan->store;
    struct kv_session_entry *entry = NULL;
    uint32_t bucket = 0;
    kv_status status = KV_OK;
    while ((entry = kv_index_entry_next(store->index, &bucket, entry)) != NULL) {
        struct recount recount = {.scan = scan,
                                  .found = scan->found[kv_index_entry_number(store->index, entry)]};
        uint8_t key[KV_RECORD_KEY_MAX];
        store->recovery.checkpoints += recount.found;
        if (recount.found == entry->recorded_nodes) continue;
        entry->recorded_nodes = recount.found;
        if (status == KV_OK)
            status = kv_manifest_scan_now(store->manifest, key, kv_key_session(&entry->id, key),
                                          visit_counted, &recount, scan->err);
    }
    return status == KV_OK ? KV_OK : KV_FAIL(scan->err, status, "count checkpoints");
}

static kv_status record_segments(struct scan *scan)
{
    struct kv_store *store = scan->store;
    kv_status status = KV_OK;
    for (uint32_t i = 0; status == KV_OK && i < kv_store_segment_count(store); i++) {
        if (kv_store_segment(store, i).pages_used == 0) continue;
        (void)kv_segments_touch(store->segments, i, scan->used_ms);
        status = kv_batch_segment(scan->batch, i);
    }
    return status == KV_OK ? KV_OK : KV_FAIL(scan->err, status, "record segments");
}

kv_status kv_store_scan_trees(struct kv_store *store, struct kv_batch *batch, struct kv_error *err)
{
    static kv_manifest_visit_fn *const visits[] = {visit_page, visit_node};
    const uint32_t sessions = kv_index_usage(store->index).sessions;
    struct scan scan = {.store = store, .batch = batch, .err = err};
    kv_status status = KV_OK;
    scan.found = calloc(KV_MAX(sessions, 1u), sizeof(*scan.found));
    if (scan.found == NULL) return KV_FAIL(err, KV_NOMEM, "count the checkpoints of sessions");
    for (; status == KV_OK && scan.pass < KV_ARRAY_COUNT(visits); scan.pass++) {
        if (scan.uid_count > 0) qsort(scan.uids, scan.uid_count, sizeof(*scan.uids), compare_uids);
        status = kv_manifest_scan_now(store->manifest, (const uint8_t *)"T", 1, visits[scan.pass],
                                      &scan, err);
    }
    if (status == KV_OK) status = history_end(&scan);
    if (status == KV_OK) status = count_sessions(&scan);
    if (status == KV_OK) status = record_segments(&scan);
    free(scan.uids);
    free(scan.found);
    return status;
}
