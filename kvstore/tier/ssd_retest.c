/*
 * Whether a quarantined page keeps what is written to it.
 *
 * A pattern, flushed, read back and compared; then the same with zeros, which also erases what the
 * page held when it was found bad.  Each flush is one of the group's.  A write or read that fails
 * says that the page is still bad and no more: nothing of anybody's is in it, so unlike any other
 * failed write it is no reason to keep nothing more.  A failed flush is, as always.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/tier/ssd_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum step { PATTERN_WRITE, PATTERN_FLUSH, PATTERN_READ, ZERO_WRITE, ZERO_FLUSH, ZERO_READ };

static void step_start(struct kv_ssd_retest *retest, enum step step);

static void end(struct kv_ssd_retest *retest, kv_status status)
{
    free(retest->wrote);
    free(retest->found);
    retest->wrote = retest->found = NULL;
    retest->done(retest, status);
}

static void next(struct kv_ssd_retest *retest)
{
    if (retest->step != ZERO_READ)
        step_start(retest, (enum step)(retest->step + 1));
    else
        end(retest, KV_OK);
}

static void moved(struct kv_disk_op *op)
{
    struct kv_ssd_retest *retest = KV_CONTAINER_OF(op, struct kv_ssd_retest, op);
    struct kv_ssd *ssd = retest->ssd;
    const bool is_read = op->call.verb == KV_DISK_READ;
    ssd->ops_inflight--;
    if (!is_read) kv_ssd_mark_dirty(ssd, retest->page);
    if (op->status != KV_OK) {
        ssd->io_errors++;
        retest->sys_errno = op->sys_errno;
        end(retest, KV_IO);
        return;
    }
    if (is_read && memcmp(retest->wrote, retest->found, ssd->place.page_bytes) != 0) {
        end(retest, KV_CORRUPT);
        return;
    }
    next(retest);
}

static void flushed(struct kv_ssd_flush *flush, kv_status status)
{
    struct kv_ssd_retest *retest = KV_CONTAINER_OF(flush, struct kv_ssd_retest, flush);
    if (status == KV_OK)
        next(retest);
    else
        end(retest, KV_INVALID);
}

static void move_start(struct kv_ssd_retest *retest, enum kv_disk_verb verb, uint8_t *buf)
{
    struct kv_ssd *ssd = retest->ssd;
    retest->op = (struct kv_disk_op){
        .call = {.verb = verb,
                 .fd = ssd->segments[retest->page / ssd->pages_per_segment].fd,
                 .buf = buf,
                 .bytes = ssd->place.page_bytes,
                 .offset = kv_ssd_page_offset(ssd, retest->page)},
        .done = moved,
    };
    ssd->ops_inflight++;
    kv_disk_start(ssd->disk, &retest->op);
}

/* Another one in each page, and in no block the same as in the next. */
static void fill(const struct kv_ssd_retest *retest)
{
    uint64_t state = 0x9e3779b97f4a7c15u * (retest->page + 1u);
    for (uint32_t at = 0; at < retest->ssd->place.page_bytes; at += sizeof(state)) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        kv_store64(retest->wrote + at, state);
    }
}

static void step_start(struct kv_ssd_retest *retest, enum step step)
{
    struct kv_ssd *ssd = retest->ssd;
    retest->step = (uint8_t)step;
    switch (step) {
    case PATTERN_WRITE:
        fill(retest);
        move_start(retest, KV_DISK_WRITE, retest->wrote);
        break;
    case ZERO_WRITE:
        memset(retest->wrote, 0, ssd->place.page_bytes);
        move_start(retest, KV_DISK_WRITE, retest->wrote);
        break;
    case PATTERN_FLUSH:
    case ZERO_FLUSH:
        retest->flush = (struct kv_ssd_flush){.done = flushed};
        if (kv_ssd_flush_start(ssd, &retest->flush) != KV_OK) end(retest, KV_INVALID);
        break;
    default:
        memset(retest->found, 0xa5, ssd->place.page_bytes);
        move_start(retest, KV_DISK_READ, retest->found);
        break;
    }
}

kv_status kv_ssd_retest_start(struct kv_ssd *ssd, struct kv_ssd_retest *retest)
{
    const uint32_t bytes = ssd->place.page_bytes;
    assert(kv_ssd_quarantined(ssd, retest->page));
    if (kv_ssd_is_read_only(ssd)) return KV_INVALID;
    if (!kv_ssd_space_present(&ssd->space, retest->page)) return KV_MISS;
    retest->ssd = ssd;
    retest->sys_errno = 0;
    retest->wrote = aligned_alloc(KV_IO_ALIGN, bytes);
    retest->found = aligned_alloc(KV_IO_ALIGN, bytes);
    if (retest->wrote == NULL || retest->found == NULL) {
        free(retest->wrote);
        free(retest->found);
        return KV_NOMEM;
    }
    step_start(retest, PATTERN_WRITE);
    return KV_OK;
}

void kv_ssd_release(struct kv_ssd *ssd, uint32_t page)
{
    kv_ssd_space_release(&ssd->space, page);
    if (!kv_ssd_closed(ssd, page)) ssd->written_free += kv_ssd_is_written(ssd, page);
}
