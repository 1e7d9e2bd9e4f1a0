/*
 * The superblock of a state directory on disk.
 *
 * It comes first: written under another name, synced, renamed and the directory synced, before the
 * manifest and the first segment are made.  So a directory that has those and no superblock is not
 * a new one interrupted by a crash; it is of the layout before version 1.  After that the file
 * changes only when a copy of it was damaged, or while there is no segment yet.
 */

#include "kvstore/store/directory.h"

#include "kvstore/base/bytes.h"
#include "kvstore/tier/ssd_segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

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

static bool has(const char *dir, const char *name)
{
    struct stat info;
    return stat(path_of(dir, name).text, &info) == 0;
}

static kv_status refuse_version(const char *dir, uint32_t version, struct kv_error *err)
{
    return KV_FAIL(err, KV_INVALID,
                   "state directory '%s' has layout version %" PRIu32
                   ", this build reads version %u: use %s build for it, or another state.dir",
                   dir, version, KV_LAYOUT_VERSION,
                   version < KV_LAYOUT_VERSION ? "the older" : "a newer");
}

/* What a short file lacks reads as damage. */
static kv_status read_file(const char *dir, uint8_t bytes[KV_SUPERBLOCK_BYTES],
                           struct kv_error *err)
{
    const struct path path = path_of(dir, file_name);
    uint32_t done = 0;
    ssize_t got = 1;

    memset(bytes, 0xff, KV_SUPERBLOCK_BYTES);
    const int fd = open(path.text, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return KV_MISS;
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open '%s'", path.text);
    while (got > 0 && done < KV_SUPERBLOCK_BYTES) {
        got = pread(fd, bytes + done, KV_SUPERBLOCK_BYTES - done, done);
        if (got > 0) done += (uint32_t)got;
    }
    const kv_status status = got < 0 ? KV_FAIL_ERRNO(err, KV_IO, "read '%s'", path.text) : KV_OK;
    (void)close(fd);
    return status;
}

kv_status kv_directory_read(const char *dir, struct kv_superblock *ret_superblock,
                            uint32_t *ret_damaged, struct kv_error *err)
{
    uint8_t bytes[KV_SUPERBLOCK_BYTES];
    uint32_t version = 0;
    kv_status status = read_file(dir, bytes, err);
    if (status == KV_MISS && !has(dir, "manifest") && !has(dir, "ssd")) return KV_MISS;
    if (status == KV_MISS) return refuse_version(dir, 0, err);
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

kv_status kv_directory_sync(const char *dir, struct kv_error *err)
{
    const struct path paths[] = {path_of(dir, "."), path_of(dir, "..")};
    for (size_t i = 0; i < KV_ARRAY_COUNT(paths); i++) {
        const int fd = open(paths[i].text, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        /* The parent may be closed to us: then its owner made our name, long ago. */
        if (fd < 0 && i > 0) continue;
        if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open directory '%s'", dir);
        const kv_status status =
            fsync(fd) == 0 ? KV_OK : KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", dir);
        (void)close(fd);
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

/* Whole and durable, or as before. */
static kv_status write_file(const char *dir, const struct kv_superblock *superblock,
                            struct kv_error *err)
{
    const struct path fresh = path_of(dir, new_name);
    uint8_t bytes[KV_SUPERBLOCK_BYTES];
    kv_superblock_encode(superblock, bytes);

    const int fd = open(fresh.text, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "make '%s'", fresh.text);
    errno = 0; /* A short write has none of its own. */
    kv_status status = KV_OK;
    if (pwrite(fd, bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes) || fsync(fd) != 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "write '%s'", fresh.text);
    (void)close(fd);
    if (status == KV_OK && rename(fresh.text, path_of(dir, file_name).text) != 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "rename '%s'", fresh.text);
    if (status == KV_OK) return kv_directory_sync(dir, err);
    (void)unlink(fresh.text);
    return status;
}

static kv_status make(const char *dir, const struct kv_superblock *want,
                      struct kv_superblock *ret_superblock, struct kv_error *err)
{
    struct kv_superblock superblock = *want;
    if (getrandom(superblock.id.bytes, sizeof(superblock.id.bytes), 0) !=
        (ssize_t)sizeof(superblock.id.bytes))
        return KV_FAIL_ERRNO(err, KV_IO, "draw an id for state directory '%s'", dir);
    const kv_status status = write_file(dir, &superblock, err);
    if (status == KV_OK) *ret_superblock = superblock;
    return status;
}

/* Without them nothing is stored, and the shape is still open: a start that found no room for the
 * first one must not tie the next to its settings. */
static bool has_segments(const char *dir)
{
    DIR *entries = opendir(path_of(dir, "ssd").text);
    if (entries == NULL) return errno != ENOENT;
    bool found = false;
    for (const struct dirent *entry; !found && (entry = readdir(entries)) != NULL;) {
        uint32_t number;
        found = kv_ssd_segment_parse(entry->d_name, &number);
    }
    (void)closedir(entries);
    return found;
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

kv_status kv_directory_open(const char *dir, const struct kv_superblock *want,
                            struct kv_superblock *ret_superblock, struct kv_error *err)
{
    struct kv_superblock superblock;
    uint32_t damaged = 0;
    kv_status status = kv_directory_read(dir, &superblock, &damaged, err);
    if (status == KV_MISS) return make(dir, want, ret_superblock, err);
    if (status != KV_OK) return status;
    status = compare(dir, &superblock, want, err);
    const bool reshape = status != KV_OK && !has_segments(dir);
    if (reshape) {
        superblock.page_bytes = want->page_bytes;
        superblock.window_tokens = want->window_tokens;
        superblock.segment_bytes = want->segment_bytes;
    } else if (status != KV_OK) {
        return status;
    }
    if (reshape || damaged > 0) status = write_file(dir, &superblock, err);
    if (status == KV_OK) *ret_superblock = superblock;
    return status;
}
