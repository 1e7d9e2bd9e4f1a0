/*
 * Recording.
 *
 * Descriptors mean nothing after the run, so each is translated to the file it stood for: an
 * index into the list of files made and found, in order.  A try of an op is one event; what is
 * tried again is another.
 */

#include "tests/seam/record.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HANDLES_MAX 4096u
#define RUNNING_MAX 4096u
#define NONE UINT32_MAX

struct running {
    const struct kv_disk_op *op;
    uint32_t event;
};

struct disk {
    struct kv_disk disk;
    struct recorder *recorder;
    struct kv_disk *inner;
    uint32_t handles[HANDLES_MAX]; /* Descriptor to index of files or of dirs. */
    struct running running[RUNNING_MAX];
    uint32_t running_count;
};

struct manifest {
    struct kv_manifest manifest;
    struct recorder *recorder;
    struct kv_manifest *inner;
};

/* A batch on its way: a copy of its owner's, which is answered when the copy is. */
struct passing {
    struct kv_manifest_batch batch;
    struct kv_manifest_batch *owner;
    struct recorder *recorder;
    uint32_t event;
};

static void *must(void *memory)
{
    assert(memory != NULL);
    return memory;
}

struct recorder *recorder_create(void)
{
    return must(calloc(1, sizeof(struct recorder)));
}

void recorder_destroy(struct recorder *recorder)
{
    if (recorder == NULL) return;
    for (uint32_t i = 0; i < recorder->event_count; i++) {
        struct record_event *event = &recorder->events[i];
        for (uint32_t j = 0; j < event->put_count; j++)
            free((void *)(uintptr_t)event->puts[j].key);
        free(event->puts);
        free(event->data);
    }
    for (uint32_t i = 0; i < recorder->file_count; i++)
        free(recorder->files[i].bytes);
    free(recorder->events);
    free(recorder);
}

static uint32_t event_begin(struct recorder *recorder, struct record_event event)
{
    if (recorder->event_count == recorder->event_capacity) {
        recorder->event_capacity = KV_MAX(256u, 2 * recorder->event_capacity);
        recorder->events =
            must(realloc(recorder->events, recorder->event_capacity * sizeof(event)));
    }
    event.begun = recorder->tick++;
    event.ended = RECORD_RUNNING;
    recorder->events[recorder->event_count] = event;
    return recorder->event_count++;
}

static void event_end(struct recorder *recorder, uint32_t event, int64_t result)
{
    recorder->events[event].ended = recorder->tick++;
    recorder->events[event].result = result;
}

/* ---- disk ---- */

static struct disk *disk_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct disk, disk);
}

static uint32_t dir_index(struct recorder *recorder, const char *path)
{
    for (uint32_t i = 0; i < recorder->dir_count; i++)
        if (strcmp(recorder->dirs[i], path) == 0) return i;
    assert(recorder->dir_count < KV_ARRAY_COUNT(recorder->dirs));
    (void)snprintf(recorder->dirs[recorder->dir_count], sizeof(recorder->dirs[0]), "%s", path);
    return recorder->dir_count++;
}

/* The newest of that name. */
static uint32_t file_index(const struct recorder *recorder, uint32_t dir, const char *name)
{
    for (uint32_t i = recorder->file_count; i-- > 0;)
        if (recorder->files[i].dir == dir && strcmp(recorder->files[i].now, name) == 0) return i;
    return NONE;
}

static uint32_t file_add(struct recorder *recorder, uint32_t dir, const char *name)
{
    assert(recorder->file_count < KV_ARRAY_COUNT(recorder->files));
    struct record_file *file = &recorder->files[recorder->file_count];
    *file = (struct record_file){.dir = dir};
    (void)snprintf(file->name, sizeof(file->name), "%s", name);
    (void)snprintf(file->now, sizeof(file->now), "%s", name);
    return recorder->file_count++;
}

void recorder_found(struct recorder *recorder, const char *dir, const char *name,
                    const uint8_t *bytes, uint64_t size)
{
    const uint32_t index = dir_index(recorder, dir);
    struct record_file *file = &recorder->files[file_add(recorder, index, name)];
    recorder->dirs_found[index] = true;
    file->found = true;
    file->size = size;
    file->bytes = must(malloc(KV_MAX(size, 1u)));
    if (size > 0) memcpy(file->bytes, bytes, size);
}

