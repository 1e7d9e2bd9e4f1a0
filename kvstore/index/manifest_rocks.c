/*
 * Durable records in RocksDB.
 *
 * The writer takes everything that waits and makes it one WriteBatch with one sync: a sync costs
 * the same for one record as for a thousand, so under load commits share it, and alone a commit
 * waits for nobody.  Scans have a thread of their own, because a sync can take many milliseconds
 * and loading a session must not stand behind it.
 *
 * A failed write is final.  What RocksDB kept of it in memory and in the log is unknown, so a later
 * success would promise an order of records that the disk may not have.
 *
 * A full file system is not: RocksDB itself goes on when there is room again, with a new log behind
 * tables that do not hold the write that failed.  It is kept from meeting one.  RocksDB reserves
 * the blocks of a log for as many records as it keeps in memory, so on a full file system the
 * writer goes on until a new log and a table are near, then refuses, before anything is written,
 * until there is room for both.  Before that it says so (no_room), and has the last part of the log
 * for deletions.  After a refusal it refuses all that follows, because that was made by somebody
 * who does not know of it, until a batch resumes.
 */

#include "kvstore/index/manifest.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <dirent.h>
#include <rocksdb/c.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define WRITE_BUFFER_BYTES (8u << 20)
#define BLOCK_CACHE_BYTES (16u << 20)
#define OPEN_FILES_MAX 256
#define LOG_LEVEL_WARN 2
#define UP_TO_DAMAGE 2  /* As a daemon reads it. */
#define TOLERATE_TAIL 0 /* A log may end in the middle of a record, and is else whole. */
#define LOG_BYTES_MAX (1u << 20)
#define LOG_FILES_MAX 4u
#define RECOVERY_BYTES (1u << 20) /* Beside its logs: a manifest file, options, its own notes. */
/* Free on the file system before a new log and a table may be begun. */
#define ROOM_PART 40u
#define ROOM_MIN (1ull << 20)
#define ROOM_MAX (4ull * WRITE_BUFFER_BYTES)
/* Records in memory up to which no table is near.  RocksDB takes blocks of an eighth, and begins a
 * table when the eighth one is nearly full: after five no_room, after seven nothing. */
#define MEMORY_MANY (WRITE_BUFFER_BYTES / 16 * 11)
#define MEMORY_MAX (WRITE_BUFFER_BYTES / 16 * 15)
#define NO_SPACE_TEXT "No space left on device"
#define TRY_AGAIN_NS 1000000000ull /* After RocksDB met a full file system all the same. */

struct rocks {
    struct kv_manifest manifest;
    rocksdb_t *db;
    rocksdb_options_t *options;
    rocksdb_block_based_table_options_t *table_options;
    rocksdb_cache_t *cache;
    rocksdb_writeoptions_t *write_options;
    rocksdb_readoptions_t *read_options;

    struct kv_thread writer;
    struct kv_mailbox *writer_inbox;
    struct kv_msg writer_stop_msg;
    bool writer_stop;                /* Of the writer, like the two below. */
    struct kv_manifest_batch *group; /* Taken from the inbox, in order. */
    struct kv_manifest_batch *group_last;

    struct kv_thread reader;
    struct kv_mailbox *reader_inbox;
    struct kv_msg reader_stop_msg;
    bool reader_stop; /* Of the reader. */

    /* Written by whoever writes: the writer, or start-up before it has work. */
    _Atomic uint64_t batch_count;
    _Atomic uint64_t sync_count;
    _Atomic uint64_t record_count;
    _Atomic bool failed;
    _Atomic bool stopped;
    _Atomic uint64_t full_ns; /* When RocksDB last met a full file system; 0: it writes again. */
    char *dir;
    struct rocks *left_before; /* Of those that were not closed. */
};

static struct rocks *rocks_of(struct kv_manifest *manifest)
{
    return KV_CONTAINER_OF(manifest, struct rocks, manifest);
}

