/*
 * Start-up: which places are in use, and how many checkpoints there are.
 *
 * Both stand in few records: the segments' have a bit for each page that a record names, the
 * sessions' the number of their checkpoints, and each of them is in the batch of every change.  So
 * a start reads no tree, and takes as long as sessions and segments are many.
 *
 * The trees are read (store_scan.c) when the directory is of a build that had no segment records,
 * when one of them is damaged or in doubt, and when a page in use is not there any more: its file
 * is gone or was cut.  Afterwards the records are right, and what they say is served from.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>

void kv_store_tell_progress(const struct kv_store *store, const char *phase, uint32_t percent)
{
    if (store->options.progress != NULL)
        store->options.progress(store->options.progress_context, phase, percent);
}

struct reading {
    struct kv_store *store;
    struct kv_batch *batch; /* Collects deletions; NULL: only looks. */
    const char *doubt;      /* Why the trees are to be read; NULL: they need not. */
};

static kv_status visit_segment(void *context, const struct kv_manifest_put *put)
{
    struct reading *reading = context;
    uint32_t number;
    if (reading->batch != NULL) {
        const struct kv_manifest_put gone = {.key = put->key, .key_bytes = put->key_bytes};
        return kv_batch_put(reading->batch, &gone);
    }
    if (!kv_key_segment_parse(put->key, put->key_bytes, &number)) {
        reading->doubt = "records did not fit together";
        return KV_OK;
    }
    const kv_status status =
        kv_segments_decode(reading->store->segments, number, put->value, put->value_bytes);
    if (status == KV_CORRUPT) reading->doubt = "a segment record is damaged";
    if (status == KV_MISS) reading->doubt = "a segment file is gone";
    return KV_OK;
}

static kv_status read_segments(struct reading *reading, struct kv_error *err)
{
    return kv_manifest_scan_now(reading->store->manifest, (const uint8_t *)"G", 1, visit_segment,
                                reading, err);
}

/* Nothing is claimed when there is a reason not to. */
static void claim_segments(struct reading *reading)
{
    struct kv_store *store = reading->store;
    const uint32_t pages = kv_store_segment_pages(store);
    for (int claim = 0; claim < 2 && reading->doubt == NULL; claim++) {
        for (uint32_t i = 0; i < kv_store_segment_count(store); i++) {
            if (kv_store_segment(store, i).pages_used == 0) continue;
            for (uint32_t page = i * pages; page < (i + 1) * pages; page++) {
                if (!kv_store_segment_recorded(store, page)) continue;
                if (claim == 0 && !kv_ssd_present(store->ssd, page))
                    reading->doubt = "a segment file is gone or was cut";
                if (claim == 0 && kv_ssd_quarantined(store->ssd, page))
                    reading->doubt = "a page in use is quarantined";
                if (claim == 0) continue;
                const kv_status status = kv_ssd_claim(store->ssd, page);
                assert(status == KV_OK);
                store->recovery.pages++;
            }
        }
    }
}

static void sum_sessions(struct kv_store *store)
{
    const struct kv_session_entry *entry = NULL;
    uint32_t bucket = 0;
    while ((entry = kv_index_entry_next(store->index, &bucket, entry)) != NULL)
        store->recovery.checkpoints += entry->recorded_nodes;
}

/* Reads the trees and writes what follows from them. */
static kv_status count_again(struct kv_store *store, struct kv_error *err)
{
    struct reading reading = {.store = store, .batch = kv_batch_create(store)};
    if (reading.batch == NULL) return KV_FAIL(err, KV_NOMEM, "read all trees");
    kv_segments_clear(store->segments);
    kv_status status = read_segments(&reading, err);
    if (status == KV_OK) status = kv_store_scan_trees(store, reading.batch, err);
    if (status != KV_OK) {
        kv_batch_discard(reading.batch);
        return status;
    }
    return kv_batch_commit_now(reading.batch, err);
}

/* The records are durable, so the directory may say that it has them.  If that fails the next start
 * reads the trees again, and nothing else is lost. */
static void mark_directory(struct kv_store *store)
{
    struct kv_store_options *options = &store->options;
    struct kv_error err = {0};
    if ((options->superblock.features & KV_FEATURE_SEGMENTS) != 0) return;
    const kv_status status = kv_directory_add_feature(
        options->disk, options->dir, KV_FEATURE_SEGMENTS, &options->superblock, &err);
    if (status != KV_OK)
        kv_log(options->log, KV_LOG_WARN, "segments_unmarked",
               "text=\"%s: the next start reads all trees again\"", err.text);
}

kv_status kv_store_recover(struct kv_store *store, struct kv_error *err)
{
    struct kv_store_recovery *recovery = &store->recovery;
    struct reading reading = {.store = store};
    kv_status status = KV_OK;
    if ((store->options.superblock.features & KV_FEATURE_SEGMENTS) == 0)
        reading.doubt = "an older build wrote the directory";
    else
        status = read_segments(&reading, err);
    if (status != KV_OK) return status;
    claim_segments(&reading);
    recovery->scan_why = reading.doubt;
    if (reading.doubt != NULL) {
        status = count_again(store, err);
        if (status != KV_OK) return status;
        mark_directory(store);
    } else {
        sum_sessions(store);
    }
    recovery->dropped =
        recovery->dropped_lost + recovery->dropped_damaged + recovery->dropped_orphans;
    recovery->bytes = recovery->pages * store->layout.page_bytes;
    recovery->dropped_bytes = recovery->dropped_pages * store->layout.page_bytes;
    return KV_OK;
}
