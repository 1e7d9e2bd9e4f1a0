/*
 * A look, every LOOK_MS: all descriptors of this process, by the names that /proc/self/fd has for
 * them.  That covers segments and RocksDB's files alike, whoever opened them, and asks no disk: the
 * kernel has the names of open files in memory.  A name that ends in " (deleted)", or that is not
 * the one the same file had before, is a file that the next start will not find.
 *
 * - RocksDB deletes its own files after it closed them, but a reader may hold one a moment longer:
 *   a file counts as gone when two looks in a row say so.
 * - The superblock and RocksDB's CURRENT are not open while the daemon runs, so the watch opens
 *   them, and again when another file has their name, which is how they are written.  This way
 *   they, too, can be copied from /proc/PID/fd when they were deleted.
 * - A descriptor may become another file between two calls: its name is read twice around its inode
 *   number, and believed if it is the same.
 *
 * Not noticed: a table of RocksDB that is not open.  Reading it fails then, which is another story.
 */

#include "cached/state_watch.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOOK_MS 1000
#define NAME_MAX_BYTES 64u /* "manifest/MANIFEST-000005" */
#define WHY_BYTES 128u
#define TELL_MAX 32u /* Lines of the log. */
#define FDS "/proc/self/fd"
#define DELETED " (deleted)"

/* By descriptor. */
struct seen {
    dev_t dev;
    ino_t ino;
    char name[NAME_MAX_BYTES]; /* Below the directory; empty: not a file that is watched. */
    unsigned gone_looks;       /* In a row. */
    bool told;
};

struct held {
    const char *name;
    int fd;
    ino_t ino;
};

struct state_watch {
    struct state_watch_options options;
    struct kv_thread thread;
    int wake_fd;

    /* The thread's. */
    int dir_fd;
    struct stat dir;
    char root[PATH_MAX]; /* The directory's name for the kernel, as of this look. */
    struct held held[2];
    struct seen *seen;
    uint32_t seen_count;
    uint32_t told;
    bool dir_told;
    char why_pages[WHY_BYTES], why_records[WHY_BYTES]; /* Empty: not yet. */
};

static bool ends_with(const char *text, const char *end)
{
    const size_t text_bytes = strlen(text), end_bytes = strlen(end);
    return text_bytes >= end_bytes && strcmp(text + text_bytes - end_bytes, end) == 0;
}

static bool is_page_file(const char *name)
{
    return strncmp(name, "ssd/segment-", 12) == 0;
}

/* What a start cannot do without. */
static bool is_watched(const char *name)
{
    if (strlen(name) >= NAME_MAX_BYTES) return false;
    if (is_page_file(name)) return ends_with(name, ".kv");
    if (strcmp(name, "superblock") == 0) return true;
    if (strncmp(name, "manifest/", 9) != 0) return false;
    return strcmp(name + 9, "CURRENT") == 0 || strncmp(name + 9, "MANIFEST-", 9) == 0 ||
           ends_with(name, ".log") || ends_with(name, ".sst");
}

/* false: the descriptor is closed. */
static bool read_link(int fd, char target[PATH_MAX])
{
    char path[sizeof(FDS) + 16];
    (void)snprintf(path, sizeof(path), FDS "/%d", fd);
    const ssize_t bytes = readlink(path, target, PATH_MAX - 1);
    if (bytes < 0) return false;
    target[bytes] = '\0';
    return true;
}

/* NULL: not below the directory. */
static const char *name_below(const struct state_watch *watch, const char *target)
{
    const size_t bytes = strlen(watch->root);
    if (strncmp(target, watch->root, bytes) != 0 || target[bytes] != '/') return NULL;
    return target + bytes + 1;
}

static void tell(struct state_watch *watch, const char *name, const char *how, int fd)
{
    char *why = is_page_file(name) ? watch->why_pages : watch->why_records;
    if (watch->told++ < TELL_MAX) {
        char copy[64] = "";
        if (fd >= 0)
            (void)snprintf(copy, sizeof(copy), " copy=\"/proc/%d/fd/%d\"", (int)getpid(), fd);
        kv_log(watch->options.log, KV_LOG_ERROR, "files_gone",
               "name=\"%s\" text=\"%s under the daemon: the next start will not find it, nothing "
               "more is acknowledged\"%s",
               name, how, copy);
    }
    if (why[0] != '\0') return; /* The first one is named. */
    (void)snprintf(why, WHY_BYTES, "%s was %s under the daemon; restart to go on",
                   is_page_file(name) ? name + 4 : name, how);
    watch->options.gone(watch->options.context, is_page_file(name), why);
}

static struct seen *seen_of(struct state_watch *watch, int fd)
{
    const uint32_t want = (uint32_t)fd + 1;
    if (want > watch->seen_count) {
        const uint32_t count = KV_MAX(want, 2 * watch->seen_count);
        struct seen *seen = realloc(watch->seen, count * sizeof(*seen));
        if (seen == NULL) return NULL; /* Not watched, this time. */
        memset(seen + watch->seen_count, 0, (count - watch->seen_count) * sizeof(*seen));
        watch->seen = seen;
        watch->seen_count = count;
    }
    return &watch->seen[fd];
}

static bool is_same(const struct seen *seen, const struct stat *info)
{
    return seen->name[0] != '\0' && seen->dev == info->st_dev && seen->ino == info->st_ino;
}

