/*
 * Faulty.
 *
 * A failing op never reaches the disk below: its result is owed, and paid inside the next run, as a
 * disk pays it.  A short transfer is made by a call of half of it.  Lies change what a write does
 * below and leave its result alone.
 */

#include "tests/seam/faulty.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/disk_queue.h"
#include "kvstore/format/acknowledged.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define SECTOR_BYTES 512u
#define WRITES_MAX 1024u

/* A write of the past, by where it went. */
struct past {
    int fd;
    uint64_t offset, bytes;
    uint8_t *data;
};

struct faulty_state {
    struct past past[WRITES_MAX]; /* The newest of each place. */
    uint32_t past_count;
    struct past last; /* The write before this one; data borrowed from its owner. */
};

struct disk {
    struct kv_disk disk;
    struct faulty *faulty;
    struct kv_disk *inner;
    struct kv_disk_queue owed; /* Results stand in the ops. */
    int notes_fd;              /* Of the file `acknowledged`. */
    int making_fd;             /* Of a segment that is being made: not flushed yet. */
};

struct manifest {
    struct kv_manifest manifest;
    struct faulty *faulty;
    struct kv_manifest *inner;
};

static void *must(void *memory)
{
    assert(memory != NULL);
    return memory;
}

const char *fault_name(enum fault fault)
{
    static const char *const names[FAULT_COUNT] = {
        "EIO",        "ENOSPC",       "EINTR",         "EAGAIN",        "short write",
        "short read", "wrong length", "dropped write", "swapped write", "replayed write"};
    return names[fault];
}

/* ---- when ---- */

static bool fits(enum fault fault, enum kv_disk_verb verb, uint64_t bytes)
{
    const bool moves = verb == KV_DISK_READ || verb == KV_DISK_WRITE;
    switch (fault) {
    case FAULT_EIO:
        return verb != KV_DISK_CLOSE;
    case FAULT_EINTR:
    case FAULT_EAGAIN:
        return moves || verb == KV_DISK_SYNC || verb == KV_DISK_OPEN || verb == KV_DISK_CREATE ||
               verb == KV_DISK_RESERVE;
    case FAULT_ENOSPC:
        return verb == KV_DISK_WRITE || verb == KV_DISK_CREATE || verb == KV_DISK_RESERVE ||
               verb == KV_DISK_SYNC || verb == KV_DISK_MAKE_DIR;
    case FAULT_SHORT_READ:
        return verb == KV_DISK_READ && bytes > SECTOR_BYTES;
    case FAULT_SHORT_WRITE:
        return verb == KV_DISK_WRITE && bytes > SECTOR_BYTES;
    case FAULT_LENGTH:
        return moves || verb == KV_DISK_SYNC;
    default:
        return verb == KV_DISK_WRITE;
    }
}

static bool fires(struct faulty *faulty, enum kv_disk_verb verb, uint64_t bytes)
{
    faulty->calls++;
    if (!faulty->armed || faulty->calls < faulty->from) return false;
    if (faulty->flushes && verb != KV_DISK_SYNC) return false;
    const bool fit = verb == KV_DISK_VERB_COUNT
                         ? faulty->fault == FAULT_EIO || faulty->fault == FAULT_ENOSPC
                         : fits(faulty->fault, verb, bytes);
    if (!fit) return false;
    faulty->armed = faulty->for_ever;
    faulty->fired[faulty->fault]++;
    faulty->fired_call = (int)verb;
    return true;
}

/* ---- disk ---- */

static struct disk *disk_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct disk, disk);
}

/* What the call says instead. */
static int64_t fail_call(struct disk *disk, const struct kv_disk_call *call)
{
    struct kv_disk_call half = *call;
    switch (disk->faulty->fault) {
    case FAULT_EIO:
        return -EIO;
    case FAULT_ENOSPC:
        return -ENOSPC;
    case FAULT_EINTR:
        return -EINTR;
    case FAULT_EAGAIN:
        return -EAGAIN;
    case FAULT_LENGTH:
        return (int64_t)call->bytes + SECTOR_BYTES;
    default:
        half.bytes = call->bytes / 2 / SECTOR_BYTES * SECTOR_BYTES;
        if (half.bytes == 0) half.bytes = SECTOR_BYTES;
        return disk->inner->ops->call(disk->inner, &half);
    }
}

static void remember(struct faulty *faulty, const struct kv_disk_call *call)
{
    struct faulty_state *state = faulty->state;
    struct past *past = NULL;
    for (uint32_t i = 0; i < state->past_count; i++) {
        if (state->past[i].fd == call->fd && state->past[i].offset == call->offset)
            past = &state->past[i];
    }
    if (past == NULL) {
        assert(state->past_count < WRITES_MAX);
        past = &state->past[state->past_count++];
        *past = (struct past){.fd = call->fd, .offset = call->offset};
    }
    past->bytes = call->bytes;
    past->data = must(realloc(past->data, call->bytes));
    memcpy(past->data, call->buf, call->bytes);
    state->last = *past;
}

