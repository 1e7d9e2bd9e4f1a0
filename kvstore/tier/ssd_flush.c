/*
 * Group commit of the SSD tier.
 *
 * One round of fdatasyncs over the segments written since the last round serves every flush that
 * waits.  A flush that comes during a round joins the next one, because the round may have passed
 * its write already; unless nothing was written since the round began, when the round covers it
 * too.  After a failed fdatasync the kernel may have dropped the dirty data and report success next
 * time, so there is no second try: the tier is read-only until restart.
 */

#include "kvstore/tier/ssd_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>

static void sync_done(struct kv_disk_op *disk_op);

static void sync_start(struct kv_ssd *ssd, struct kv_ssd_segment *segment)
{
    if (segment->dirty) ssd->dirty_count--;
    segment->dirty = false;
    segment->sync =
        (struct kv_disk_op){.call = {.verb = KV_DISK_SYNC, .fd = segment->fd}, .done = sync_done};
    ssd->syncs_inflight++;
    kv_disk_start(ssd->disk, &segment->sync);
}

static void round_start(struct kv_ssd *ssd)
{
    struct kv_ssd_segment *any = NULL;
    ssd->serving = ssd->waiting;
    ssd->waiting = NULL;
    ssd->waiting_last = NULL;
    for (uint32_t i = 0; i < ssd->segment_max; i++) {
        struct kv_ssd_segment *segment = &ssd->segments[i];
        if (segment->fd < 0) continue;
        any = segment;
        if (segment->dirty) sync_start(ssd, segment);
    }
    /* done() must not run inside start: with nothing to sync, a clean file's fdatasync brings us
     * back here by way of the ring, at little cost. */
    assert(any != NULL);
    if (ssd->syncs_inflight == 0) sync_start(ssd, any);
}

static void round_end(struct kv_ssd *ssd)
{
    struct kv_ssd_flush *finished[2] = {ssd->serving, NULL};
    ssd->serving = NULL;
    const bool failed = kv_ssd_is_read_only(ssd);
    /* Nothing written since the round began: it covers those that came meanwhile. */
    if (failed || ssd->dirty_count == 0) {
        finished[1] = ssd->waiting;
        ssd->waiting = NULL;
        ssd->waiting_last = NULL;
    }
    if (ssd->waiting != NULL) round_start(ssd);

    for (int i = 0; i < 2; i++) {
        for (struct kv_ssd_flush *flush = finished[i]; flush != NULL;) {
            struct kv_ssd_flush *next = flush->next; /* done() may start or free it. */
            flush->done(flush, failed ? KV_IO : KV_OK);
            flush = next;
        }
    }
}

/* What was flushed into a file that somebody deleted is gone with this process: it must not be
 * acknowledged.  A disk that cannot tell is believed. */
static void refuse_nameless(struct kv_ssd *ssd, const struct kv_ssd_segment *segment)
{
    const struct kv_disk_call links = {.verb = KV_DISK_LINKS, .fd = segment->fd};
    if (ssd->read_only_reason[0] != '\0' || kv_disk_call(ssd->disk, &links) != 0) return;
    (void)snprintf(ssd->read_only_reason, sizeof(ssd->read_only_reason),
                   "segment-%06u.kv was deleted under the daemon; restart to go on",
                   (unsigned)(segment - ssd->segments));
}

static void sync_done(struct kv_disk_op *disk_op)
{
    struct kv_ssd_segment *segment = KV_CONTAINER_OF(disk_op, struct kv_ssd_segment, sync);
    struct kv_ssd *ssd = segment->ssd;
    ssd->flushes++;
    if (disk_op->status != KV_OK) {
        ssd->io_errors++;
        kv_ssd_refuse_writes(ssd, "fdatasync", (uint32_t)(segment - ssd->segments), disk_op);
    } else {
        refuse_nameless(ssd, segment);
    }
    if (--ssd->syncs_inflight == 0) round_end(ssd);
}

kv_status kv_ssd_flush_start(struct kv_ssd *ssd, struct kv_ssd_flush *flush)
{
    assert(flush->done != NULL);
    /* Not even tried: the file may be the one whose flush failed. */
    if (kv_ssd_is_read_only(ssd)) return KV_IO;
    flush->next = NULL;
    if (ssd->waiting == NULL) {
        ssd->waiting = flush;
    } else {
        ssd->waiting_last->next = flush;
    }
    ssd->waiting_last = flush;
    if (ssd->syncs_inflight == 0) round_start(ssd);
    return KV_OK;
}
