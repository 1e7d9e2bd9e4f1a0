/*
 * The superblock of a state directory on disk.
 *
 * It comes first: written under another name, synced, renamed and the directory synced, before the
 * manifest and the first segment are made.  So a directory that has those and no superblock is not
 * a new one interrupted by a crash; it is of the layout before version 1.  After that the file
 * changes only when a copy of it was damaged, while there is no segment yet, or when the directory
 * gets a feature or another master key.
 */

#include "kvstore/store/directory.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/tier/ssd_segment.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define PATH_BYTES 512u

static const char file_name[] = "superblock";
static const char new_name[] = "superblock.new";

struct path {
    char text[PATH_BYTES];
};

static struct path path_of(const char *dir, const char *name)
{
    struct path path;
    (void)snprintf(path.text, sizeof(path.text), "%s/%s", dir, name);
    return path;
}

/* The folder with everything that is done in it. */
struct folder {
    struct kv_disk *disk;
    const char *dir;
    int fd;
    int sys_errno; /* Of a folder that did not open. */
};

static kv_status folder_open(struct kv_disk *disk, const char *dir, struct folder *ret_folder,
                             struct kv_error *err)
{
    const struct kv_disk_call open = {.verb = KV_DISK_OPEN_DIR, .name = dir};
    *ret_folder = (struct folder){.disk = disk, .dir = dir, .fd = (int)kv_disk_call(disk, &open)};
    ret_folder->sys_errno = errno;
    return ret_folder->fd >= 0 ? KV_OK : KV_FAIL_ERRNO(err, KV_IO, "open directory '%s'", dir);
}

static void folder_close(struct folder *folder)
{
    kv_disk_close_file(folder->disk, folder->fd);
}

/* What a call in it says. */
static int64_t folder_call(const struct folder *folder, enum kv_disk_verb verb, const char *name,
                           const char *to)
{
    const struct kv_disk_call call = {
        .verb = verb, .fd = folder->fd, .name = name, .to = to, .cached = true};
    return kv_disk_call(folder->disk, &call);
}

/* KV_OK: it has a folder of that name; KV_MISS. */
static kv_status has_folder(struct kv_disk *disk, const char *dir, const char *name,
                            struct kv_error *err)
{
    const struct path path = path_of(dir, name);
    const struct kv_disk_call open = {.verb = KV_DISK_OPEN_DIR, .name = path.text};
    const int fd = (int)kv_disk_call(disk, &open);
    if (fd < 0 && errno == ENOENT) return KV_MISS;
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open directory '%s'", path.text);
    kv_disk_close_file(disk, fd);
    return KV_OK;
}

static kv_status refuse_version(const char *dir, uint32_t version, struct kv_error *err)
{
    return KV_FAIL(err, KV_INVALID,
                   "state directory '%s' has layout version %" PRIu32
                   ", this build reads version %u: use %s build for it, or another state.dir",
                   dir, version, KV_LAYOUT_VERSION,
                   version < KV_LAYOUT_VERSION ? "the older" : "a newer");
}

/* What a short file lacks reads as damage.  KV_MISS: there is none. */
static kv_status read_file(const struct folder *folder, uint8_t bytes[KV_SUPERBLOCK_BYTES],
                           struct kv_error *err)
{
    const struct kv_disk_call open = {.verb = KV_DISK_OPEN,
                                      .fd = folder->fd,
                                      .name = file_name,
                                      .cached = true,
                                      .read_only = true};
    memset(bytes, 0xff, KV_SUPERBLOCK_BYTES);
    const int fd = (int)kv_disk_call(folder->disk, &open);
    if (fd < 0 && errno == ENOENT) return KV_MISS;
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open '%s/%s'", folder->dir, file_name);
    const struct kv_disk_call size = {.verb = KV_DISK_SIZE, .fd = fd};
    const struct kv_disk_call read = {
        .verb = KV_DISK_READ, .fd = fd, .buf = bytes, .bytes = KV_SUPERBLOCK_BYTES};
    const int64_t there = kv_disk_call(folder->disk, &size);
    const int64_t got = there < 0 ? -1 : kv_disk_call(folder->disk, &read);
    kv_status status = KV_OK;
    if (there < 0 || got < KV_MIN(there, (int64_t)KV_SUPERBLOCK_BYTES))
        status = KV_FAIL_ERRNO(err, KV_IO, "read '%s/%s'", folder->dir, file_name);
    kv_disk_close_file(folder->disk, fd);
    return status;
}

