/*
 * Space made ahead of its use: segment files, and free pages written through with zeros.
 *
 * All of it in steps that the disk does in the background, one file and one run of pages at a time.
 * A run is taken out of the free pages while it is written, and given back when it is flushed, so
 * zeros never meet a page of somebody's.  What was written through is remembered in memory only: a
 * start begins anew with the free pages, which completes whatever a crash left in the middle.
 *
 * A save does not wait for it.  Where pages are wanted before they were written through they are
 * given out as they are; only where no file has enough free ones it waits until the next file is
 * made or could not be.  A file that could not be made is no failure of the tier.  A write or flush
 * of zeros that failed is one, as of any other page: the device is asked to keep nothing more.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/plan/prewrite.h"
#include "kvstore/tier/ssd_internal.h"

#include <assert.h>
#include <stdlib.h>

#define LEAST_BYTES (1u << 20) /* Written ahead even when nothing is in use. */
#define RUN_BYTES (8u << 20)   /* Of one run, with one flush. */
#define WRITE_BYTES (1u << 20)
#define LOOK_PAGES_MAX 4096u /* Looked at in one turn: a full tier has millions. */

bool kv_ssd_is_written(const struct kv_ssd *ssd, uint32_t page)
{
    return page % ssd->pages_per_segment < ssd->segments[page / ssd->pages_per_segment].written_to;
}

uint32_t kv_ssd_in_use(const struct kv_ssd *ssd)
{
    return ssd->space.used_count - (ssd->zeroing.active ? ssd->zeroing.count : 0);
}

/* ---- those who wait ---- */

void kv_ssd_wait(struct kv_ssd *ssd, struct kv_ssd_wait *wait)
{
    assert(ssd->making || ssd->zeroing.active);
    wait->next = NULL;
    if (ssd->waits == NULL)
        ssd->waits = wait;
    else
        ssd->waits_last->next = wait;
    ssd->waits_last = wait;
}

/* They may wait again. */
static void wake(struct kv_ssd *ssd, kv_status status, const struct kv_error *err)
{
    struct kv_ssd_wait *wait = ssd->waits;
    ssd->waits = ssd->waits_last = NULL;
    while (wait != NULL) {
        struct kv_ssd_wait *next = wait->next;
        wait->status = status;
        if (err != NULL) wait->err = *err;
        wait->ready(wait);
        wait = next;
    }
}

/* ---- segments ---- */

static void made(struct kv_ssd_make *make)
{
    struct kv_ssd *ssd = KV_CONTAINER_OF(make, struct kv_ssd, make);
    ssd->making = false;
    ssd->make_failed = make->status != KV_OK;
    if (make->status == KV_OK)
        kv_ssd_take_segment(ssd, make->number, make->fd, ssd->place.segment_bytes);
    else if (make->err.sys_errno == ENOSPC || make->err.sys_errno == EDQUOT)
        ssd->segments_allowed = ssd->segment_count; /* The file system is full after all. */
    else
        ssd->io_errors++;
    wake(ssd, make->status, &make->err);
}

bool kv_ssd_make_another(struct kv_ssd *ssd)
{
    if (ssd->making) return true;
    ssd->make =
        (struct kv_ssd_make){.place = &ssd->place, .number = kv_ssd_next_number(ssd), .done = made};
    ssd->making = kv_ssd_make_start(&ssd->make);
    return ssd->making;
}

/* ---- pages ---- */

static void give_back(struct kv_ssd *ssd, bool written)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    struct kv_ssd_segment *segment = &ssd->segments[zeroing->first / ssd->pages_per_segment];
    if (written) {
        segment->written_to = zeroing->first % ssd->pages_per_segment + zeroing->count;
        ssd->pages_ahead += zeroing->count;
    }
    zeroing->active = false;
    for (uint32_t i = 0; i < zeroing->count; i++)
        kv_ssd_free(ssd, zeroing->first + i);
    wake(ssd, KV_OK, NULL);
}

static void flushed(struct kv_ssd_flush *flush, kv_status status)
{
    struct kv_ssd *ssd = KV_CONTAINER_OF(flush, struct kv_ssd, zeroing.flush);
    give_back(ssd, status == KV_OK);
}

static void write_next(struct kv_ssd *ssd);

static void wrote(struct kv_disk_op *op)
{
    struct kv_ssd *ssd = KV_CONTAINER_OF(op, struct kv_ssd, zeroing.op);
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    const uint64_t end =
        kv_ssd_page_offset(ssd, zeroing->first) + (uint64_t)zeroing->count * ssd->place.page_bytes;
    kv_ssd_mark_dirty(ssd, zeroing->first);
    if (op->status != KV_OK) {
        ssd->io_errors++;
        kv_ssd_refuse_writes(ssd, "write", zeroing->first / ssd->pages_per_segment, op);
        give_back(ssd, false);
        return;
    }
    if (op->call.offset + op->call.bytes < end) {
        op->call.offset += op->call.bytes;
        write_next(ssd);
        return;
    }
    zeroing->flush = (struct kv_ssd_flush){.done = flushed};
    if (kv_ssd_flush_start(ssd, &zeroing->flush) != KV_OK) give_back(ssd, false);
}

