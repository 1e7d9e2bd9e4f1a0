/*
 * Quarantined places back into use, after whatever was wrong was put right.
 *
 * From the bytes alone nobody can tell whether the device, the kernel or somebody with a shell did
 * it, so it is the operator who asks, and each place is tried first (ssd_retest.c).  Those that
 * keep what is written to them are free once the deletion of their record Q is durable, a few with
 * one batch.  A place that a record still names stays: its tree is to be loaded first, which
 * deletes that record.
 *
 * It is as safe as any other free place: batches are answered in order, so what deleted the last
 * record of the place was answered before.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/segments.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define GOOD_MAX 32u /* Released with one batch. */

struct kv_release {
    struct kv_store *store;
    struct kv_ssd_retest retest;
    uint32_t at, end; /* Places. */
    uint32_t good[GOOD_MAX], good_count;
    struct kv_release_result result;
    bool (*cancelled)(void *context);
    kv_release_done_fn *done;
    void *context;
};

static void go_on(struct kv_release *release);

static void release_end(struct kv_release *release, kv_status status)
{
    struct kv_store *store = release->store;
    kv_release_done_fn *done = release->done;
    void *context = release->context;
    const struct kv_release_result result = release->result;
    free(release);
    store->operations--;
    done(context, &result, status);
}

/* What status names. */
static void forget(struct kv_store *store, uint32_t ssd_page)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < store->quarantined_count; i++)
        if (store->quarantined[i].ssd_page != ssd_page)
            store->quarantined[kept++] = store->quarantined[i];
    store->quarantined_count = kept;
}

static void recorded(void *context, kv_status status)
{
    struct kv_release *release = context;
    struct kv_store *store = release->store;
    if (status != KV_OK) { /* They stay until a restart shows what became of their records. */
        release_end(release, status);
        return;
    }
    for (uint32_t i = 0; i < release->good_count; i++) {
        forget(store, release->good[i]);
        kv_ssd_release(store->ssd, release->good[i]);
        kv_log(store->options.log, KV_LOG_INFO, "page_released", "ssd_page=%" PRIu32,
               release->good[i]);
    }
    release->result.released += release->good_count;
    store->counters.released += release->good_count;
    release->good_count = 0;
    go_on(release);
}

/* Their records go; one that was never recorded is deleted all the same. */
static void record_good(struct kv_release *release)
{
    struct kv_batch *batch = kv_batch_create(release->store);
    kv_status status = batch == NULL ? KV_NOMEM : KV_OK;
    for (uint32_t i = 0; status == KV_OK && i < release->good_count; i++) {
        uint8_t key[KV_KEY_QUARANTINE_BYTES];
        const struct kv_manifest_put gone = {.key = key,
                                             .key_bytes = kv_key_quarantine(release->good[i], key)};
        status = kv_batch_put(batch, &gone);
    }
    if (status != KV_OK) {
        kv_batch_discard(batch);
        release_end(release, status);
        return;
    }
    kv_batch_post(batch, recorded, release);
}

static void retested(struct kv_ssd_retest *retest, kv_status status)
{
    struct kv_release *release = KV_CONTAINER_OF(retest, struct kv_release, retest);
    uint32_t segment;
    uint64_t offset;
    if (status == KV_INVALID) {
        release_end(release, status);
        return;
    }
    if (status == KV_OK) {
        release->good[release->good_count++] = retest->page;
    } else {
        release->result.bad++;
        kv_ssd_place(release->store->ssd, retest->page, &segment, &offset);
        kv_log(release->store->options.log, KV_LOG_WARN, "page_still_bad",
               "file=segment-%06" PRIu32 ".kv offset=%" PRIu64 " ssd_page=%" PRIu32 " errno=%d",
               segment, offset, retest->page, status == KV_IO ? retest->sys_errno : 0);
    }
    go_on(release);
}

/* The next place that may be tried; false: there is none. */
static bool find_next(struct kv_release *release)
{
    struct kv_store *store = release->store;
    for (; release->at < release->end; release->at++) {
        if (!kv_ssd_quarantined(store->ssd, release->at)) continue;
        if (!kv_store_segment_recorded(store, release->at)) return true;
        release->result.named++;
    }
    return false;
}

static void go_on(struct kv_release *release)
{
    kv_status status = KV_MISS; /* The file of the place is not there. */
    bool more = release->good_count < GOOD_MAX && !release->cancelled(release->context);
    while (more && status == KV_MISS) {
        more = find_next(release);
        if (!more) break;
        release->retest = (struct kv_ssd_retest){.page = release->at++, .done = retested};
        status = kv_ssd_retest_start(release->store->ssd, &release->retest);
    }
    if (more && status == KV_OK) return; /* Goes on from retested(). */
    if (release->good_count > 0)
        record_good(release);
    else
        release_end(release, more ? status : KV_OK);
}

kv_status kv_store_release_start(struct kv_store *store, bool (*cancelled)(void *context),
                                 kv_release_done_fn *done, void *context)
{
    uint32_t segments;
    struct kv_release *release = calloc(1, sizeof(*release));
    if (release == NULL) return KV_NOMEM;
    const uint32_t pages = kv_ssd_shape(store->ssd, &segments);
    release->store = store;
    release->end = pages * segments;
    release->cancelled = cancelled;
    release->done = done;
    release->context = context;
    store->operations++;
    go_on(release);
    return KV_OK;
}