/* Takes over RocksDB's text. */
static kv_status fail_rocks(struct kv_error *err, const char *what, char *text)
{
    kv_status status = KV_IO;
    if (strncmp(text, "Corruption", 10) == 0) status = KV_CORRUPT;
    (void)KV_FAIL(err, status, "%s: %s", what, text);
    rocksdb_free(text);
    return status;
}

static kv_status fail_open(struct kv_error *err, const char *dir, char *text)
{
    /* "While lock file: DIR/LOCK: Resource temporarily unavailable", or "lock hold by current
     * process" when it is our own. */
    if (strstr(text, "While lock file") != NULL || strstr(text, "lock hold by") != NULL) {
        rocksdb_free(text);
        return KV_FAIL(err, KV_INVALID, "manifest '%s' is in use by another process", dir);
    }
    char what[128];
    (void)snprintf(what, sizeof(what), "open manifest '%.100s'", dir);
    return fail_rocks(err, what, text);
}

/* ---- writing ---- */

static void batch_add(rocksdb_writebatch_t *group, const struct kv_manifest_put *puts,
                      uint32_t put_count)
{
    for (uint32_t i = 0; i < put_count; i++) {
        const char *key = (const char *)puts[i].key;
        if (puts[i].value == NULL) {
            rocksdb_writebatch_delete(group, key, puts[i].key_bytes);
        } else {
            rocksdb_writebatch_put(group, key, puts[i].key_bytes, (const char *)puts[i].value,
                                   puts[i].value_bytes);
        }
    }
}

/* Any thread. */
static bool has_room(struct rocks *rocks, uint64_t memory_max)
{
    const uint64_t full_ns = atomic_load(&rocks->full_ns);
    uint64_t in_memory = 0;
    struct statvfs system;
    if (full_ns != 0 && kv_clock_stopwatch_ns() - full_ns < TRY_AGAIN_NS) return false;
    if (statvfs(rocks->dir, &system) != 0) return true; /* RocksDB finds out. */
    const uint64_t total = (uint64_t)system.f_blocks * system.f_frsize;
    const uint64_t want = KV_MIN(KV_MAX(total / ROOM_PART, ROOM_MIN), ROOM_MAX);
    if ((uint64_t)system.f_bavail * system.f_frsize >= want) return true;
    if (full_ns != 0) return false;
    if (rocksdb_property_int(rocks->db, "rocksdb.cur-size-active-mem-table", &in_memory) != 0)
        return false;
    return in_memory <= memory_max;
}

static kv_status group_write(struct rocks *rocks, rocksdb_writebatch_t *group, struct kv_error *err)
{
    if (atomic_load(&rocks->failed))
        return KV_FAIL(err, KV_INVALID, "the manifest failed before; restart to go on");
    if (!has_room(rocks, MEMORY_MAX)) {
        atomic_store(&rocks->stopped, true);
        return KV_FAIL(err, KV_BUSY, "the file system of '%s' is full", rocks->dir);
    }
    char *text = NULL;
    rocksdb_write(rocks->db, rocks->write_options, group, &text);
    atomic_fetch_add(&rocks->sync_count, 1);
    if (text == NULL) {
        atomic_store(&rocks->full_ns, 0);
        return KV_OK;
    }
    atomic_store(&rocks->stopped, true);
    if (strstr(text, NO_SPACE_TEXT) != NULL)
        atomic_store(&rocks->full_ns, kv_clock_stopwatch_ns());
    else
        atomic_store(&rocks->failed, true);
    (void)fail_rocks(err, "write to the manifest", text);
    return KV_IO; /* Written or not: only the next start knows. */
}

static void batch_answer(struct kv_manifest_batch *batch, kv_status status)
{
    batch->status = status;
    kv_mailbox_post(batch->reply, &batch->msg); /* The owner's from here on. */
}

