/*
 * What the store makes of a disk's results, and the calls themselves as the kernel knows them.
 *
 * Implementations move bytes and say what happened, once per try.  Continuing short transfers and
 * repeating interrupted ones is done here and nowhere else, above every wrapper, so that a test
 * that makes a try fail meets the same code as a device that does.
 */

#include "kvstore/base/disk.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define RETRIES_MAX 8u /* Without progress. */
#define NAMES_BYTES_FIRST (64ull << 10)

/* ---- results ---- */

static bool is_transfer(enum kv_disk_verb verb)
{
    return verb == KV_DISK_READ || verb == KV_DISK_WRITE;
}

static bool is_sync(enum kv_disk_verb verb)
{
    return verb == KV_DISK_SYNC || verb == KV_DISK_SYNC_DIR;
}

/* Nothing happened, and it may be asked for again.  A descriptor is gone after any close. */
static bool is_transient(enum kv_disk_verb verb, int64_t result)
{
    if (is_sync(verb) || verb == KV_DISK_CLOSE) return false;
    return result == -EINTR || result == -EAGAIN;
}

/* More than was asked for cannot have been done: nothing such a result says is believed. */
static int64_t believed(const struct kv_disk_call *call, int64_t result)
{
    const bool counts = is_transfer(call->verb) || is_sync(call->verb);
    return counts && result > (int64_t)call->bytes ? -EPROTO : result;
}

static void op_fail(struct kv_disk_op *op, int sys_errno)
{
    op->status = KV_IO;
    op->sys_errno = sys_errno;
}

/* Takes the result of one try.  False: go on with the rest. */
static bool op_advance(struct kv_disk_op *op, int64_t result)
{
    struct kv_disk_call *rest = &op->rest;
    if (is_transient(rest->verb, result) && op->retries < RETRIES_MAX) {
        op->retries++;
        return false;
    }
    if (result < 0) {
        /* A read that ended inside a block met the end of the file; O_DIRECT then calls the rest
         * misaligned.  The file is short, and that is what the owner should hear. */
        const bool is_short = result == -EINVAL && (op->call.bytes - rest->bytes) % 512 != 0;
        op_fail(op, is_short ? 0 : (int)-result);
        return true;
    }
    op->retries = 0;
    if (!is_transfer(rest->verb)) {
        op->fd = (int)result; /* Of CREATE; else 0. */
        return true;
    }
    rest->bytes -= (uint64_t)result;
    if (rest->bytes == 0) return true;
    if (result == 0) {
        op_fail(op, 0);
        return true;
    }
    rest->buf += result;
    rest->offset += (uint64_t)result;
    return false;
}

int64_t kv_disk_passed(struct kv_disk *disk, struct kv_disk_op *op, int64_t result)
{
    return disk->ops->passed == NULL ? result : disk->ops->passed(disk, op, result);
}

bool kv_disk_result(struct kv_disk_op *op, int64_t result)
{
    struct kv_disk *disk = op->disk; /* The outermost. */
    if (!op_advance(op, believed(&op->rest, kv_disk_passed(disk, op, result)))) {
        disk->ops->start(disk, op);
        return false;
    }
    assert(disk->inflight > 0);
    disk->inflight--;
    op->done(op); /* May start ops, this one included, or free the owner. */
    return true;
}

/* ---- for users ---- */

void kv_disk_destroy(struct kv_disk *disk)
{
    if (disk == NULL) return;
    assert(disk->inflight == 0);
    disk->ops->destroy(disk);
}

const char *kv_disk_backend(const struct kv_disk *disk)
{
    return disk->ops->name;
}

bool kv_disk_startable(enum kv_disk_verb verb)
{
    return is_transfer(verb) || is_sync(verb) || verb == KV_DISK_CREATE ||
           verb == KV_DISK_RESERVE || verb == KV_DISK_UNLINK;
}

void kv_disk_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    assert(op->done != NULL);
    assert(op->call.fd >= 0);
    assert(kv_disk_startable(op->call.verb));
    assert(!is_sync(op->call.verb) || op->call.bytes == 0);
    assert(!is_transfer(op->call.verb) || (op->call.buf != NULL && op->call.bytes > 0));
    op->status = KV_OK;
    op->sys_errno = 0;
    op->fd = -1;
    op->retries = 0;
    op->rest = op->call;
    op->disk = disk;
    disk->inflight++;
    disk->ops->start(disk, op);
}

uint32_t kv_disk_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    /* Nothing could ever wake it. */
    if (disk->inflight == 0 && wake_fd < 0 && timeout_ms < 0) return 0;
    return disk->ops->run(disk, wake_fd, timeout_ms);
}

uint32_t kv_disk_inflight(const struct kv_disk *disk)
{
    return disk->inflight;
}

int64_t kv_disk_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    struct kv_disk_call rest = *call;
    int64_t result;
    uint32_t retries = 0;
    for (;;) {
        result = believed(&rest, disk->ops->call(disk, &rest));
        if (is_transient(rest.verb, result) && retries++ < RETRIES_MAX) continue;
        if (!is_transfer(rest.verb) || result <= 0) break;
        retries = 0;
        rest.buf += result;
        rest.offset += (uint64_t)result;
        rest.bytes -= (uint64_t)result;
        if (rest.bytes == 0) break;
    }
    /* Part of a transfer counts, whatever ended it. */
    if (is_transfer(rest.verb) && rest.bytes < call->bytes)
        return (int64_t)(call->bytes - rest.bytes);
    if (result >= 0) return result;
    errno = (int)-result;
    return -1;
}