/* Without a superblock: a new directory, if nothing else of a store is there. */
static kv_status judge_absent(struct kv_disk *disk, const char *dir, struct kv_error *err)
{
    static const char *const names[] = {"manifest", "ssd"};
    for (size_t i = 0; i < KV_ARRAY_COUNT(names); i++) {
        const kv_status status = has_folder(disk, dir, names[i], err);
        if (status == KV_OK) return refuse_version(dir, 0, err);
        if (status != KV_MISS) return status;
    }
    return KV_MISS;
}

kv_status kv_directory_read(struct kv_disk *disk, const char *dir,
                            struct kv_superblock *ret_superblock, uint32_t *ret_damaged,
                            struct kv_error *err)
{
    _Alignas(KV_IO_ALIGN) uint8_t bytes[KV_SUPERBLOCK_BYTES];
    uint32_t version = 0;
    struct folder folder;
    kv_status status = folder_open(disk, dir, &folder, err);
    if (status != KV_OK) return folder.sys_errno == ENOENT ? KV_MISS : status;
    status = read_file(&folder, bytes, err);
    folder_close(&folder);
    if (status == KV_MISS) return judge_absent(disk, dir, err);
    if (status != KV_OK) return status;

    struct kv_superblock superblock;
    status = kv_superblock_decode(bytes, &superblock, &version, ret_damaged);
    if (status == KV_INVALID) return refuse_version(dir, version, err);
    if (status != KV_OK)
        return KV_FAIL(err, KV_CORRUPT,
                       "both copies of '%s/%s' are damaged: put that file back from a copy, or use "
                       "another state.dir",
                       dir, file_name);
    if ((superblock.features & ~KV_FEATURES_KNOWN) != 0)
        return KV_FAIL(err, KV_INVALID,
                       "state directory '%s' has features 0x%" PRIx64
                       ", this build knows 0x%llx: use the build that added them, or another "
                       "state.dir",
                       dir, superblock.features, KV_FEATURES_KNOWN);
    *ret_superblock = superblock;
    return KV_OK;
}

/* Makes the names in it, and its own, durable. */
static kv_status sync_names(const struct folder *folder, struct kv_error *err)
{
    const struct path up = path_of(folder->dir, "..");
    struct folder parent;
    if (folder_call(folder, KV_DISK_SYNC_DIR, NULL, NULL) < 0)
        return KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", folder->dir);
    /* The parent may be closed to us: then its owner made our name, long ago. */
    if (folder_open(folder->disk, up.text, &parent, NULL) != KV_OK) return KV_OK;
    kv_status status = KV_OK;
    if (folder_call(&parent, KV_DISK_SYNC_DIR, NULL, NULL) < 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", up.text);
    folder_close(&parent);
    return status;
}

/* The new file, whole and flushed. */
static kv_status write_new(const struct folder *folder, uint8_t bytes[KV_SUPERBLOCK_BYTES],
                           struct kv_error *err)
{
    if (folder_call(folder, KV_DISK_UNLINK, new_name, NULL) < 0 && errno != ENOENT)
        return KV_FAIL_ERRNO(err, KV_IO, "remove '%s/%s'", folder->dir, new_name);
    const int fd = (int)folder_call(folder, KV_DISK_CREATE, new_name, NULL);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "make '%s/%s'", folder->dir, new_name);
    const struct kv_disk_call write = {
        .verb = KV_DISK_WRITE, .fd = fd, .buf = bytes, .bytes = KV_SUPERBLOCK_BYTES};
    const struct kv_disk_call sync = {.verb = KV_DISK_SYNC, .fd = fd};
    kv_status status = KV_OK;
    errno = 0; /* A short write has none of its own. */
    if (kv_disk_call(folder->disk, &write) != KV_SUPERBLOCK_BYTES ||
        kv_disk_call(folder->disk, &sync) < 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "write '%s/%s'", folder->dir, new_name);
    kv_disk_close_file(folder->disk, fd);
    return status;
}

/* Whole and durable, or as before. */
static kv_status write_file(struct kv_disk *disk, const char *dir,
                            const struct kv_superblock *superblock, struct kv_error *err)
{
    _Alignas(KV_IO_ALIGN) uint8_t bytes[KV_SUPERBLOCK_BYTES];
    struct folder folder;
    kv_status status = folder_open(disk, dir, &folder, err);
    if (status != KV_OK) return status;
    kv_superblock_encode(superblock, bytes);
    status = write_new(&folder, bytes, err);
    if (status == KV_OK && folder_call(&folder, KV_DISK_RENAME, new_name, file_name) < 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "rename '%s/%s'", dir, new_name);
    if (status == KV_OK)
        status = sync_names(&folder, err);
    else
        (void)folder_call(&folder, KV_DISK_UNLINK, new_name, NULL);
    folder_close(&folder);
    return status;
}

