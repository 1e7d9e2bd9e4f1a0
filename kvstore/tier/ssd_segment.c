/*
 * One preallocated file on the SSD tier, as a start finds it.
 *
 * Its blocks were reserved before the first page was written, so a full disk shows when a segment
 * is made and never in the middle of a page.  Order of making (ssd_make.c): reserve, header,
 * fdatasync, fsync of the directory.  A crash before the header leaves zeros (or no bytes), which
 * open() takes for a segment still to be completed, in that order; a crash before the directory's
 * fsync may lose the name, and with it only pages no record can point to yet.
 */

#include "kvstore/tier/ssd_segment.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/format/superblock.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct name {
    char text[KV_SSD_SEGMENT_NAME_BYTES];
};

void kv_ssd_segment_name(uint32_t number, char name[KV_SSD_SEGMENT_NAME_BYTES])
{
    assert(number <= KV_SSD_SEGMENT_NUMBER_MAX);
    (void)snprintf(name, KV_SSD_SEGMENT_NAME_BYTES, "segment-%06" PRIu32 ".kv", number);
}

static struct name name_of(uint32_t number)
{
    struct name name;
    kv_ssd_segment_name(number, name.text);
    return name;
}

bool kv_ssd_segment_parse(const char *name, uint32_t *ret_number)
{
    static const char prefix[] = "segment-";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0) return false;
    const char *digits = name + sizeof(prefix) - 1;
    uint32_t number = 0;
    for (int i = 0; i < 6; i++) {
        if (digits[i] < '0' || digits[i] > '9') return false;
        number = number * 10 + (uint32_t)(digits[i] - '0');
    }
    if (strcmp(digits + 6, ".kv") != 0) return false;
    *ret_number = number;
    return true;
}

void kv_ssd_segment_header(const struct kv_ssd_place *place, uint32_t number, uint8_t *bytes)
{
    const struct kv_segment_header header = {
        .segment_bytes = place->segment_bytes,
        .page_bytes = place->page_bytes,
        .number = number,
        .directory = place->directory,
    };
    kv_segment_header_encode(&header, bytes);
}

static kv_status write_header(const struct kv_ssd_place *place, const char *name, uint32_t number,
                              int fd, uint8_t *bytes, struct kv_error *err)
{
    kv_ssd_segment_header(place, number, bytes);
    const struct kv_disk_call write = {
        .verb = KV_DISK_WRITE, .fd = fd, .buf = bytes, .bytes = KV_SEGMENT_HEADER_BYTES};
    const struct kv_disk_call sync = {.verb = KV_DISK_SYNC, .fd = fd};
    errno = 0; /* A short write has none of its own. */
    if (kv_disk_call(place->disk, &write) != KV_SEGMENT_HEADER_BYTES)
        return KV_FAIL_ERRNO(err, KV_IO, "write the header of '%s/%s'", place->dir, name);
    if (kv_disk_call(place->disk, &sync) < 0)
        return KV_FAIL_ERRNO(err, KV_IO, "sync '%s/%s'", place->dir, name);
    return KV_OK;
}

/* Reserve, header, durable name. */
static kv_status complete(const struct kv_ssd_place *place, const char *name, uint32_t number,
                          int fd, struct kv_error *err)
{
    const struct kv_disk_call reserve = {
        .verb = KV_DISK_RESERVE, .fd = fd, .bytes = place->segment_bytes};
    const struct kv_disk_call sync_dir = {.verb = KV_DISK_SYNC_DIR, .fd = place->dir_fd};
    if (kv_disk_call(place->disk, &reserve) < 0)
        return KV_FAIL_ERRNO(err, KV_IO, "reserve %" PRIu64 " B for '%s/%s'", place->segment_bytes,
                             place->dir, name);

    uint8_t *bytes = aligned_alloc(KV_IO_ALIGN, KV_SEGMENT_HEADER_BYTES);
    if (bytes == NULL) return KV_FAIL(err, KV_NOMEM, "make '%s/%s'", place->dir, name);
    const kv_status status = write_header(place, name, number, fd, bytes, err);
    free(bytes);
    if (status != KV_OK) return status;

    if (kv_disk_call(place->disk, &sync_dir) < 0)
        return KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", place->dir);
    return KV_OK;
}