/* From op.call.offset on. */
static void write_next(struct kv_ssd *ssd)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    const uint64_t end =
        kv_ssd_page_offset(ssd, zeroing->first) + (uint64_t)zeroing->count * ssd->place.page_bytes;
    const uint64_t at = zeroing->op.call.offset;
    zeroing->op = (struct kv_disk_op){
        .call = {.verb = KV_DISK_WRITE,
                 .fd = ssd->segments[zeroing->first / ssd->pages_per_segment].fd,
                 .buf = zeroing->zeros,
                 .bytes = KV_MIN(end - at, (uint64_t)WRITE_BYTES),
                 .offset = at},
        .done = wrote,
    };
    kv_disk_start(ssd->disk, &zeroing->op);
}

/* Not absent: of a segment that is there. */
static bool is_free(const struct kv_ssd *ssd, uint32_t page)
{
    return !kv_ssd_space_used(&ssd->space, page) && !kv_ssd_space_quarantined(&ssd->space, page);
}

/* The next free pages that were not written through: at most `most`, side by side in a segment.
 * False: none was found this time. */
static bool find_run(struct kv_ssd *ssd, uint32_t most, uint32_t *ret_first, uint32_t *ret_count)
{
    uint32_t looks = LOOK_PAGES_MAX;
    for (; ssd->zero_segment < ssd->segment_max && looks > 0; ssd->zero_segment++) {
        struct kv_ssd_segment *segment = &ssd->segments[ssd->zero_segment];
        const uint32_t base = ssd->zero_segment * ssd->pages_per_segment;
        if (segment->fd < 0 || kv_ssd_closed(ssd, base)) continue;
        while (segment->written_to < ssd->pages_per_segment && looks > 0 &&
               !is_free(ssd, base + segment->written_to)) {
            segment->written_to++;
            looks--;
        }
        if (looks == 0) return false;
        if (segment->written_to == ssd->pages_per_segment) continue;
        uint32_t count = 0;
        while (count < most && segment->written_to + count < ssd->pages_per_segment &&
               is_free(ssd, base + segment->written_to + count))
            count++;
        *ret_first = base + segment->written_to;
        *ret_count = count;
        return true;
    }
    return false;
}

static void zero_start(struct kv_ssd *ssd)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    const uint32_t most = KV_MAX(RUN_BYTES / ssd->place.page_bytes, 1u);
    if (zeroing->zeros == NULL) {
        zeroing->zeros = aligned_alloc(KV_IO_ALIGN, WRITE_BYTES);
        if (zeroing->zeros == NULL) return; /* Another time. */
        memset(zeroing->zeros, 0, WRITE_BYTES);
    }
    if (!find_run(ssd, most, &zeroing->first, &zeroing->count)) return;
    for (uint32_t i = 0; i < zeroing->count; i++) {
        const kv_status status = kv_ssd_space_claim(&ssd->space, zeroing->first + i);
        assert(status == KV_OK);
    }
    zeroing->active = true;
    zeroing->op.call.offset = kv_ssd_page_offset(ssd, zeroing->first);
    write_next(ssd);
}

void kv_ssd_tick(struct kv_ssd *ssd)
{
    if (kv_ssd_is_read_only(ssd) || ssd->making || ssd->zeroing.active) return;
    const uint32_t least = KV_MAX(LEAST_BYTES / ssd->place.page_bytes, 1u);
    const struct kv_prewrite state = {
        .used = ssd->space.used_count,
        .free = ssd->space.free_count,
        .written = ssd->written_free,
        .segment_pages = ssd->pages_per_segment,
        .least = least,
        .may_make = !ssd->make_failed && kv_ssd_may_add(ssd),
    };
    switch (kv_prewrite_next(&state)) {
    case KV_PREWRITE_NOTHING:
        break;
    case KV_PREWRITE_PAGES:
        zero_start(ssd);
        break;
    case KV_PREWRITE_SEGMENT:
        kv_ssd_look_for_room(ssd);
        if (kv_ssd_may_add(ssd)) ssd->make_failed |= !kv_ssd_make_another(ssd);
        break;
    }
}

void kv_ssd_rest(struct kv_ssd *ssd)
{
    while (ssd->making || ssd->zeroing.active)
        (void)kv_disk_run(ssd->disk, -1, -1);
}