static bool is_noted(enum kv_disk_verb verb)
{
    return verb == KV_DISK_WRITE || verb == KV_DISK_SYNC || verb == KV_DISK_MAKE_DIR ||
           verb == KV_DISK_SYNC_DIR || verb == KV_DISK_CREATE || verb == KV_DISK_UNLINK ||
           verb == KV_DISK_RENAME || verb == KV_DISK_RESERVE;
}

static uint32_t target(struct disk *disk, const struct kv_disk_call *call)
{
    struct recorder *recorder = disk->recorder;
    switch (call->verb) {
    case KV_DISK_MAKE_DIR:
        return dir_index(recorder, call->name);
    case KV_DISK_CREATE:
        return file_add(recorder, disk->handles[call->fd], call->name);
    case KV_DISK_UNLINK:
    case KV_DISK_RENAME:
        return file_index(recorder, disk->handles[call->fd], call->name);
    default:
        return disk->handles[call->fd];
    }
}

static uint32_t call_begin(struct disk *disk, const struct kv_disk_call *call)
{
    struct record_event event = {
        .kind = RECORD_CALL, .verb = call->verb, .offset = call->offset, .bytes = call->bytes};
    if (!is_noted(call->verb)) return NONE;
    event.file = target(disk, call);
    if (call->verb == KV_DISK_RENAME) (void)snprintf(event.to, sizeof(event.to), "%s", call->to);
    if (call->verb == KV_DISK_WRITE) {
        event.data = must(malloc(call->bytes));
        memcpy(event.data, call->buf, call->bytes);
    }
    return event_begin(disk->recorder, event);
}

/* From now on calls by name mean others. */
static void file_rename(struct recorder *recorder, uint32_t file, const char *to)
{
    const uint32_t old = file_index(recorder, recorder->files[file].dir, to);
    if (old != NONE) recorder->files[old].now[0] = '\0';
    (void)snprintf(recorder->files[file].now, sizeof(recorder->files[file].now), "%s", to);
}

static void handle_set(struct disk *disk, int64_t fd, uint32_t index)
{
    assert(fd < HANDLES_MAX);
    disk->handles[fd] = index;
}

static int64_t rec_call(struct kv_disk *base, const struct kv_disk_call *call)
{
    struct disk *disk = disk_of(base);
    const uint32_t event = call_begin(disk, call);
    const int64_t result = disk->inner->ops->call(disk->inner, call);
    if (event != NONE) event_end(disk->recorder, event, result);
    if (result < 0) return result;
    switch (call->verb) {
    case KV_DISK_OPEN_DIR:
        handle_set(disk, result, dir_index(disk->recorder, call->name));
        break;
    case KV_DISK_OPEN:
        handle_set(disk, result, file_index(disk->recorder, disk->handles[call->fd], call->name));
        break;
    case KV_DISK_RENAME:
        file_rename(disk->recorder, disk->recorder->events[event].file, call->to);
        break;
    case KV_DISK_CREATE:
        handle_set(disk, result, disk->recorder->events[event].file);
        break;
    default:
        break;
    }
    return result;
}

static void rec_start(struct kv_disk *base, struct kv_disk_op *op)
{
    struct disk *disk = disk_of(base);
    const uint32_t event = call_begin(disk, &op->rest);
    if (event != NONE) {
        assert(disk->running_count < RUNNING_MAX);
        disk->running[disk->running_count++] = (struct running){op, event};
    }
    disk->inner->ops->start(disk->inner, op);
}

static int64_t rec_passed(struct kv_disk *base, struct kv_disk_op *op, int64_t result)
{
    struct disk *disk = disk_of(base);
    result = kv_disk_passed(disk->inner, op, result);
    for (uint32_t i = 0; i < disk->running_count; i++) {
        if (disk->running[i].op != op) continue;
        const uint32_t event = disk->running[i].event;
        event_end(disk->recorder, event, result);
        if (op->rest.verb == KV_DISK_CREATE && result >= 0)
            handle_set(disk, result, disk->recorder->events[event].file);
        disk->running[i] = disk->running[--disk->running_count];
        break;
    }
    return result;
}

static uint32_t rec_run(struct kv_disk *base, int wake_fd, int timeout_ms)
{
    struct disk *disk = disk_of(base);
    return disk->inner->ops->run(disk->inner, wake_fd, timeout_ms);
}

