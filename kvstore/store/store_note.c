/*
 * Evidence of what was acknowledged: the file DIR/acknowledged.
 *
 * RocksDB's log is read up to its first damaged record, as if it ended there.  After a power cut
 * that is right, and when a record in the middle rots it forgets, without a word, what was
 * acknowledged behind it.  So every batch has a number, and the highest one that is durable is
 * noted here before its owner is told.  A start that finds a lower number in the manifest knows how
 * many batches are missing.
 *
 * A note is one write through the page cache, and no flush.  After a kill it is there.  After a
 * power cut it may be older than the manifest, which says nothing, but never newer, because it is
 * written only when its batch is durable: it may lag, it never leads, so there is no false alarm.
 * For the same reason nothing here makes a save or a start fail; what could not be noted or read is
 * logged and counted.
 */

#include "kvstore/store/store_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/acknowledged.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct kv_note {
    struct kv_disk_op op;
    struct kv_store *store;
    void (*done)(struct kv_store *store);
    uint8_t *bytes; /* All of the file when it is read, one slot when it is written. */
    int fd;         /* -1: there is no file yet. */
    uint32_t slot;  /* The next one to write. */
    bool is_busy;
    bool is_foreign; /* What stands in it is another directory's. */
    bool is_unflushed;
    bool is_useless; /* Could not be opened or made, or a flush failed. */
};

static void warn(const struct kv_store *store, const char *what, int sys_errno)
{
    kv_log(store->options.log, KV_LOG_WARN, "acknowledged_unknown",
           "text=\"%s '%s/" KV_ACKNOWLEDGED_NAME "': errno %d; acknowledged records that get lost "
           "may not be noticed\"",
           what, store->options.dir, sys_errno);
}

static void give_up(struct kv_note *note, const char *what)
{
    note->is_useless = true;
    note->store->counters.notes_failed++;
    warn(note->store, what, errno);
}

static int open_dir(struct kv_store *store)
{
    const struct kv_disk_call call = {.verb = KV_DISK_OPEN_DIR, .name = store->options.dir};
    return (int)kv_disk_call(store->options.disk, &call);
}

static int open_file(struct kv_note *note, enum kv_disk_verb verb)
{
    struct kv_disk *disk = note->store->options.disk;
    const int dir = open_dir(note->store);
    if (dir < 0) return -1;
    const struct kv_disk_call call = {
        .verb = verb, .fd = dir, .name = KV_ACKNOWLEDGED_NAME, .cached = true};
    const int fd = (int)kv_disk_call(disk, &call);
    const int kept = errno;
    kv_disk_close_file(disk, dir);
    errno = kept;
    return fd;
}

/* What was noted by this directory; the other slot is the next one. */
static uint64_t understand(struct kv_note *note)
{
    const struct kv_store *store = note->store;
    struct kv_acknowledged found;
    uint32_t slot = 0, damaged = 0;
    const kv_status status = kv_acknowledged_decode(note->bytes, &found, &slot, &damaged);
    if (status == KV_CORRUPT)
        kv_log(store->options.log, KV_LOG_WARN, "acknowledged_unknown",
               "text=\"'%s/" KV_ACKNOWLEDGED_NAME "' is damaged: whether acknowledged records were "
               "lost cannot be said\"",
               store->options.dir);
    if (status != KV_OK) return 0;
    if (!kv_id_equal(found.directory.bytes, store->options.superblock.id.bytes)) {
        kv_log(store->options.log, KV_LOG_WARN, "acknowledged_unknown",
               "text=\"'%s/" KV_ACKNOWLEDGED_NAME "' belongs to another state directory, and is "
               "written anew\"",
               store->options.dir);
        note->is_foreign = true;
        return 0;
    }
    note->slot = 1 - slot;
    return found.number;
}