/* Those before one that resumes know nothing of what failed.  NULL: all of them. */
static struct kv_manifest_batch *refuse_unknowing(struct rocks *rocks,
                                                  struct kv_manifest_batch *first)
{
    while (first != NULL && atomic_load(&rocks->stopped) && !atomic_load(&rocks->failed)) {
        struct kv_manifest_batch *next = first->next;
        if (first->resumes) {
            atomic_store(&rocks->stopped, false);
            break;
        }
        batch_answer(first, KV_BUSY);
        first = next;
    }
    return first;
}

static void batches_serve(struct rocks *rocks, struct kv_manifest_batch *first)
{
    first = refuse_unknowing(rocks, first);
    if (first == NULL) return;
    rocksdb_writebatch_t *group = rocksdb_writebatch_create();
    uint64_t records = 0;
    for (const struct kv_manifest_batch *batch = first; batch != NULL; batch = batch->next) {
        batch_add(group, batch->puts, batch->put_count);
        records += batch->put_count;
        atomic_fetch_add(&rocks->batch_count, 1);
    }
    const kv_status status = group_write(rocks, group, NULL);
    if (status == KV_OK) atomic_fetch_add(&rocks->record_count, records);
    rocksdb_writebatch_destroy(group);

    while (first != NULL) {
        struct kv_manifest_batch *next = first->next;
        batch_answer(first, status);
        first = next;
    }
}

static void batch_received(struct kv_msg *msg)
{
    struct kv_manifest_batch *batch = KV_CONTAINER_OF(msg, struct kv_manifest_batch, inbox);
    struct rocks *rocks = rocks_of(batch->manifest);
    if (rocks->group == NULL) {
        rocks->group = batch;
    } else {
        rocks->group_last->next = batch;
    }
    rocks->group_last = batch;
}

static void writer_stop_received(struct kv_msg *msg)
{
    KV_CONTAINER_OF(msg, struct rocks, writer_stop_msg)->writer_stop = true;
}

static void writer_main(void *arg)
{
    struct rocks *rocks = arg;
    while (!rocks->writer_stop) {
        kv_mailbox_wait(rocks->writer_inbox, -1);
        (void)kv_mailbox_run(rocks->writer_inbox, KV_MANIFEST_BATCHES_MAX);
        struct kv_manifest_batch *first = rocks->group;
        rocks->group = NULL;
        /* The stop message is the last one: what was posted before it is in this group. */
        if (first != NULL) batches_serve(rocks, first);
    }
}

static void rocks_write_post(struct kv_manifest *manifest, struct kv_manifest_batch *batch)
{
    batch->inbox.run = batch_received;
    kv_mailbox_post(rocks_of(manifest)->writer_inbox, &batch->inbox);
}

static kv_status rocks_write_now(struct kv_manifest *manifest, const struct kv_manifest_put *puts,
                                 uint32_t put_count, struct kv_error *err)
{
    struct rocks *rocks = rocks_of(manifest);
    rocksdb_writebatch_t *group = rocksdb_writebatch_create();
    batch_add(group, puts, put_count);
    atomic_fetch_add(&rocks->batch_count, 1);
    const kv_status status = group_write(rocks, group, err);
    if (status == KV_OK) atomic_fetch_add(&rocks->record_count, put_count);
    rocksdb_writebatch_destroy(group);
    return status;
}

/* ---- reading ---- */

/* The record under the iterator; false at the end of the prefix. */
static bool record_get(const rocksdb_iterator_t *iterator, const uint8_t *prefix,
                       uint32_t prefix_bytes, struct kv_manifest_put *ret_record)
{
    if (!rocksdb_iter_valid(iterator)) return false;
    size_t key_bytes;
    size_t value_bytes;
    const char *key = rocksdb_iter_key(iterator, &key_bytes);
    if (key_bytes < prefix_bytes) return false;
    if (prefix_bytes > 0 && memcmp(key, prefix, prefix_bytes) != 0) return false;
    const char *value = rocksdb_iter_value(iterator, &value_bytes);
    assert(key_bytes <= UINT32_MAX && value_bytes <= UINT32_MAX); /* As they were put. */
    *ret_record = (struct kv_manifest_put){.key = (const uint8_t *)key,
                                           .key_bytes = (uint32_t)key_bytes,
                                           .value = (const uint8_t *)value,
                                           .value_bytes = (uint32_t)value_bytes};
    return true;
}

