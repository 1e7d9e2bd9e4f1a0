/*
 * Pages on SSD: space and page I/O over a few large files; group commit is in ssd_flush.c.
 *
 * Files are only ever added, the lowest missing number first, and never beyond bytes_max or into
 * the last part of the file system, which the manifest needs: a write of a page never meets a full
 * disk, because its segment's blocks were reserved when it was made.  They are made ahead of their
 * use, in the background (ssd_ahead.c); failing to make one early is no error, because nobody needs
 * it yet.
 */

#include "kvstore/tier/tier_ssd.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/tier/ssd_internal.h"
#include "kvstore/tier/ssd_segment.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_AGAIN_NS 1000000000ull

/* ---- open and close ---- */

kv_status kv_ssd_check(const struct kv_ssd_options *options, struct kv_error *err)
{
    assert(options->page_bytes > 0);
    assert(options->page_bytes % KV_IO_ALIGN == 0);
    if (options->segment_bytes % KV_IO_ALIGN != 0 ||
        options->segment_bytes < (uint64_t)KV_SEGMENT_HEADER_BYTES + options->page_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "SSD segments of %" PRIu64 " B: want a multiple of %u B with room for one "
                       "page of %" PRIu32 " B and %u B of header",
                       options->segment_bytes, KV_IO_ALIGN, options->page_bytes,
                       KV_SEGMENT_HEADER_BYTES);
    if (options->bytes_max < options->segment_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "the SSD tier may use %" PRIu64 " B, less than one segment of %" PRIu64 " B",
                       options->bytes_max, options->segment_bytes);
    return KV_OK;
}

/* Highest segment number, plus one; 0 when there is none. */
static uint32_t numbers_end(const char *names, uint64_t bytes)
{
    uint32_t end = 0;
    for (const char *name = names; name < names + bytes; name += strlen(name) + 1) {
        uint32_t number;
        if (kv_ssd_segment_parse(name, &number)) end = KV_MAX(end, number + 1);
    }
    return end;
}

void kv_ssd_take_segment(struct kv_ssd *ssd, uint32_t number, int fd, uint64_t valid_bytes,
                         bool soiled)
{
    struct kv_ssd_segment *segment = &ssd->segments[number];
    assert(segment->fd < 0);
    segment->fd = fd;
    segment->valid_bytes = valid_bytes;
    segment->written_to = 0;
    ssd->zero_segment = KV_MIN(ssd->zero_segment, number);
    ssd->segment_count++;
    kv_ssd_space_add(&ssd->space, number * ssd->pages_per_segment, ssd->pages_per_segment, soiled);
}

static kv_status segments_open(struct kv_ssd *ssd, const char *names, uint64_t bytes,
                               struct kv_error *err)
{
    for (const char *name = names; name < names + bytes; name += strlen(name) + 1) {
        uint32_t number;
        if (!kv_ssd_segment_parse(name, &number)) continue;
        int fd;
        uint64_t valid_bytes;
        bool repaired;
        const kv_status status =
            kv_ssd_segment_open(&ssd->place, number, &fd, &valid_bytes, &repaired, err);
        if (status != KV_OK) return status;
        kv_ssd_take_segment(ssd, number, fd, valid_bytes, true);
        ssd->segments_repaired += repaired;
    }
    return KV_OK;
}

uint32_t kv_ssd_next_number(const struct kv_ssd *ssd)
{
    uint32_t number = 0;
    while (ssd->segments[number].fd >= 0)
        number++;
    assert(number < ssd->segment_max);
    return number;
}

/* Where the file system does not say, bytes_max counts alone: a segment that cannot be made is
 * found out when it is tried. */
void kv_ssd_look_for_room(struct kv_ssd *ssd)
{
    const struct kv_disk_call call = {.verb = KV_DISK_ROOM, .fd = ssd->place.dir_fd};
    const int64_t room = kv_disk_call(ssd->disk, &call);
    ssd->segments_allowed =
        kv_ssd_segments_allowed(ssd->bytes_max, ssd->place.segment_bytes, ssd->segment_count,
                                room < 0 ? UINT64_MAX / 2 : (uint64_t)room);
}

bool kv_ssd_may_add(const struct kv_ssd *ssd)
{
    return ssd->segment_count < ssd->segments_allowed;
}

static uint32_t segments_configured(const struct kv_ssd *ssd)
{
    return (uint32_t)(ssd->bytes_max / ssd->place.segment_bytes);
}

