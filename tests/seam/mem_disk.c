/*
 * A disk in memory.
 *
 * An op takes effect when it finishes, in one piece; what a crash in between leaves is not decided
 * here but from the record of calls (image.c).
 */

#include "tests/seam/mem_disk.h"

#include "kvstore/base/bytes.h"
#include "tests/driver/random.h"

#include <assert.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIRS_MAX 8u
#define FILES_MAX 512u
#define HANDLES_MAX 512u
#define OPS_MAX 4096u
#define NAME_BYTES_MAX 64u
#define FD_FIRST 100 /* So that one is not taken for the process's own. */
#define SECTOR_BYTES 512u
#define ROOM_BYTES (1ll << 50)

struct file {
    char name[NAME_BYTES_MAX];
    uint32_t dir;
    bool linked;
    uint8_t *bytes;
    uint64_t size;
};

struct handle {
    bool open;
    bool is_dir;
    uint32_t index;
};

struct mem_disk {
    struct kv_disk disk;
    struct ex_random random;
    char dirs[DIRS_MAX][256];
    uint32_t dir_count;
    struct file files[FILES_MAX];
    uint32_t file_count;
    struct handle handles[HANDLES_MAX];
    struct kv_disk_op *ops[OPS_MAX];
    uint32_t op_count;
};

static struct mem_disk *mem_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct mem_disk, disk);
}

static void *must(void *memory)
{
    assert(memory != NULL); /* Of a test that is out of memory nothing else can be said. */
    return memory;
}

/* ---- names and handles ---- */

static int64_t dir_find(const struct mem_disk *mem, const char *path)
{
    for (uint32_t i = 0; i < mem->dir_count; i++)
        if (strcmp(mem->dirs[i], path) == 0) return i;
    return -ENOENT;
}

static int64_t dir_make(struct mem_disk *mem, const char *path)
{
    if (dir_find(mem, path) >= 0) return -EEXIST;
    assert(mem->dir_count < DIRS_MAX && strlen(path) < sizeof(mem->dirs[0]));
    (void)snprintf(mem->dirs[mem->dir_count++], sizeof(mem->dirs[0]), "%s", path);
    return 0;
}

static int64_t file_find(const struct mem_disk *mem, uint32_t dir, const char *name)
{
    for (uint32_t i = 0; i < mem->file_count; i++) {
        const struct file *file = &mem->files[i];
        if (file->linked && file->dir == dir && strcmp(file->name, name) == 0) return i;
    }
    return -ENOENT;
}

static struct file *file_make(struct mem_disk *mem, uint32_t dir, const char *name)
{
    assert(mem->file_count < FILES_MAX && strlen(name) < NAME_BYTES_MAX);
    struct file *file = &mem->files[mem->file_count++];
    *file = (struct file){.dir = dir, .linked = true};
    (void)snprintf(file->name, sizeof(file->name), "%s", name);
    return file;
}

static int64_t handle_open(struct mem_disk *mem, bool is_dir, int64_t index)
{
    if (index < 0) return index;
    for (uint32_t i = 0; i < HANDLES_MAX; i++) {
        if (mem->handles[i].open) continue;
        mem->handles[i] = (struct handle){.open = true, .is_dir = is_dir, .index = (uint32_t)index};
        return FD_FIRST + i;
    }
    return -EMFILE;
}

static struct handle *handle_of(struct mem_disk *mem, int fd, bool is_dir)
{
    const int i = fd - FD_FIRST;
    if (i < 0 || i >= (int)HANDLES_MAX || !mem->handles[i].open) return NULL;
    return mem->handles[i].is_dir == is_dir ? &mem->handles[i] : NULL;
}

/* ---- calls ---- */

static void file_grow(struct file *file, uint64_t size)
{
    if (size <= file->size) return;
    file->bytes = must(realloc(file->bytes, size));
    memset(file->bytes + file->size, 0, size - file->size);
    file->size = size;
}

static int64_t transfer(struct file *file, const struct kv_disk_call *call)
{
    if (call->bytes % SECTOR_BYTES != 0 || call->offset % SECTOR_BYTES != 0) return -EINVAL;
    if (call->verb == KV_DISK_WRITE) {
        file_grow(file, call->offset + call->bytes);
        memcpy(file->bytes + call->offset, call->buf, call->bytes);
        return (int64_t)call->bytes;
    }
    if (call->offset >= file->size) return 0;
    const uint64_t bytes = KV_MIN(call->bytes, file->size - call->offset);
    memcpy(call->buf, file->bytes + call->offset, bytes);
    return (int64_t)bytes;
}

static int64_t list(const struct mem_disk *mem, uint32_t dir, const struct kv_disk_call *call)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < mem->file_count; i++) {
        const struct file *file = &mem->files[i];
        const size_t bytes = strlen(file->name) + 1;
        if (!file->linked || file->dir != dir) continue;
        if (bytes > call->bytes - used) return -ERANGE;
        memcpy(call->buf + used, file->name, bytes);
        used += bytes;
    }
    return (int64_t)used;
}