static kv_status iterator_end(rocksdb_iterator_t *iterator, struct kv_error *err)
{
    char *text = NULL;
    rocksdb_iter_get_error(iterator, &text);
    rocksdb_iter_destroy(iterator);
    return text == NULL ? KV_OK : fail_rocks(err, "read the manifest", text);
}

static void scan_received(struct kv_msg *msg)
{
    struct kv_manifest_scan *scan = KV_CONTAINER_OF(msg, struct kv_manifest_scan, inbox);
    const struct rocks *rocks = rocks_of(scan->manifest);
    const uint8_t *start = scan->start != NULL ? scan->start : scan->prefix;
    const uint32_t start_bytes = scan->start != NULL ? scan->start_bytes : scan->prefix_bytes;
    struct kv_manifest_put record;

    rocksdb_iterator_t *iterator = rocksdb_create_iterator(rocks->db, rocks->read_options);
    rocksdb_iter_seek(iterator, (const char *)start, start_bytes);
    while (record_get(iterator, scan->prefix, scan->prefix_bytes, &record) &&
           kv_manifest_scan_add(scan, &record))
        rocksdb_iter_next(iterator);
    scan->status = iterator_end(iterator, NULL);
    kv_mailbox_post(scan->reply, &scan->msg); /* The owner's from here on. */
}

static void reader_stop_received(struct kv_msg *msg)
{
    KV_CONTAINER_OF(msg, struct rocks, reader_stop_msg)->reader_stop = true;
}

static void reader_main(void *arg)
{
    struct rocks *rocks = arg;
    while (!rocks->reader_stop) {
        kv_mailbox_wait(rocks->reader_inbox, -1);
        (void)kv_mailbox_run(rocks->reader_inbox, UINT32_MAX);
    }
}

static void rocks_scan_post(struct kv_manifest *manifest, struct kv_manifest_scan *scan)
{
    scan->inbox.run = scan_received;
    kv_mailbox_post(rocks_of(manifest)->reader_inbox, &scan->inbox);
}

static kv_status rocks_scan_now(struct kv_manifest *manifest, const uint8_t *prefix,
                                uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                                struct kv_error *err)
{
    const struct rocks *rocks = rocks_of(manifest);
    struct kv_manifest_put record;
    kv_status status = KV_OK;
    rocksdb_iterator_t *iterator = rocksdb_create_iterator(rocks->db, rocks->read_options);
    rocksdb_iter_seek(iterator, (const char *)prefix, prefix_bytes);
    while (status == KV_OK && record_get(iterator, prefix, prefix_bytes, &record)) {
        status = visit(context, &record);
        rocksdb_iter_next(iterator);
    }
    const kv_status end = iterator_end(iterator, status == KV_OK ? err : NULL);
    return status == KV_OK ? end : status;
}

/* ---- open and close ---- */

static void options_create(struct rocks *rocks)
{
    rocks->options = rocksdb_options_create();
    rocks->table_options = rocksdb_block_based_options_create();
    rocks->cache = rocksdb_cache_create_lru(BLOCK_CACHE_BYTES);
    rocks->write_options = rocksdb_writeoptions_create();
    rocks->read_options = rocksdb_readoptions_create();

    rocksdb_block_based_options_set_block_cache(rocks->table_options, rocks->cache);
    rocksdb_options_set_block_based_table_factory(rocks->options, rocks->table_options);
    rocksdb_options_set_create_if_missing(rocks->options, 1);
    rocksdb_options_set_paranoid_checks(rocks->options, 1);
    rocksdb_options_set_write_buffer_size(rocks->options, WRITE_BUFFER_BYTES);
    rocksdb_options_set_max_open_files(rocks->options, OPEN_FILES_MAX);
    rocksdb_options_set_info_log_level(rocks->options, LOG_LEVEL_WARN);
    rocksdb_options_set_max_log_file_size(rocks->options, LOG_BYTES_MAX);
    rocksdb_options_set_keep_log_file_num(rocks->options, LOG_FILES_MAX);
    rocksdb_writeoptions_set_sync(rocks->write_options, 1);
    rocksdb_readoptions_set_verify_checksums(rocks->read_options, 1);
}