void kv_ssd_look(struct kv_ssd *ssd, uint64_t now_ns)
{
    if (!ssd->make_failed && ssd->segments_allowed >= segments_configured(ssd)) return;
    if (ssd->full_ns == 0) ssd->full_ns = now_ns;
    if (now_ns - ssd->full_ns < LOOK_AGAIN_NS) return;
    ssd->full_ns = 0;
    ssd->make_failed = false;
    kv_ssd_look_for_room(ssd);
}

struct kv_ssd_room kv_ssd_room(const struct kv_ssd *ssd)
{
    const uint32_t segments = KV_MAX(ssd->segments_allowed, ssd->segment_count);
    const uint64_t pages =
        KV_MIN((uint64_t)segments * ssd->pages_per_segment, (uint64_t)ssd->page_max);
    return (struct kv_ssd_room){.used = kv_ssd_in_use(ssd),
                                .limit = (uint32_t)(pages - KV_MIN(ssd->space.bad_count, pages)),
                                .is_bounded = segments < segments_configured(ssd)};
}

/* At start, when nobody else waits for this thread. */
static kv_status first_add(struct kv_ssd *ssd, struct kv_error *err)
{
    if (!kv_ssd_make_another(ssd)) return KV_FAIL(err, KV_NOMEM, "make the first SSD segment");
    kv_ssd_rest(ssd);
    if (ssd->segment_count == 0) {
        if (err != NULL) *err = ssd->make.err;
        return ssd->make.status;
    }
    /* Nothing was in it before: records of its pages are of a file that is gone. */
    ssd->segments[0].valid_bytes = 0;
    return KV_OK;
}

static kv_status tables_create(struct kv_ssd *ssd, uint32_t found_count, struct kv_error *err)
{
    const uint64_t allowed = ssd->bytes_max / ssd->place.segment_bytes;
    const uint64_t segments = KV_MAX(allowed, found_count);
    if (segments > KV_SSD_SEGMENT_NUMBER_MAX + 1u ||
        segments * ssd->pages_per_segment >= KV_SSD_PAGE_NONE)
        return KV_FAIL(err, KV_INVALID,
                       "%" PRIu64 " SSD segments of %" PRIu32 " pages are too many; choose larger "
                       "segments or less space",
                       segments, ssd->pages_per_segment);
    ssd->segment_max = (uint32_t)segments;
    ssd->page_max = (uint32_t)allowed * ssd->pages_per_segment;
    ssd->segments = calloc(ssd->segment_max, sizeof(*ssd->segments));
    if (ssd->segments == NULL) return KV_FAIL(err, KV_NOMEM, "open the SSD tier");
    for (uint32_t i = 0; i < ssd->segment_max; i++)
        ssd->segments[i] = (struct kv_ssd_segment){.fd = -1, .ssd = ssd};
    if (kv_ssd_space_init(&ssd->space, ssd->segment_max * ssd->pages_per_segment) != KV_OK)
        return KV_FAIL(err, KV_NOMEM, "open the SSD tier");
    return KV_OK;
}

/* What is there, or a first segment. */
static kv_status files_open(struct kv_ssd *ssd, struct kv_error *err)
{
    const struct kv_disk_call sync_dir = {.verb = KV_DISK_SYNC_DIR, .fd = ssd->place.dir_fd};
    char *names;
    const int64_t got = kv_disk_names(ssd->disk, ssd->place.dir_fd, &names);
    if (got < 0) return KV_FAIL_ERRNO(err, KV_IO, "read directory '%s'", ssd->dir);
    const uint64_t bytes = (uint64_t)got;
    kv_status status = tables_create(ssd, numbers_end(names, bytes), err);
    if (status == KV_OK) status = segments_open(ssd, names, bytes, err);
    free(names);
    if (status != KV_OK) return status;
    const bool is_new = ssd->segment_count == 0;
    if (is_new) status = first_add(ssd, err);
    if (status == KV_OK) kv_ssd_look_for_room(ssd);
    if (status != KV_OK || is_new) return status;
    /* The process that made a file may have died before the name was durable. */
    if (kv_disk_call(ssd->disk, &sync_dir) < 0)
        return KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", ssd->dir);
    return KV_OK;
}

kv_status kv_ssd_open(const struct kv_ssd_options *options, struct kv_disk *disk,
                      struct kv_ssd **ret_ssd, struct kv_error *err)
{
    kv_status status = kv_ssd_check(options, err);
    if (status != KV_OK) return status;
    struct kv_ssd *ssd = calloc(1, sizeof(*ssd));
    if (ssd == NULL) return KV_FAIL(err, KV_NOMEM, "open the SSD tier");