static int64_t file_call(struct mem_disk *mem, const struct kv_disk_call *call)
{
    struct handle *handle = handle_of(mem, call->fd, false);
    if (call->verb == KV_DISK_CLOSE && handle == NULL) handle = handle_of(mem, call->fd, true);
    if (handle == NULL) return -EBADF;
    struct file *file = &mem->files[handle->index];
    switch (call->verb) {
    case KV_DISK_READ:
    case KV_DISK_WRITE:
        return transfer(file, call);
    case KV_DISK_SYNC:
        return 0;
    case KV_DISK_RESERVE:
        file_grow(file, call->bytes);
        return 0;
    case KV_DISK_SIZE:
        return (int64_t)file->size;
    case KV_DISK_LINKS:
        return file->linked ? 1 : 0;
    default:
        assert(call->verb == KV_DISK_CLOSE);
        handle->open = false;
        return 0;
    }
}

static int64_t file_rename(struct mem_disk *mem, uint32_t dir, int64_t found, const char *to)
{
    const int64_t old = file_find(mem, dir, to);
    if (found < 0) return found;
    if (old >= 0 && old != found) mem->files[old].linked = false;
    assert(strlen(to) < NAME_BYTES_MAX);
    (void)snprintf(mem->files[found].name, NAME_BYTES_MAX, "%s", to);
    return 0;
}

static int64_t dir_call(struct mem_disk *mem, const struct kv_disk_call *call)
{
    const struct handle *handle = handle_of(mem, call->fd, true);
    if (handle == NULL) return -EBADF;
    const int64_t found = call->name == NULL ? -ENOENT : file_find(mem, handle->index, call->name);
    switch (call->verb) {
    case KV_DISK_SYNC_DIR:
        return 0;
    case KV_DISK_ROOM:
        return ROOM_BYTES;
    case KV_DISK_LIST:
        return list(mem, handle->index, call);
    case KV_DISK_OPEN:
        return handle_open(mem, false, found);
    case KV_DISK_CREATE:
        if (found >= 0) return -EEXIST;
        return handle_open(mem, false, file_make(mem, handle->index, call->name) - mem->files);
    case KV_DISK_RENAME:
        return file_rename(mem, handle->index, found, call->to);
    default:
        assert(call->verb == KV_DISK_UNLINK);
        if (found < 0) return found;
        mem->files[found].linked = false;
        return 0;
    }
}

static int64_t mem_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    struct mem_disk *mem = mem_of(disk);
    switch (call->verb) {
    case KV_DISK_OPEN_DIR:
        return handle_open(mem, true, dir_find(mem, call->name));
    case KV_DISK_MAKE_DIR:
        return dir_make(mem, call->name);
    case KV_DISK_SYNC_DIR:
    case KV_DISK_LIST:
    case KV_DISK_OPEN:
    case KV_DISK_CREATE:
    case KV_DISK_UNLINK:
    case KV_DISK_RENAME:
    case KV_DISK_ROOM:
        return dir_call(mem, call);
    default:
        return file_call(mem, call);
    }
}

/* ---- ops ---- */

static void mem_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    struct mem_disk *mem = mem_of(disk);
    assert(mem->op_count < OPS_MAX);
    mem->ops[mem->op_count++] = op;
}

static uint32_t mem_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    struct mem_disk *mem = mem_of(disk);
    if (mem->op_count == 0 && wake_fd >= 0) {
        struct pollfd poll_fd = {.fd = wake_fd, .events = POLLIN};
        (void)poll(&poll_fd, 1, timeout_ms);
    }
    uint32_t count = 0;
    uint32_t tries = mem->op_count == 0 ? 0 : 1 + ex_random_below(&mem->random, mem->op_count);
    for (; tries > 0; tries--) {
        const uint32_t at = ex_random_below(&mem->random, mem->op_count);
        struct kv_disk_op *op = mem->ops[at];
        mem->ops[at] = mem->ops[--mem->op_count];
        count += kv_disk_result(op, mem_call(disk, &op->rest));
    }
    return count;
}

static void mem_destroy(struct kv_disk *disk)
{
    struct mem_disk *mem = mem_of(disk);
    for (uint32_t i = 0; i < mem->file_count; i++)
        free(mem->files[i].bytes);
    free(mem);
}

static const struct kv_disk_ops mem_ops = {
    .name = "memory",
    .destroy = mem_destroy,
    .start = mem_start,
    .run = mem_run,
    .call = mem_call,
};

struct kv_disk *mem_disk_create(const char *dir, uint64_t seed)
{
    struct mem_disk *mem = must(calloc(1, sizeof(*mem)));
    mem->disk.ops = &mem_ops;
    mem->random.state = seed;
    (void)dir_make(mem, dir);
    return &mem->disk;
}

void mem_disk_add(struct kv_disk *disk, const char *dir, const char *name, uint8_t *bytes,
                  uint64_t size)
{
    struct mem_disk *mem = mem_of(disk);
    (void)dir_make(mem, dir);
    struct file *file = file_make(mem, (uint32_t)dir_find(mem, dir), name);
    file->bytes = bytes;
    file->size = size;
}

bool mem_disk_file(struct kv_disk *disk, uint32_t i, struct mem_disk_file *ret_file)
{
    struct mem_disk *mem = mem_of(disk);
    for (uint32_t at = 0; at < mem->file_count; at++) {
        const struct file *file = &mem->files[at];
        if (!file->linked || i-- > 0) continue;
        *ret_file = (struct mem_disk_file){.dir = mem->dirs[file->dir],
                                           .name = file->name,
                                           .bytes = file->bytes,
                                           .size = file->size};
        return true;
    }
    return false;
}