static void rec_destroy(struct kv_disk *base)
{
    free(disk_of(base));
}

static const struct kv_disk_ops disk_ops = {
    .name = "recording",
    .destroy = rec_destroy,
    .start = rec_start,
    .run = rec_run,
    .passed = rec_passed,
    .call = rec_call,
};

struct kv_disk *recorder_disk(struct recorder *recorder, struct kv_disk *inner)
{
    struct disk *disk = must(calloc(1, sizeof(*disk)));
    disk->disk.ops = &disk_ops;
    disk->recorder = recorder;
    disk->inner = inner;
    return &disk->disk;
}

/* ---- manifest ---- */

static struct manifest *manifest_of(struct kv_manifest *manifest)
{
    return KV_CONTAINER_OF(manifest, struct manifest, manifest);
}

static uint32_t batch_begin(struct recorder *recorder, const struct kv_manifest_put *puts,
                            uint32_t count)
{
    struct record_event event = {.kind = RECORD_BATCH, .put_count = count};
    event.puts = must(calloc(KV_MAX(count, 1u), sizeof(*puts)));
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *bytes = must(malloc((size_t)puts[i].key_bytes + puts[i].value_bytes));
        memcpy(bytes, puts[i].key, puts[i].key_bytes);
        if (puts[i].value != NULL)
            memcpy(bytes + puts[i].key_bytes, puts[i].value, puts[i].value_bytes);
        event.puts[i] = puts[i];
        event.puts[i].key = bytes;
        if (puts[i].value != NULL) event.puts[i].value = bytes + puts[i].key_bytes;
    }
    return event_begin(recorder, event);
}

/* In the owner's mailbox, so on its thread: nothing here needs a lock. */
static void batch_answered(struct kv_msg *msg)
{
    struct passing *passing = KV_CONTAINER_OF(msg, struct passing, batch.msg);
    struct kv_manifest_batch *owner = passing->owner;
    owner->status = passing->batch.status;
    event_end(passing->recorder, passing->event, owner->status == KV_OK ? 0 : -EIO);
    free(passing);
    owner->msg.run(&owner->msg);
}

static void rec_write_post(struct kv_manifest *base, struct kv_manifest_batch *batch)
{
    const struct manifest *manifest = manifest_of(base);
    struct passing *passing = must(malloc(sizeof(*passing)));
    *passing = (struct passing){
        .batch = *batch,
        .owner = batch,
        .recorder = manifest->recorder,
        .event = batch_begin(manifest->recorder, batch->puts, batch->put_count),
    };
    passing->batch.msg.run = batch_answered;
    kv_manifest_write_post(manifest->inner, &passing->batch);
}

static kv_status rec_write_now(struct kv_manifest *base, const struct kv_manifest_put *puts,
                               uint32_t put_count, struct kv_error *err)
{
    const struct manifest *manifest = manifest_of(base);
    const uint32_t event = batch_begin(manifest->recorder, puts, put_count);
    const kv_status status = kv_manifest_write_now(manifest->inner, puts, put_count, err);
    event_end(manifest->recorder, event, status == KV_OK ? 0 : -EIO);
    return status;
}

static void rec_scan_post(struct kv_manifest *base, struct kv_manifest_scan *scan)
{
    kv_manifest_scan_post(manifest_of(base)->inner, scan);
}

static kv_status rec_scan_now(struct kv_manifest *base, const uint8_t *prefix,
                              uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                              struct kv_error *err)
{
    return kv_manifest_scan_now(manifest_of(base)->inner, prefix, prefix_bytes, visit, context,
                                err);
}

static struct kv_manifest_stats rec_stats(struct kv_manifest *base)
{
    return kv_manifest_stats(manifest_of(base)->inner);
}

static void rec_close(struct kv_manifest *base)
{
    free(manifest_of(base));
}

static const struct kv_manifest_ops manifest_ops = {
    .close = rec_close,
    .write_post = rec_write_post,
    .scan_post = rec_scan_post,
    .write_now = rec_write_now,
    .scan_now = rec_scan_now,
    .stats = rec_stats,
};

struct kv_manifest *recorder_manifest(struct recorder *recorder, struct kv_manifest *inner)
{
    struct manifest *manifest = must(calloc(1, sizeof(*manifest)));
    manifest->manifest.ops = &manifest_ops;
    manifest->recorder = recorder;
    manifest->inner = inner;
    return &manifest->manifest;
}