    ssd->disk = disk;
    ssd->bytes_max = options->bytes_max;
    ssd->erase.within_ns = options->erase_within_ns;
    ssd->pages_per_segment =
        (uint32_t)((options->segment_bytes - KV_SEGMENT_HEADER_BYTES) / options->page_bytes);
    ssd->place = (struct kv_ssd_place){.disk = disk,
                                       .dir_fd = -1,
                                       .segment_bytes = options->segment_bytes,
                                       .page_bytes = options->page_bytes,
                                       .directory = options->directory};
    ssd->dir = strdup(options->dir);
    ssd->place.dir = ssd->dir;
    if (ssd->dir == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "open the SSD tier");
        goto fail;
    }
    const struct kv_disk_call open_dir = {.verb = KV_DISK_OPEN_DIR, .name = ssd->dir};
    ssd->place.dir_fd = (int)kv_disk_call(disk, &open_dir);
    if (ssd->place.dir_fd < 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "open directory '%s'", ssd->dir);
        goto fail;
    }
    status = files_open(ssd, err);
    if (status != KV_OK) goto fail;
    *ret_ssd = ssd;
    return KV_OK;

fail:
    kv_ssd_close(ssd);
    return status;
}

void kv_ssd_close(struct kv_ssd *ssd)
{
    if (ssd == NULL) return;
    assert(ssd->ops_inflight == 0);
    kv_ssd_rest(ssd);
    assert(ssd->syncs_inflight == 0);
    for (uint32_t i = 0; ssd->segments != NULL && i < ssd->segment_max; i++)
        kv_disk_close_file(ssd->disk, ssd->segments[i].fd);
    kv_disk_close_file(ssd->disk, ssd->place.dir_fd);
    kv_ssd_space_fini(&ssd->space);
    free(ssd->zeroing.zeros);
    free(ssd->segments);
    free(ssd->dir);
    free(ssd);
}

/* ---- space ---- */

uint32_t kv_ssd_shape(const struct kv_ssd *ssd, uint32_t *ret_segments)
{
    *ret_segments = ssd->segment_max;
    return ssd->pages_per_segment;
}

bool kv_ssd_present(const struct kv_ssd *ssd, uint32_t page)
{
    const uint32_t number = page / ssd->pages_per_segment;
    const uint64_t end = KV_SEGMENT_HEADER_BYTES +
                         (uint64_t)(page % ssd->pages_per_segment + 1) * ssd->place.page_bytes;
    return number < ssd->segment_max && ssd->segments[number].fd >= 0 &&
           end <= ssd->segments[number].valid_bytes;
}

kv_status kv_ssd_claim(struct kv_ssd *ssd, uint32_t page)
{
    if (!kv_ssd_present(ssd, page)) return KV_MISS;
    return kv_ssd_space_claim(&ssd->space, page);
}

bool kv_ssd_claimed(const struct kv_ssd *ssd, uint32_t page)
{
    return !kv_ssd_is_zeroing(ssd, page) && kv_ssd_space_used(&ssd->space, page);
}

static void take_pages(struct kv_ssd *ssd, uint32_t count, uint32_t *ret_pages)
{
    kv_ssd_space_alloc(&ssd->space, count, ret_pages);
    for (uint32_t i = 0; i < count; i++) {
        kv_ssd_space_soil(&ssd->space, ret_pages[i]);
        if (kv_ssd_is_written(ssd, ret_pages[i]))
            ssd->written_free--;
        else
            ssd->pages_behind++;
    }
}

kv_status kv_ssd_alloc(struct kv_ssd *ssd, uint32_t count, uint32_t *ret_pages,
                       struct kv_error *err)
{
    const uint32_t used = kv_ssd_in_use(ssd);
    assert(count > 0);
    if (kv_ssd_is_read_only(ssd))
        return KV_FAIL(err, KV_INVALID, "the SSD tier is read-only: %s", ssd->read_only_reason);
    const uint32_t gone = used + ssd->space.bad_count;
    if (gone > ssd->page_max || count > ssd->page_max - gone)
        return KV_FAIL(err, KV_BUSY,
                       "the SSD tier is full: %" PRIu32 " of %" PRIu32 " pages used, %" PRIu32
                       " quarantined",
                       used, ssd->page_max, ssd->space.bad_count);
    if (ssd->space.free_count >= count) {
        take_pages(ssd, count, ret_pages);
        return KV_OK;
    }
    const uint32_t soon = ssd->zeroing.active ? ssd->zeroing.count : 0;
    if (ssd->making || ssd->space.free_count + soon >= count) return KV_MISS;
    /* Holes below found files can leave fewer pages than page_max says. */
    if (kv_ssd_may_add(ssd)) kv_ssd_look_for_room(ssd);
    if (!kv_ssd_may_add(ssd))
        return KV_FAIL(err, KV_BUSY, "the SSD tier is full: %" PRIu32 " pages free%s",
                       ssd->space.free_count,
                       kv_ssd_room(ssd).is_bounded ? ", and its file system has no room" : "");
    if (!kv_ssd_make_another(ssd)) return KV_FAIL(err, KV_NOMEM, "make another SSD segment");
    return KV_MISS;
}