/* RocksDB's own threads inherit the mask: the daemon's signals are for its main thread. */
static rocksdb_t *open_without_signals(const rocksdb_options_t *options, const char *dir,
                                       char **ret_text)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    rocksdb_t *db = rocksdb_open(options, dir, ret_text);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return db;
}

/* Bytes of write-ahead logs: what a start after a crash writes again as tables. */
static uint64_t log_bytes(const char *dir)
{
    uint64_t sum = 0;
    DIR *list = opendir(dir);

    for (const struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        const char *end = strrchr(entry->d_name, '.');
        struct stat found;
        if (end != NULL && strcmp(end, ".log") == 0 &&
            fstatat(dirfd(list), entry->d_name, &found, 0) == 0 && found.st_size > 0)
            sum += (uint64_t)found.st_size;
    }
    if (list != NULL) (void)closedir(list);
    return sum;
}

/* RocksDB ends the process when it runs out of space while it recovers. */
static kv_status check_room(const char *dir, struct kv_error *err)
{
    const uint64_t logs = log_bytes(dir);
    struct statvfs system;

    if (logs == 0 || statvfs(dir, &system) != 0) return KV_OK;
    const uint64_t have = (uint64_t)system.f_bavail * system.f_frsize;
    const uint64_t need = 2 * logs + RECOVERY_BYTES;
    if (have >= need) return KV_OK;
    return KV_FAIL(err, KV_IO,
                   "open manifest '%s': %llu bytes free on this file system, and a start after a "
                   "crash needs %llu",
                   dir, (unsigned long long)have, (unsigned long long)need);
}

/* RocksDB ends the process when it is to close a log that it could not write: after a failed write
 * it is left to the kernel as it is.  Named here so that a leak checker sees whose it is. */
static void leave(struct rocks *rocks)
{
    static struct rocks *left; /* By the thread that closes, which is main. */
    rocks->left_before = left;
    left = rocks;
}

static void rocks_close(struct kv_manifest *manifest)
{
    struct rocks *rocks = rocks_of(manifest);
    if (rocks->writer.started) {
        rocks->writer_stop_msg.run = writer_stop_received;
        kv_mailbox_post(rocks->writer_inbox, &rocks->writer_stop_msg);
    }
    if (rocks->reader.started) {
        rocks->reader_stop_msg.run = reader_stop_received;
        kv_mailbox_post(rocks->reader_inbox, &rocks->reader_stop_msg);
    }
    kv_thread_join(&rocks->writer);
    kv_thread_join(&rocks->reader);
    kv_mailbox_destroy(rocks->writer_inbox);
    kv_mailbox_destroy(rocks->reader_inbox);

    if (atomic_load(&rocks->failed)) {
        leave(rocks);
        return;
    }
    if (rocks->db != NULL) rocksdb_close(rocks->db);
    rocksdb_readoptions_destroy(rocks->read_options);
    rocksdb_writeoptions_destroy(rocks->write_options);
    rocksdb_options_destroy(rocks->options);
    rocksdb_block_based_options_destroy(rocks->table_options);
    rocksdb_cache_destroy(rocks->cache);
    free(rocks->dir);
    free(rocks);
}

static void rocks_refuse(struct kv_manifest *manifest)
{
    atomic_store(&rocks_of(manifest)->failed, true);
}