void kv_disk_close_file(struct kv_disk *disk, int fd)
{
    if (fd < 0) return;
    const struct kv_disk_call call = {.verb = KV_DISK_CLOSE, .fd = fd};
    (void)!kv_disk_call(disk, &call); /* Whatever it says, the descriptor is gone. */
}

int64_t kv_disk_names(struct kv_disk *disk, int dir_fd, char **ret_names)
{
    for (uint64_t room = NAMES_BYTES_FIRST; room <= KV_DISK_NAMES_BYTES_MAX; room *= 2) {
        uint8_t *names = malloc(room);
        if (names == NULL) {
            errno = ENOMEM;
            return -1;
        }
        const struct kv_disk_call list = {
            .verb = KV_DISK_LIST, .fd = dir_fd, .buf = names, .bytes = room};
        const int64_t used = kv_disk_call(disk, &list);
        if (used >= 0) {
            *ret_names = (char *)names;
            return used;
        }
        const int list_errno = errno;
        free(names);
        errno = list_errno;
        if (list_errno != ERANGE) return -1;
    }
    return -1;
}

void kv_disk_register(struct kv_disk *disk, uint8_t *buf, uint64_t bytes)
{
    assert(bytes > 0);
    if (disk->ops->register_buffer != NULL) disk->ops->register_buffer(disk, buf, bytes);
}

void kv_disk_forget(struct kv_disk *disk, const uint8_t *buf)
{
    assert(disk->inflight == 0);
    if (disk->ops->forget_buffer != NULL) disk->ops->forget_buffer(disk, buf);
}

struct kv_disk_facts kv_disk_facts(const struct kv_disk *disk)
{
    return disk->ops->facts == NULL ? (struct kv_disk_facts){0} : disk->ops->facts(disk);
}

/* ---- the kernel ---- */

static int64_t list_names(const struct kv_disk_call *call)
{
    /* Its own descriptor: a shared one would share the position in the list. */
    const int fd = openat(call->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (list == NULL) {
        const int kept = errno;
        if (fd >= 0) (void)close(fd);
        return -kept;
    }
    uint64_t used = 0;
    errno = 0;
    for (const struct dirent *entry; (entry = readdir(list)) != NULL; errno = 0) {
        const size_t bytes = strlen(entry->d_name) + 1;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (bytes > call->bytes - used) {
            errno = ERANGE;
            break;
        }
        memcpy(call->buf + used, entry->d_name, bytes);
        used += bytes;
    }
    const int kept = errno;
    (void)closedir(list);
    return kept != 0 ? -kept : (int64_t)used;
}

static int64_t file_size(int fd)
{
    struct stat info;
    return fstat(fd, &info) != 0 ? -1 : info.st_size;
}

static int64_t room_left(int fd)
{
    struct statvfs info;
    if (fstatvfs(fd, &info) != 0) return -1;
    return (int64_t)KV_MIN((uint64_t)info.f_bavail * info.f_frsize, (uint64_t)INT64_MAX);
}

static int64_t file_links(int fd)
{
    struct stat stat_of;
    return fstat(fd, &stat_of) == 0 ? (int64_t)stat_of.st_nlink : -1;
}

int kv_disk_flags(const struct kv_disk_call *call)
{
    return (call->read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC | (call->cached ? 0 : O_DIRECT) |
           (call->verb == KV_DISK_CREATE ? O_CREAT | O_EXCL : 0);
}

int64_t kv_disk_kernel(const struct kv_disk_call *call)
{
    int64_t result = -1;
    switch (call->verb) {
    case KV_DISK_READ:
        result = pread(call->fd, call->buf, call->bytes, (off_t)call->offset);
        break;
    case KV_DISK_WRITE:
        result = pwrite(call->fd, call->buf, call->bytes, (off_t)call->offset);
        break;
    case KV_DISK_SYNC:
        result = fdatasync(call->fd);
        break;
    case KV_DISK_OPEN_DIR:
        result = open(call->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        break;
    case KV_DISK_MAKE_DIR:
        result = mkdir(call->name, 0700);
        break;
    case KV_DISK_SYNC_DIR:
        result = fsync(call->fd);
        break;
    case KV_DISK_LIST:
        return list_names(call);
    case KV_DISK_OPEN:
        result = openat(call->fd, call->name, kv_disk_flags(call));
        break;
    case KV_DISK_CREATE:
        result = openat(call->fd, call->name, kv_disk_flags(call), 0600);
        break;
    case KV_DISK_UNLINK:
        result = unlinkat(call->fd, call->name, 0);
        break;
    case KV_DISK_RENAME:
        result = renameat(call->fd, call->name, call->fd, call->to);
        break;
    case KV_DISK_RESERVE:
        return -posix_fallocate(call->fd, 0, (off_t)call->bytes);
    case KV_DISK_SIZE:
        result = file_size(call->fd);
        break;
    case KV_DISK_ROOM:
        result = room_left(call->fd);
        break;
    case KV_DISK_LINKS:
        result = file_links(call->fd);
        break;
    case KV_DISK_CLOSE:
        result = close(call->fd);
        break;
    case KV_DISK_VERB_COUNT:
        return -EINVAL;
    }
    return result < 0 ? -errno : result;
}

static int64_t calls_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    (void)disk;
    return kv_disk_kernel(call);
}

struct kv_disk kv_disk_calls(void)
{
    static const struct kv_disk_ops ops = {.name = "calls", .call = calls_call};
    return (struct kv_disk){.ops = &ops};
}