void kv_ssd_free(struct kv_ssd *ssd, uint32_t page)
{
    kv_ssd_space_free(&ssd->space, page);
    if (kv_ssd_space_quarantined(&ssd->space, page)) return;
    if (!kv_ssd_closed(ssd, page)) ssd->written_free += kv_ssd_is_written(ssd, page);
}

/* ---- segments that are emptied ---- */

uint32_t kv_ssd_segment_max(const struct kv_ssd *ssd)
{
    return ssd->segment_max;
}

struct kv_ssd_segment_use kv_ssd_segment_use(const struct kv_ssd *ssd, uint32_t number)
{
    const uint32_t first = number * ssd->pages_per_segment;
    assert(number < ssd->segment_max);
    if (ssd->segments[number].fd < 0) return (struct kv_ssd_segment_use){0};
    return (struct kv_ssd_segment_use){
        .pages = ssd->pages_per_segment,
        .used = kv_ssd_space_count(&ssd->space, first, ssd->pages_per_segment),
        .is_filling = ssd->space.lowest / ssd->pages_per_segment == number ||
                      kv_ssd_is_zeroing_in(ssd, number),
    };
}

/* Of the segment's free pages those that were written through. */
static uint32_t written_free(const struct kv_ssd *ssd, uint32_t first)
{
    uint32_t count = 0;
    for (uint32_t page = first; page < first + ssd->pages_per_segment; page++)
        count += kv_ssd_is_written(ssd, page) && !kv_ssd_space_used(&ssd->space, page) &&
                 !kv_ssd_space_quarantined(&ssd->space, page);
    return count;
}

void kv_ssd_segment_close(struct kv_ssd *ssd, uint32_t number)
{
    const uint32_t first = number * ssd->pages_per_segment;
    ssd->written_free -= written_free(ssd, first);
    kv_ssd_space_close(&ssd->space, first, ssd->pages_per_segment);
}

void kv_ssd_segments_open(struct kv_ssd *ssd)
{
    for (uint32_t i = 0; i < ssd->space.closed_count; i++) {
        const uint32_t first = ssd->space.closed[i].first;
        ssd->written_free += written_free(ssd, first);
        ssd->zero_segment = KV_MIN(ssd->zero_segment, first / ssd->pages_per_segment);
    }
    kv_ssd_space_open(&ssd->space);
}

bool kv_ssd_closed(const struct kv_ssd *ssd, uint32_t page)
{
    return kv_ssd_space_closed(&ssd->space, page);
}

kv_status kv_ssd_quarantine(struct kv_ssd *ssd, uint32_t page)
{
    const uint32_t free_before = ssd->space.free_count;
    const kv_status status = kv_ssd_space_quarantine(&ssd->space, page);
    if (ssd->space.free_count < free_before) ssd->written_free -= kv_ssd_is_written(ssd, page);
    return status;
}

bool kv_ssd_quarantined(const struct kv_ssd *ssd, uint32_t page)
{
    return kv_ssd_space_quarantined(&ssd->space, page);
}

void kv_ssd_place(const struct kv_ssd *ssd, uint32_t page, uint32_t *ret_segment,
                  uint64_t *ret_offset)
{
    *ret_segment = page / ssd->pages_per_segment;
    *ret_offset = kv_ssd_page_offset(ssd, page);
}

/* ---- pages ---- */

uint64_t kv_ssd_page_offset(const struct kv_ssd *ssd, uint32_t page)
{
    return KV_SEGMENT_HEADER_BYTES +
           (uint64_t)(page % ssd->pages_per_segment) * ssd->place.page_bytes;
}

void kv_ssd_mark_dirty(struct kv_ssd *ssd, uint32_t page)
{
    struct kv_ssd_segment *segment = &ssd->segments[page / ssd->pages_per_segment];
    if (segment->dirty) return;
    segment->dirty = true;
    ssd->dirty_count++;
}