static kv_status open_file(const struct kv_ssd_place *place, const char *name, int *ret_fd,
                           struct kv_error *err)
{
    const struct kv_disk_call open = {.verb = KV_DISK_OPEN, .fd = place->dir_fd, .name = name};
    const int fd = (int)kv_disk_call(place->disk, &open);
    if (fd < 0 && errno == EINVAL)
        return KV_FAIL_ERRNO(err, KV_IO, "the file system of '%s' has no O_DIRECT", place->dir);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open '%s/%s'", place->dir, name);
    *ret_fd = fd;
    return KV_OK;
}

static kv_status check_header(const struct kv_ssd_place *place, const char *name, uint32_t number,
                              const uint8_t *bytes, struct kv_error *err)
{
    struct kv_segment_header header;
    uint32_t version = 0;
    const kv_status status = kv_segment_header_decode(bytes, &header, &version);
    if (status == KV_INVALID)
        return KV_FAIL(err, KV_INVALID,
                       "'%s/%s' has layout version %" PRIu32 ", this build reads version %u: take "
                       "it out of the directory",
                       place->dir, name, version, KV_LAYOUT_VERSION);
    if (status != KV_OK) return status;
    if (!kv_id_equal(header.directory.bytes, place->directory.bytes))
        return KV_FAIL(err, KV_INVALID,
                       "'%s/%s' belongs to another state directory: take it out of this one",
                       place->dir, name);
    if (header.page_bytes != place->page_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "'%s/%s' was made for pages of %" PRIu32 " B (another model); this model's "
                       "have %" PRIu32 " B",
                       place->dir, name, header.page_bytes, place->page_bytes);
    if (header.segment_bytes != place->segment_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "'%s/%s' was made with segments of %" PRIu64 " B; configured are %" PRIu64
                       " B",
                       place->dir, name, header.segment_bytes, place->segment_bytes);
    if (header.number != number)
        return KV_FAIL(err, KV_INVALID, "'%s/%s' is segment %" PRIu32 " under another name",
                       place->dir, name, header.number);
    return KV_OK;
}

/* KV_MISS: nothing was ever stored in it; KV_CORRUPT: its header says nothing. */
static kv_status read_and_check(const struct kv_ssd_place *place, const char *name, uint32_t number,
                                int fd, uint64_t *ret_file_bytes, struct kv_error *err)
{
    const struct kv_disk_call look = {.verb = KV_DISK_SIZE, .fd = fd};
    const int64_t size = kv_disk_call(place->disk, &look);
    if (size < 0) return KV_FAIL_ERRNO(err, KV_IO, "look at '%s/%s'", place->dir, name);
    *ret_file_bytes = (uint64_t)size;
    if (size == 0) return KV_MISS;

    uint8_t *bytes = aligned_alloc(KV_IO_ALIGN, KV_SEGMENT_HEADER_BYTES);
    if (bytes == NULL) return KV_FAIL(err, KV_NOMEM, "open '%s/%s'", place->dir, name);
    kv_status status;
    const struct kv_disk_call read = {
        .verb = KV_DISK_READ, .fd = fd, .buf = bytes, .bytes = KV_SEGMENT_HEADER_BYTES};
    const int64_t got = kv_disk_call(place->disk, &read);
    if (got < 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "read the header of '%s/%s'", place->dir, name);
    } else {
        /* What a cut file lacks decodes as no header of ours. */
        memset(bytes + got, 0xff, KV_SEGMENT_HEADER_BYTES - (size_t)got);
        status = check_header(place, name, number, bytes, err);
    }
    free(bytes);
    return status;
}

kv_status kv_ssd_segment_open(const struct kv_ssd_place *place, uint32_t number, int *ret_fd,
                              uint64_t *ret_valid_bytes, bool *ret_repaired, struct kv_error *err)
{
    const struct name name = name_of(number);
    uint64_t file_bytes = 0;
    int fd = -1;
    kv_status status = open_file(place, name.text, &fd, err);
    if (status != KV_OK) goto fail;
    status = read_and_check(place, name.text, number, fd, &file_bytes, err);
    const bool empty = status == KV_MISS;
    const bool whole = status == KV_OK && file_bytes >= place->segment_bytes;
    if (status == KV_MISS || status == KV_CORRUPT || (status == KV_OK && !whole))
        status = complete(place, name.text, number, fd, err);
    if (status != KV_OK) goto fail;
    *ret_fd = fd;
    *ret_valid_bytes = empty ? 0 : file_bytes;
    *ret_repaired = !whole;
    return KV_OK;

fail:
    kv_disk_close_file(place->disk, fd);
    return status;
}