static struct kv_manifest_stats rocks_stats(struct kv_manifest *manifest)
{
    struct rocks *rocks = rocks_of(manifest);
    const bool failed = atomic_load(&rocks->failed);
    const bool stopped = atomic_load(&rocks->stopped) && !failed;
    const bool room = has_room(rocks, MEMORY_MANY);
    return (struct kv_manifest_stats){
        .batches = atomic_load(&rocks->batch_count),
        .syncs = atomic_load(&rocks->sync_count),
        .records = atomic_load(&rocks->record_count),
        .failed = failed,
        .no_room = !failed && (stopped || !room),
        .may_resume = stopped && room,
    };
}

static const struct kv_manifest_ops rocks_ops = {
    .close = rocks_close,
    .write_post = rocks_write_post,
    .scan_post = rocks_scan_post,
    .write_now = rocks_write_now,
    .scan_now = rocks_scan_now,
    .stats = rocks_stats,
    .refuse = rocks_refuse,
};

kv_status kv_manifest_open(const char *dir, struct kv_manifest **ret_manifest, struct kv_error *err)
{
    struct rocks *rocks = calloc(1, sizeof(*rocks));
    if (rocks == NULL) return KV_FAIL(err, KV_NOMEM, "open manifest '%s'", dir);
    rocks->manifest.ops = &rocks_ops;
    options_create(rocks);

    char *text = NULL;
    kv_status status = check_room(dir, err);
    rocks->dir = strdup(dir);
    if (status == KV_OK && rocks->dir == NULL)
        status = KV_FAIL(err, KV_NOMEM, "open manifest '%s'", dir);
    if (status != KV_OK) goto fail;
    rocks->db = open_without_signals(rocks->options, dir, &text);
    if (text != NULL) {
        rocks->db = NULL;
        status = fail_open(err, dir, text);
        goto fail;
    }
    status = kv_mailbox_create(&rocks->writer_inbox, err);
    if (status == KV_OK) status = kv_mailbox_create(&rocks->reader_inbox, err);
    if (status != KV_OK) goto fail;
    status = kv_thread_start(&rocks->writer, KV_THREAD_MANIFEST, "kv-manifest-w", writer_main,
                             rocks, err);
    if (status == KV_OK)
        status = kv_thread_start(&rocks->reader, KV_THREAD_MANIFEST, "kv-manifest-r", reader_main,
                                 rocks, err);
    if (status != KV_OK) goto fail;
    *ret_manifest = &rocks->manifest;
    return KV_OK;

fail:
    rocks_close(&rocks->manifest);
    return status;
}

static kv_status open_read(const char *dir, int log_mode, struct kv_manifest **ret_manifest,
                           struct kv_error *err)
{
    struct rocks *rocks = calloc(1, sizeof(*rocks));
    if (rocks == NULL) return KV_FAIL(err, KV_NOMEM, "open manifest '%s'", dir);
    rocks->manifest.ops = &rocks_ops;
    options_create(rocks);
    rocksdb_options_set_create_if_missing(rocks->options, 0);
    rocksdb_options_set_wal_recovery_mode(rocks->options, log_mode);
    char *text = NULL;
    rocks->db = rocksdb_open_for_read_only(rocks->options, dir, 0, &text);
    if (text != NULL) {
        rocks->db = NULL;
        rocks_close(&rocks->manifest);
        return fail_open(err, dir, text);
    }
    *ret_manifest = &rocks->manifest;
    return KV_OK;
}

kv_status kv_manifest_open_read(const char *dir, struct kv_manifest **ret_manifest,
                                struct kv_error *ret_damage, struct kv_error *err)
{
    const kv_status status = open_read(dir, TOLERATE_TAIL, ret_manifest, err);
    if (status != KV_CORRUPT || ret_damage == NULL) return status;
    struct kv_error damage = *err;
    const kv_status again = open_read(dir, UP_TO_DAMAGE, ret_manifest, err);
    if (again == KV_OK) *ret_damage = damage;
    return again;
}