/* A device that failed once is not asked to keep anything more; what it has is still read. */
void kv_ssd_refuse_writes(struct kv_ssd *ssd, const char *what, uint32_t number,
                          const struct kv_disk_op *op)
{
    if (kv_ssd_is_read_only(ssd)) return; /* The first cause is the one to tell. */
    (void)snprintf(ssd->read_only_reason, sizeof(ssd->read_only_reason),
                   "%s of segment-%06u.kv failed with errno %d; restart to go on", what,
                   (unsigned)number, op->sys_errno);
}

void kv_ssd_refuse(struct kv_ssd *ssd, const char *why)
{
    if (kv_ssd_is_read_only(ssd)) return;
    (void)snprintf(ssd->read_only_reason, sizeof(ssd->read_only_reason), "%s", why);
}

static void page_done(struct kv_disk_op *disk_op)
{
    struct kv_ssd_op *op = KV_CONTAINER_OF(disk_op, struct kv_ssd_op, disk_op);
    struct kv_ssd *ssd = op->ssd;
    const bool is_write = disk_op->call.verb == KV_DISK_WRITE;
    ssd->ops_inflight--;
    if (disk_op->status != KV_OK) {
        ssd->io_errors++;
        if (is_write)
            kv_ssd_refuse_writes(ssd, "write", op->page / ssd->pages_per_segment, disk_op);
    } else if (is_write) {
        ssd->pages_written++;
    } else {
        ssd->pages_read++;
    }
    if (is_write) kv_ssd_mark_dirty(ssd, op->page);
    op->done(op, disk_op->status);
}

static void page_start(struct kv_ssd *ssd, struct kv_ssd_op *op, enum kv_disk_verb verb)
{
    const uint32_t number = op->page / ssd->pages_per_segment;
    assert(number < ssd->segment_max);
    assert(ssd->segments[number].fd >= 0);
    assert((uintptr_t)op->buf % KV_IO_ALIGN == 0);

    op->ssd = ssd;
    op->disk_op = (struct kv_disk_op){
        .call = {.verb = verb,
                 .fd = ssd->segments[number].fd,
                 .buf = op->buf,
                 .bytes = ssd->place.page_bytes,
                 .offset = kv_ssd_page_offset(ssd, op->page)},
        .done = page_done,
    };
    ssd->ops_inflight++;
    kv_disk_start(ssd->disk, &op->disk_op);
}

void kv_ssd_read_start(struct kv_ssd *ssd, struct kv_ssd_op *op)
{
    page_start(ssd, op, KV_DISK_READ);
}

void kv_ssd_write_start(struct kv_ssd *ssd, struct kv_ssd_op *op)
{
    page_start(ssd, op, KV_DISK_WRITE);
}

static uint64_t bytes_limit(const struct kv_ssd *ssd)
{
    const uint32_t segments = KV_MAX(ssd->segments_allowed, ssd->segment_count);
    if (segments >= segments_configured(ssd)) return ssd->bytes_max;
    return segments * ssd->place.segment_bytes;
}

struct kv_ssd_usage kv_ssd_usage(const struct kv_ssd *ssd)
{
    const bool read_only = kv_ssd_is_read_only(ssd);
    return (struct kv_ssd_usage){
        .bytes_max = ssd->bytes_max,
        .bytes_limit = bytes_limit(ssd),
        .bytes_used = (uint64_t)kv_ssd_in_use(ssd) * ssd->place.page_bytes,
        .bytes_files = (uint64_t)ssd->segment_count * ssd->place.segment_bytes,
        .pages_free = ssd->space.free_count + ssd->space.used_count - kv_ssd_in_use(ssd),
        .pages_used = kv_ssd_in_use(ssd),
        .pages_closed = ssd->space.idle_count,
        .pages_quarantined = ssd->space.bad_count,
        .pages_read = ssd->pages_read,
        .pages_written = ssd->pages_written,
        .pages_ahead = ssd->pages_ahead,
        .pages_behind = ssd->pages_behind,
        .flushes = ssd->flushes,
        .io_errors = ssd->io_errors,
        .pages_erased = ssd->pages_erased,
        .pages_unerased = ssd->space.soiled_free +
                          (ssd->zeroing.active && ssd->zeroing.erases ? ssd->zeroing.count : 0),
        .segments_repaired = ssd->segments_repaired,
        .ops_inflight = ssd->ops_inflight,
        .read_only = read_only,
        .read_only_reason = read_only ? ssd->read_only_reason : NULL,
    };
}