static const struct past *recall(const struct faulty *faulty, const struct kv_disk_call *call)
{
    for (uint32_t i = 0; i < faulty->state->past_count; i++) {
        const struct past *past = &faulty->state->past[i];
        if (past->fd == call->fd && past->offset == call->offset && past->bytes == call->bytes)
            return past;
    }
    return NULL;
}

/* Writes something else than asked, or nothing, and says that all is well. */
static int64_t lie(struct disk *disk, const struct kv_disk_call *call)
{
    const struct past *last = &disk->faulty->state->last;
    const struct past *past = recall(disk->faulty, call);
    struct kv_disk_call wrong = *call;
    int64_t result = 0;
    if (disk->faulty->fault == FAULT_SWAP && last->bytes == call->bytes) {
        wrong.buf = last->data;
        result = disk->inner->ops->call(disk->inner, &wrong);
        wrong = *call;
        wrong.fd = last->fd;
        wrong.offset = last->offset;
        if (result >= 0) result = disk->inner->ops->call(disk->inner, &wrong);
    } else if (disk->faulty->fault == FAULT_REPLAY && past != NULL) {
        wrong.buf = past->data;
        result = disk->inner->ops->call(disk->inner, &wrong);
    }
    return result < 0 ? result : (int64_t)call->bytes;
}

static void faulty_start(struct kv_disk *base, struct kv_disk_op *op)
{
    struct disk *disk = disk_of(base);
    struct faulty *faulty = disk->faulty;
    const struct kv_disk_call *call = &op->rest;
    const bool fire = fires(faulty, call->verb, call->bytes);
    if (fire) {
        /* A segment that could not be made is none, and nobody has anything in it. */
        const bool making = call->fd == disk->making_fd;
        faulty->fired_sync |= call->verb == KV_DISK_SYNC && !making;
        faulty->fired_write |= call->verb == KV_DISK_WRITE && !making && call->fd != disk->notes_fd;
        op->result = faulty->fault >= FAULT_DROP ? lie(disk, call) : fail_call(disk, call);
        kv_disk_queue_push(&disk->owed, op);
    }
    if (call->verb == KV_DISK_WRITE) remember(faulty, call);
    if (!fire) disk->inner->ops->start(disk->inner, op);
}

static uint32_t faulty_run(struct kv_disk *base, int wake_fd, int timeout_ms)
{
    struct disk *disk = disk_of(base);
    struct kv_disk_queue owed = disk->owed;
    disk->owed = (struct kv_disk_queue){0};
    uint32_t count =
        disk->inner->ops->run(disk->inner, wake_fd, owed.head != NULL ? 0 : timeout_ms);
    for (struct kv_disk_op *op; (op = kv_disk_queue_pop(&owed)) != NULL;)
        count += kv_disk_result(op, op->result);
    return count;
}

static int64_t faulty_passed(struct kv_disk *base, struct kv_disk_op *op, int64_t result)
{
    struct disk *disk = disk_of(base);
    result = kv_disk_passed(disk->inner, op, result);
    if (op->rest.verb == KV_DISK_CREATE && result >= 0) disk->making_fd = (int)result;
    if (op->rest.verb == KV_DISK_SYNC && op->rest.fd == disk->making_fd) disk->making_fd = -1;
    return result;
}

static int64_t faulty_call(struct kv_disk *base, const struct kv_disk_call *call)
{
    struct disk *disk = disk_of(base);
    if (!fires(disk->faulty, call->verb, call->bytes)) {
        const int64_t result = disk->inner->ops->call(disk->inner, call);
        const bool opens = call->verb == KV_DISK_OPEN || call->verb == KV_DISK_CREATE;
        if (opens && strcmp(call->name, KV_ACKNOWLEDGED_NAME) == 0) disk->notes_fd = (int)result;
        return result;
    }
    return disk->faulty->fault >= FAULT_DROP ? lie(disk, call) : fail_call(disk, call);
}

static void faulty_destroy(struct kv_disk *base)
{
    free(disk_of(base));
}

static const struct kv_disk_ops disk_ops = {
    .name = "faulty",
    .destroy = faulty_destroy,
    .start = faulty_start,
    .run = faulty_run,
    .passed = faulty_passed,
    .call = faulty_call,
};