/* A file that has, or had, a watched name.  `name`: NULL, it has none now. */
static void judge(struct state_watch *watch, int fd, struct seen *seen, const struct stat *info,
                  const char *name, bool is_deleted)
{
    const bool was_same = is_same(seen, info);
    if (!was_same) {
        if (name == NULL) {
            seen->name[0] = '\0';
            return;
        }
        *seen = (struct seen){.dev = info->st_dev, .ino = info->st_ino};
        (void)snprintf(seen->name, sizeof(seen->name), "%s", name);
    }
    const bool is_moved = name == NULL || strcmp(name, seen->name) != 0;
    seen->gone_looks = is_moved || is_deleted ? seen->gone_looks + 1 : 0;
    if (seen->gone_looks < 2 || seen->told) return;
    seen->told = true;
    tell(watch, seen->name, is_deleted ? "deleted" : "moved", fd);
}

static void look_at(struct state_watch *watch, int fd)
{
    char target[PATH_MAX], again[PATH_MAX];
    struct stat info;
    struct seen *seen = seen_of(watch, fd);
    if (seen == NULL || !read_link(fd, target)) return;
    if (target[0] != '/' || (seen->name[0] == '\0' && name_below(watch, target) == NULL)) {
        seen->name[0] = '\0';
        return;
    }
    if (fstat(fd, &info) != 0 || !read_link(fd, again) || strcmp(target, again) != 0) return;
    const bool is_deleted = ends_with(target, DELETED) && info.st_nlink == 0;
    if (is_deleted) target[strlen(target) - strlen(DELETED)] = '\0';
    const char *name = name_below(watch, target);
    judge(watch, fd, seen, &info, name != NULL && is_watched(name) ? name : NULL, is_deleted);
}

static void look_at_all(struct state_watch *watch)
{
    DIR *list = opendir(FDS);
    if (list == NULL) return; /* No descriptor for it; the next look may have one. */
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
        const int fd = (int)strtol(entry->d_name, NULL, 10);
        if (fd != dirfd(list)) look_at(watch, fd);
    }
    (void)closedir(list);
}

/* Keeps the file open that has this name now. */
static void hold(struct state_watch *watch, struct held *held)
{
    struct stat info;
    if (fstatat(watch->dir_fd, held->name, &info, 0) != 0) return;
    if (held->fd >= 0 && held->ino == info.st_ino) return;
    const int fd = openat(watch->dir_fd, held->name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (held->fd >= 0) (void)close(held->fd);
    held->fd = fd;
    held->ino = fstat(fd, &info) == 0 ? info.st_ino : 0;
}

static void look_at_dir(struct state_watch *watch)
{
    struct stat info;
    if (watch->dir_told) return;
    const int rc = stat(watch->options.dir, &info);
    if (rc != 0 && errno != ENOENT && errno != ENOTDIR) return; /* It may be there. */
    if (rc == 0 && info.st_dev == watch->dir.st_dev && info.st_ino == watch->dir.st_ino) return;
    watch->dir_told = true;
    tell(watch, watch->options.dir, "moved or deleted", -1);
}

static void look(struct state_watch *watch)
{
    if (!read_link(watch->dir_fd, watch->root)) return;
    if (ends_with(watch->root, DELETED) && access(watch->root, F_OK) != 0)
        watch->root[strlen(watch->root) - strlen(DELETED)] = '\0';
    for (size_t i = 0; i < KV_ARRAY_COUNT(watch->held); i++)
        hold(watch, &watch->held[i]);
    look_at_all(watch);
    look_at_dir(watch);
}

static void watch_run(void *context)
{
    struct state_watch *watch = context;
    struct pollfd wake = {.fd = watch->wake_fd, .events = POLLIN};
    do {
        look(watch);
    } while (poll(&wake, 1, LOOK_MS) <= 0);
}

kv_status state_watch_start(const struct state_watch_options *options,
                            struct state_watch **ret_watch, struct kv_error *err)
{
    kv_status status;
    struct state_watch *watch = calloc(1, sizeof(*watch));
    if (watch == NULL) return KV_FAIL(err, KV_NOMEM, "watch the state directory");
    watch->options = *options;
    watch->held[0] = (struct held){.name = "superblock", .fd = -1};
    watch->held[1] = (struct held){.name = "manifest/CURRENT", .fd = -1};
    watch->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    watch->dir_fd = open(options->dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (watch->wake_fd < 0 || watch->dir_fd < 0 || fstat(watch->dir_fd, &watch->dir) != 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "watch '%s'", options->dir);
        goto fail;
    }
    if (!read_link(watch->dir_fd, watch->root))
        kv_log(options->log, KV_LOG_WARN, "state_unwatched",
               "text=\"" FDS ": %s: files of the state directory that somebody deletes will not be "
               "missed before the next start\"",
               strerror(errno));
    status = kv_thread_start(&watch->thread, KV_THREAD_WATCH, "kv-watch", watch_run, watch, err);
    if (status != KV_OK) goto fail;
    *ret_watch = watch;
    return KV_OK;

fail:
    state_watch_destroy(watch);
    return status;
}

void state_watch_destroy(struct state_watch *watch)
{
    if (watch == NULL) return;
    if (watch->thread.started) {
        const int rc = eventfd_write(watch->wake_fd, 1);
        assert(rc == 0);
        kv_thread_join(&watch->thread);
    }
    for (size_t i = 0; i < KV_ARRAY_COUNT(watch->held); i++) {
        if (watch->held[i].fd >= 0) (void)close(watch->held[i].fd);
    }
    if (watch->wake_fd >= 0) (void)close(watch->wake_fd);
    if (watch->dir_fd >= 0) (void)close(watch->dir_fd);
    free(watch->seen);
    free(watch);
}
