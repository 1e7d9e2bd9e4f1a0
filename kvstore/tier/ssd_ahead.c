/*
 * Space made ahead of its use: segment files, and free pages written through with zeros.  And zeros
 * over what was stored in pages that are free now, so that what was deleted is gone from the files.
 *
 * All of it in steps that the disk does in the background, one file or some runs of pages at a
 * time.  Runs are taken out of the free pages while they are written, and given back when they are
 * flushed, so zeros never meet a page of somebody's.  What was written through is remembered in
 * memory only: a start begins anew with the free pages, which completes whatever a crash left in
 * the middle.  For the same reason a start takes every free page for one that holds something: also
 * what was written and never recorded is written over.
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
#define RUN_BYTES (8u << 20)   /* Of one step, with one flush. */
#define WRITE_BYTES (1u << 20)
#define ERASE_PART 4u        /* Of the free pages, in one step. */
#define LOOK_PAGES_MAX 4096u /* Looked at in one turn: a full tier has millions. */

bool kv_ssd_is_written(const struct kv_ssd *ssd, uint32_t page)
{
    return page % ssd->pages_per_segment < ssd->segments[page / ssd->pages_per_segment].written_to;
}

bool kv_ssd_is_zeroing(const struct kv_ssd *ssd, uint32_t page)
{
    const struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    for (uint32_t i = 0; zeroing->active && i < zeroing->run_count; i++)
        if (page - zeroing->runs[i].first < zeroing->runs[i].count) return true;
    return false;
}

bool kv_ssd_is_zeroing_in(const struct kv_ssd *ssd, uint32_t segment)
{
    const struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    for (uint32_t i = 0; zeroing->active && i < zeroing->run_count; i++)
        if (zeroing->runs[i].first / ssd->pages_per_segment == segment) return true;
    return false;
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
        kv_ssd_take_segment(ssd, make->number, make->fd, ssd->place.segment_bytes, false);
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

/* Not absent: of a segment that is there. */
static bool is_free(const struct kv_ssd *ssd, uint32_t page)
{
    return !kv_ssd_space_used(&ssd->space, page) && !kv_ssd_space_quarantined(&ssd->space, page);
}

/* The run was written through; those between the ones known so far and it may be in use. */
static void note_written(struct kv_ssd *ssd, const struct kv_ssd_run *run)
{
    struct kv_ssd_segment *segment = &ssd->segments[run->first / ssd->pages_per_segment];
    const uint32_t base = run->first - run->first % ssd->pages_per_segment;
    const uint32_t at = run->first - base;
    while (segment->written_to < at && !is_free(ssd, base + segment->written_to))
        segment->written_to++;
    if (segment->written_to >= at)
        segment->written_to = KV_MAX(segment->written_to, at + run->count);
}

static void give_back(struct kv_ssd *ssd, bool written)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    for (uint32_t i = 0; written && i < zeroing->run_count; i++) {
        const struct kv_ssd_run *run = &zeroing->runs[i];
        note_written(ssd, run);
        for (uint32_t page = run->first; page < run->first + run->count; page++)
            kv_ssd_space_clean(&ssd->space, page);
        if (zeroing->erases)
            ssd->pages_erased += run->count;
        else
            ssd->pages_ahead += run->count;
    }
    zeroing->active = false;
    for (uint32_t i = 0; i < zeroing->run_count; i++)
        for (uint32_t k = 0; k < zeroing->runs[i].count; k++)
            kv_ssd_free(ssd, zeroing->runs[i].first + k);
    wake(ssd, KV_OK, NULL);
}

static void flushed(struct kv_ssd_flush *flush, kv_status status)
{
    struct kv_ssd *ssd = KV_CONTAINER_OF(flush, struct kv_ssd, zeroing.flush);
    give_back(ssd, status == KV_OK);
}

static void write_next(struct kv_ssd *ssd, uint64_t at);

static uint64_t run_end(const struct kv_ssd *ssd, const struct kv_ssd_run *run)
{
    return kv_ssd_page_offset(ssd, run->first) + (uint64_t)run->count * ssd->place.page_bytes;
}

static void wrote(struct kv_disk_op *op)
{
    struct kv_ssd *ssd = KV_CONTAINER_OF(op, struct kv_ssd, zeroing.op);
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    const struct kv_ssd_run *run = &zeroing->runs[zeroing->run_at];
    kv_ssd_mark_dirty(ssd, run->first);
    if (op->status != KV_OK) {
        ssd->io_errors++;
        kv_ssd_refuse_writes(ssd, "write", run->first / ssd->pages_per_segment, op);
        give_back(ssd, false);
        return;
    }
    if (op->call.offset + op->call.bytes < run_end(ssd, run)) {
        write_next(ssd, op->call.offset + op->call.bytes);
        return;
    }
    if (++zeroing->run_at < zeroing->run_count) {
        write_next(ssd, kv_ssd_page_offset(ssd, zeroing->runs[zeroing->run_at].first));
        return;
    }
    zeroing->flush = (struct kv_ssd_flush){.done = flushed};
    if (kv_ssd_flush_start(ssd, &zeroing->flush) != KV_OK) give_back(ssd, false);
}