static kv_status make(struct kv_disk *disk, const char *dir, const struct kv_superblock *want,
                      struct kv_superblock *ret_superblock, struct kv_error *err)
{
    static const struct kv_directory_id none;
    struct kv_superblock superblock = *want;
    if (kv_id_equal(want->id.bytes, none.bytes) &&
        getrandom(superblock.id.bytes, sizeof(superblock.id.bytes), 0) !=
            (ssize_t)sizeof(superblock.id.bytes))
        return KV_FAIL_ERRNO(err, KV_IO, "draw an id for state directory '%s'", dir);
    const kv_status status = write_file(disk, dir, &superblock, err);
    if (status == KV_OK) *ret_superblock = superblock;
    return status;
}

/* All names in the folder, each with its zero; *ret_bytes of them.  The caller frees them. */
static kv_status list_names(struct kv_disk *disk, const char *dir, char **ret_names,
                            uint64_t *ret_bytes, struct kv_error *err)
{
    struct folder folder;
    kv_status status = folder_open(disk, dir, &folder, err);
    if (status != KV_OK) return status;
    const int64_t got = kv_disk_names(disk, folder.fd, ret_names);
    if (got < 0) status = KV_FAIL_ERRNO(err, KV_IO, "list directory '%s'", dir);
    folder_close(&folder);
    *ret_bytes = got < 0 ? 0 : (uint64_t)got;
    return status;
}

/* Without them nothing is stored, and the shape is still open: a start that found no room for the
 * first one must not tie the next to its settings. */
static kv_status has_segments(struct kv_disk *disk, const char *dir, bool *ret_found,
                              struct kv_error *err)
{
    const struct path path = path_of(dir, "ssd");
    char *names = NULL;
    uint64_t bytes = 0;
    *ret_found = false;
    kv_status status = has_folder(disk, dir, "ssd", err);
    if (status == KV_MISS) return KV_OK;
    if (status == KV_OK) status = list_names(disk, path.text, &names, &bytes, err);
    for (uint64_t at = 0; at < bytes; at += strlen(names + at) + 1) {
        uint32_t number;
        *ret_found |= kv_ssd_segment_parse(names + at, &number);
    }
    free(names);
    return status;
}

static kv_status compare(const char *dir, const struct kv_superblock *found,
                         const struct kv_superblock *want, struct kv_error *err)
{
    if (found->page_bytes != want->page_bytes || found->window_tokens != want->window_tokens)
        return KV_FAIL(err, KV_INVALID,
                       "state directory '%s' was made for another model shape (page %" PRIu32
                       " B, window %" PRIu32 "; this model: page %" PRIu32 " B, window %" PRIu32
                       "): use another state.dir",
                       dir, found->page_bytes, found->window_tokens, want->page_bytes,
                       want->window_tokens);
    if (found->segment_bytes != want->segment_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "state directory '%s' was made with segments of %" PRIu64
                       " B; configured are %" PRIu64 " B: set ssd.segment_bytes back, or use "
                       "another state.dir",
                       dir, found->segment_bytes, want->segment_bytes);
    return KV_OK;
}

kv_status kv_directory_open(struct kv_disk *disk, const char *dir, const struct kv_superblock *want,
                            struct kv_superblock *ret_superblock, struct kv_error *err)
{
    struct kv_superblock superblock;
    struct kv_error other;
    uint32_t damaged = 0;
    bool bound = true;
    kv_status status = kv_directory_read(disk, dir, &superblock, &damaged, err);
    if (status == KV_MISS) return make(disk, dir, want, ret_superblock, err);
    if (status != KV_OK) return status;
    const kv_status same = compare(dir, &superblock, want, &other);
    if (same != KV_OK) {
        status = has_segments(disk, dir, &bound, err);
        if (status != KV_OK) return status;
        if (bound) return compare(dir, &superblock, want, err);
        superblock.page_bytes = want->page_bytes;
        superblock.window_tokens = want->window_tokens;
        superblock.segment_bytes = want->segment_bytes;
    }
    if (same != KV_OK || damaged > 0) status = write_file(disk, dir, &superblock, err);
    if (status == KV_OK) *ret_superblock = superblock;
    return status;
}

kv_status kv_directory_replace(struct kv_disk *disk, const char *dir,
                               const struct kv_superblock *next, struct kv_superblock *superblock,
                               struct kv_error *err)
{
    const kv_status status = write_file(disk, dir, next, err);
    if (status == KV_OK) *superblock = *next;
    return status;
}

kv_status kv_directory_add_feature(struct kv_disk *disk, const char *dir, uint64_t feature,
                                   struct kv_superblock *superblock, struct kv_error *err)
{
    struct kv_superblock next = *superblock;
    next.features |= feature;
    return kv_directory_replace(disk, dir, &next, superblock, err);
}
