#pragma once

/*
 * What is durable about sessions: small key-value records.  The index knows keys and values
 * (format/manifest_record.h); this file knows only how to make them durable and read them.
 *
 * A batch becomes durable whole or not at all, batches in the order posted.  Answers come back as
 * messages into the mailbox named in the batch or scan.  After a failed batch every later one fails
 * with KV_IO until restart.  Where only the file system was full (stats.failed stays false), it
 * fails with KV_BUSY, nothing was written, or KV_IO, only the next start knows; and every later one
 * with KV_BUSY up to one that resumes, which whoever posts them sends when he knows what failed.
 *
 * In the daemon they lie in RocksDB, with two threads: one writer, which folds all batches waiting
 * into one synced WriteBatch, and one reader, which serves prefix scans, so a load never waits
 * behind a sync.  Tests have others (struct kv_manifest_ops).
 */

#include "kvstore/base/mailbox.h"
#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stdint.h>

struct kv_manifest;

/* RocksDB in `dir`, made if absent.  KV_INVALID: the directory is locked by another process;
 * KV_IO / KV_CORRUPT: RocksDB's own words. */
kv_status kv_manifest_open(const char *dir, struct kv_manifest **ret_manifest,
                           struct kv_error *err) KV_MUST_CHECK;
/* For tools, on a directory that no daemon uses: only kv_manifest_scan_now() and close work, and
 * nothing is written.  What RocksDB's log holds is read as well, and of a damaged log what a daemon
 * would read, the records in front of the damage: *ret_damage says so then, and is else as it was.
 * NULL: such a log is KV_CORRUPT. */
kv_status kv_manifest_open_read(const char *dir, struct kv_manifest **ret_manifest,
                                struct kv_error *ret_damage, struct kv_error *err) KV_MUST_CHECK;
/* Finishes what is queued, stops both threads. */
void kv_manifest_close(struct kv_manifest *manifest);

/* One record of a batch; value NULL deletes.  Memory belongs to the batch's owner until done. */
struct kv_manifest_put {
    const uint8_t *key;
    uint32_t key_bytes;
    const uint8_t *value;
    uint32_t value_bytes;
};

struct kv_manifest_batch {
    struct kv_msg msg; /* Posted to `reply` when durable (or failed); owner sets msg.run. */
    struct kv_mailbox *reply;
    const struct kv_manifest_put *puts;
    uint32_t put_count;
    bool resumes; /* After failures on a full file system: it and what follows is written. */
    /* Result.  KV_BUSY: no room, KV_INVALID: a write failed before, and nothing was written; KV_IO:
     * written or not, the next start finds out. */
    kv_status status;
    /* Owned by the manifest. */
    struct kv_msg inbox;
    struct kv_manifest *manifest;
    struct kv_manifest_batch *next;
};
void kv_manifest_write_post(struct kv_manifest *manifest, struct kv_manifest_batch *batch);

/* Scan of a key prefix, in key order, from `start` (a full key, or the prefix itself).  Records are
 * copied into `buf` as: u32 key_bytes, u32 value_bytes, key, value, ...; stops when the next one
 * does not fit (more = true; *needed says how much room it wants) or after record_max. */
struct kv_manifest_scan {
    struct kv_msg msg;
    struct kv_mailbox *reply;
    const uint8_t *prefix;
    uint32_t prefix_bytes;
    const uint8_t *start; /* NULL: the prefix. */
    uint32_t start_bytes;
    uint32_t record_max;
    uint8_t *buf;
    uint32_t buf_bytes;
    /* Results. */
    kv_status status;
    uint32_t used_bytes;
    uint32_t record_count;
    bool more;
    /* Owned by the manifest. */
    struct kv_msg inbox;
    struct kv_manifest *manifest;
};
void kv_manifest_scan_post(struct kv_manifest *manifest, struct kv_manifest_scan *scan);

/* Walks a scan's buffer: returns false at the end. *offset starts at 0. */
bool kv_manifest_scan_next(const struct kv_manifest_scan *scan, uint32_t *offset,
                           struct kv_manifest_put *ret_record);

/* Where a scan goes on behind a record of the last one: writes at most `room` bytes, more than any
 * key of ours has, and returns how many.  A longer key is none of ours: behind all that begin so.
 */
uint32_t kv_manifest_scan_behind(const struct kv_manifest_put *last, uint8_t *start, uint32_t room);

/* Start-up and tools, before any post: blocking on the calling thread. visit returns KV_OK to go
 * on; anything else stops the scan and is returned. */
typedef kv_status kv_manifest_visit_fn(void *context, const struct kv_manifest_put *record);
kv_status kv_manifest_scan_now(struct kv_manifest *manifest, const uint8_t *prefix,
                               uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                               struct kv_error *err) KV_MUST_CHECK;
kv_status kv_manifest_write_now(struct kv_manifest *manifest, const struct kv_manifest_put *puts,
                                uint32_t put_count, struct kv_error *err) KV_MUST_CHECK;

struct kv_manifest_stats {
    uint64_t batches, syncs, records; /* batches / syncs: how well group commit works. */
    bool failed;
    /* Nothing but deletions should be posted: its file system is nearly full, or was, and all is
     * refused until a batch resumes. */
    bool no_room;
    bool may_resume; /* All is refused, and there is room again. */
};
struct kv_manifest_stats kv_manifest_stats(struct kv_manifest *manifest); /* Any thread. */

/* Any thread: every batch from now on fails with KV_IO, as after one that failed.  For who knows
 * that what is written would not be found again. */
void kv_manifest_refuse(struct kv_manifest *manifest);

/* ---- for implementations ---- */

/* The functions above, without their prefix; each embeds struct kv_manifest. */
struct kv_manifest_ops {
    void (*close)(struct kv_manifest *manifest);
    void (*write_post)(struct kv_manifest *manifest, struct kv_manifest_batch *batch);
    void (*scan_post)(struct kv_manifest *manifest, struct kv_manifest_scan *scan);
    kv_status (*write_now)(struct kv_manifest *manifest, const struct kv_manifest_put *puts,
                           uint32_t put_count, struct kv_error *err);
    kv_status (*scan_now)(struct kv_manifest *manifest, const uint8_t *prefix,
                          uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                          struct kv_error *err);
    struct kv_manifest_stats (*stats)(struct kv_manifest *manifest);
    void (*refuse)(struct kv_manifest *manifest); /* NULL: its files cannot get lost. */
};

struct kv_manifest {
    const struct kv_manifest_ops *ops;
};

/* Adds a record to a scan's buffer; false, and more is set: it does not fit, or there are enough.
 */
bool kv_manifest_scan_add(struct kv_manifest_scan *scan, const struct kv_manifest_put *record);