/* Of the run at hand, from this offset in its file on. */
static void write_next(struct kv_ssd *ssd, uint64_t at)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    const struct kv_ssd_run *run = &zeroing->runs[zeroing->run_at];
    zeroing->op = (struct kv_disk_op){
        .call = {.verb = KV_DISK_WRITE,
                 .fd = ssd->segments[run->first / ssd->pages_per_segment].fd,
                 .buf = zeroing->zeros,
                 .bytes = KV_MIN(run_end(ssd, run) - at, (uint64_t)WRITE_BYTES),
                 .offset = at},
        .done = wrote,
    };
    kv_disk_start(ssd->disk, &zeroing->op);
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

/* Free and soiled pages from where the pass is, at most `most`; their number. */
static uint32_t find_soiled(struct kv_ssd *ssd, uint32_t most)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    uint32_t count = 0;
    for (zeroing->run_count = 0; zeroing->run_count < KV_SSD_RUNS_MAX && count < most;) {
        const uint32_t first = kv_ssd_space_next_soiled(&ssd->space, ssd->erase_at);
        if (first >= ssd->space.page_max) break;
        const uint32_t end = (first / ssd->pages_per_segment + 1) * ssd->pages_per_segment;
        uint32_t page = first + 1;
        while (page < end && count + (page - first) < most &&
               kv_ssd_space_next_soiled(&ssd->space, page) == page)
            page++;
        zeroing->runs[zeroing->run_count++] = (struct kv_ssd_run){first, page - first};
        ssd->erase_at = page;
        count += page - first;
    }
    return count;
}

/* False: no memory for the zeros; another time. */
static bool zeros_create(struct kv_ssd_zeroing *zeroing)
{
    if (zeroing->zeros != NULL) return true;
    zeroing->zeros = aligned_alloc(KV_IO_ALIGN, WRITE_BYTES);
    if (zeroing->zeros == NULL) return false;
    memset(zeroing->zeros, 0, WRITE_BYTES);
    return true;
}

/* The runs that were found. */
static void zero_start(struct kv_ssd *ssd, bool erases)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    zeroing->count = 0;
    for (uint32_t i = 0; i < zeroing->run_count; i++) {
        const struct kv_ssd_run *run = &zeroing->runs[i];
        for (uint32_t page = run->first; page < run->first + run->count; page++) {
            const kv_status status = kv_ssd_space_claim(&ssd->space, page);
            assert(status == KV_OK);
            ssd->written_free -= kv_ssd_is_written(ssd, page);
        }
        zeroing->count += run->count;
    }
    zeroing->erases = erases;
    zeroing->active = true;
    zeroing->run_at = 0;
    write_next(ssd, kv_ssd_page_offset(ssd, zeroing->runs[0].first));
}

static uint32_t step_pages(const struct kv_ssd *ssd)
{
    return KV_MAX(RUN_BYTES / ssd->place.page_bytes, 1u);
}

static void ahead_start(struct kv_ssd *ssd)
{
    struct kv_ssd_zeroing *zeroing = &ssd->zeroing;
    struct kv_ssd_run *run = &zeroing->runs[0];
    if (!zeros_create(zeroing)) return;
    if (!find_run(ssd, step_pages(ssd), &run->first, &run->count)) return;
    zeroing->run_count = 1;
    zero_start(ssd, false);
}

/* True: it writes.  A save that comes meanwhile finds most of what was free. */
static bool erase_step(struct kv_ssd *ssd, uint64_t now_ns)
{
    const uint32_t left = ssd->space.soiled_free;
    const uint32_t most = KV_MIN(step_pages(ssd), ssd->space.free_count / ERASE_PART + 1);
    if (left == 0) ssd->erase_at = 0;
    if (!kv_erase_due(&ssd->erase, now_ns, left, most)) return false;
    if (!zeros_create(&ssd->zeroing)) return false;
    const uint32_t count = find_soiled(ssd, most);
    if (count == 0) {
        kv_erase_pass_over(&ssd->erase);
        ssd->erase_at = 0;
        return false;
    }
    zero_start(ssd, true);
    kv_erase_took(&ssd->erase, now_ns, count, left - count);
    return true;
}

void kv_ssd_tick(struct kv_ssd *ssd, uint64_t now_ns)
{
    if (kv_ssd_is_read_only(ssd) || ssd->making || ssd->zeroing.active) return;
    if (erase_step(ssd, now_ns)) return;
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
        ahead_start(ssd);
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