struct kv_disk *faulty_disk(struct faulty *faulty, struct kv_disk *inner)
{
    struct disk *disk = must(calloc(1, sizeof(*disk)));
    disk->disk.ops = &disk_ops;
    disk->faulty = faulty;
    disk->inner = inner;
    disk->notes_fd = disk->making_fd = -1;
    faulty->state = must(calloc(1, sizeof(*faulty->state)));
    return &disk->disk;
}

void faulty_fini(struct faulty *faulty)
{
    for (uint32_t i = 0; faulty->state != NULL && i < faulty->state->past_count; i++)
        free(faulty->state->past[i].data);
    free(faulty->state);
    faulty->state = NULL;
}

/* ---- manifest ---- */

static struct manifest *manifest_of(struct kv_manifest *manifest)
{
    return KV_CONTAINER_OF(manifest, struct manifest, manifest);
}

enum batch_fate { BATCH_GOOD, BATCH_REFUSED, BATCH_WRITTEN };

/* Like RocksDB's: after one that failed, all fail.  An EIO comes too late, when the batch is
 * written. */
static enum batch_fate fate_of(const struct manifest *manifest)
{
    struct faulty *faulty = manifest->faulty;
    const bool failed_before = faulty->manifest_failed;
    if (fires(faulty, KV_DISK_VERB_COUNT, 0)) {
        faulty->manifest_failed = true;
        faulty->fired_batch = true;
        if (!failed_before && faulty->fault == FAULT_EIO) return BATCH_WRITTEN;
    }
    return faulty->manifest_failed ? BATCH_REFUSED : BATCH_GOOD;
}

/* A batch that is written behind those before it, and answered as if it were not. */
struct late {
    struct kv_manifest_batch batch;
    struct kv_manifest_batch *theirs;
};

static void late_written(struct kv_msg *msg)
{
    struct late *late = KV_CONTAINER_OF(msg, struct late, batch.msg);
    late->theirs->status = KV_IO;
    kv_mailbox_post(late->theirs->reply, &late->theirs->msg);
    free(late);
}

static void faulty_write_post(struct kv_manifest *base, struct kv_manifest_batch *batch)
{
    const struct manifest *manifest = manifest_of(base);
    const enum batch_fate fate = fate_of(manifest);
    if (fate == BATCH_GOOD) {
        kv_manifest_write_post(manifest->inner, batch);
        return;
    }
    if (fate == BATCH_REFUSED) {
        batch->status = KV_IO;
        kv_mailbox_post(batch->reply, &batch->msg);
        return;
    }
    struct late *late = must(calloc(1, sizeof(*late)));
    late->theirs = batch;
    late->batch = (struct kv_manifest_batch){.msg.run = late_written,
                                             .reply = batch->reply,
                                             .puts = batch->puts,
                                             .put_count = batch->put_count};
    kv_manifest_write_post(manifest->inner, &late->batch);
}

static kv_status faulty_write_now(struct kv_manifest *base, const struct kv_manifest_put *puts,
                                  uint32_t put_count, struct kv_error *err)
{
    const struct manifest *manifest = manifest_of(base);
    const enum batch_fate fate = fate_of(manifest);
    if (fate != BATCH_REFUSED) {
        const kv_status status = kv_manifest_write_now(manifest->inner, puts, put_count, err);
        if (fate == BATCH_GOOD) return status;
    }
    return KV_FAIL(err, KV_IO, "a planted failure");
}

static void faulty_scan_post(struct kv_manifest *base, struct kv_manifest_scan *scan)
{
    kv_manifest_scan_post(manifest_of(base)->inner, scan);
}

static kv_status faulty_scan_now(struct kv_manifest *base, const uint8_t *prefix,
                                 uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                                 struct kv_error *err)
{
    return kv_manifest_scan_now(manifest_of(base)->inner, prefix, prefix_bytes, visit, context,
                                err);
}

static struct kv_manifest_stats faulty_stats(struct kv_manifest *base)
{
    const struct manifest *manifest = manifest_of(base);
    struct kv_manifest_stats stats = kv_manifest_stats(manifest->inner);
    stats.failed |= manifest->faulty->manifest_failed;
    return stats;
}

static void faulty_close(struct kv_manifest *base)
{
    free(manifest_of(base));
}

static const struct kv_manifest_ops manifest_ops = {
    .close = faulty_close,
    .write_post = faulty_write_post,
    .scan_post = faulty_scan_post,
    .write_now = faulty_write_now,
    .scan_now = faulty_scan_now,
    .stats = faulty_stats,
};

struct kv_manifest *faulty_manifest(struct faulty *faulty, struct kv_manifest *inner)
{
    struct manifest *manifest = must(calloc(1, sizeof(*manifest)));
    manifest->manifest.ops = &manifest_ops;
    manifest->faulty = faulty;
    manifest->inner = inner;
    return &manifest->manifest;
}