uint64_t kv_note_open(struct kv_store *store)
{
    struct kv_note *note = calloc(1, sizeof(*note));
    if (note == NULL) {
        warn(store, "open", ENOMEM);
        return 0;
    }
    store->note = note;
    note->store = store;
    note->fd = -1;
    note->bytes = aligned_alloc(KV_IO_ALIGN, KV_ACKNOWLEDGED_BYTES);
    if (note->bytes == NULL) {
        errno = ENOMEM;
        give_up(note, "open");
        return 0;
    }
    memset(note->bytes, 0, KV_ACKNOWLEDGED_BYTES);
    note->fd = open_file(note, KV_DISK_OPEN);
    if (note->fd < 0 && errno != ENOENT) give_up(note, "open");
    if (note->fd < 0) return 0;
    const struct kv_disk_call read = {
        .verb = KV_DISK_READ, .fd = note->fd, .buf = note->bytes, .bytes = KV_ACKNOWLEDGED_BYTES};
    const int64_t got = kv_disk_call(store->options.disk, &read);
    if (got < 0) give_up(note, "read"); /* What it says is kept for another start. */
    return got < 0 ? 0 : understand(note);
}

static int64_t simple_call(struct kv_note *note, enum kv_disk_verb verb, uint64_t bytes)
{
    const struct kv_disk_call call = {.verb = verb, .fd = note->fd, .bytes = bytes};
    return kv_disk_call(note->store->options.disk, &call);
}

static struct kv_disk_call write_call(struct kv_note *note, uint64_t number)
{
    const struct kv_acknowledged acknowledged = {.directory = note->store->options.superblock.id,
                                                 .number = number};
    const uint32_t slot = note->slot;
    kv_acknowledged_encode(&acknowledged, note->bytes);
    note->slot = 1 - slot;
    note->is_unflushed = true;
    note->store->counters.notes++;
    return (struct kv_disk_call){.verb = KV_DISK_WRITE,
                                 .fd = note->fd,
                                 .buf = note->bytes,
                                 .bytes = KV_ACKNOWLEDGED_SLOT_BYTES,
                                 .offset = (uint64_t)slot * KV_ACKNOWLEDGED_SLOT_BYTES};
}

/* Its name is made durable with that of ssd/ (make_ssd_dir). */
void kv_note_first(struct kv_store *store, uint64_t number)
{
    struct kv_note *note = store->note;
    if (note == NULL || note->is_useless) return;
    const bool is_new = note->fd < 0;
    if (is_new) note->fd = open_file(note, KV_DISK_CREATE);
    if (note->fd < 0) {
        give_up(note, "make");
        return;
    }
    if (simple_call(note, KV_DISK_RESERVE, KV_ACKNOWLEDGED_BYTES) < 0) {
        give_up(note, "reserve");
        return;
    }
    for (uint32_t i = 0; i < (note->is_foreign ? 2u : 1u); i++) {
        const struct kv_disk_call write = write_call(note, number);
        if (kv_disk_call(store->options.disk, &write) == (int64_t)write.bytes) continue;
        give_up(note, "write");
        return;
    }
    if (is_new && simple_call(note, KV_DISK_SYNC, 0) < 0) give_up(note, "flush");
}

static void written(struct kv_disk_op *op)
{
    struct kv_note *note = KV_CONTAINER_OF(op, struct kv_note, op);
    struct kv_store *store = note->store;
    note->is_busy = false;
    if (op->status != KV_OK) {
        note->slot = 1 - note->slot; /* The other one is whole. */
        if (store->counters.notes_failed++ == 0) warn(store, "write", op->sys_errno);
    }
    note->done(store);
}

bool kv_note_start(struct kv_store *store, uint64_t number, void (*done)(struct kv_store *store))
{
    struct kv_note *note = store->note;
    if (note == NULL || note->is_useless) return false;
    assert(!note->is_busy);
    note->is_busy = true;
    note->done = done;
    note->op = (struct kv_disk_op){.call = write_call(note, number), .done = written};
    kv_disk_start(store->options.disk, &note->op);
    return true;
}

void kv_note_close(struct kv_store *store)
{
    struct kv_note *note = store->note;
    if (note == NULL) return;
    assert(!note->is_busy);
    store->note = NULL;
    if (note->is_unflushed && !note->is_useless && simple_call(note, KV_DISK_SYNC, 0) < 0)
        warn(store, "flush", errno);
    kv_disk_close_file(store->options.disk, note->fd);
    free(note->bytes);
    free(note);
}
