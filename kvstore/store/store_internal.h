#pragma once

/* Private to store/. */

#include "kvstore/format/manifest_record.h"
#include "kvstore/store/segments.h"
#include "kvstore/store/store.h"
#include "kvstore/store/store_quota.h"

/* The batch of pending removals, made when first needed; NULL: out of memory. */
struct kv_batch *kv_store_dead_batch(struct kv_store *store);

/* Start-up: the changes in one batch, numbered like the others, and durable when it returns. */
kv_status kv_store_commit_now(struct kv_store *store, const struct kv_manifest_put *puts,
                              uint32_t put_count, struct kv_error *err) KV_MUST_CHECK;
/* The same with a batch, which is freed. */
kv_status kv_batch_commit_now(struct kv_batch *batch, struct kv_error *err) KV_MUST_CHECK;
/* A record of any kind, or its deletion. */
kv_status kv_batch_put(struct kv_batch *batch, const struct kv_manifest_put *put) KV_MUST_CHECK;
struct kv_store *kv_batch_store(const struct kv_batch *batch);
/* The segment's record, as it is when the batch is posted. */
kv_status kv_batch_segment(struct kv_batch *batch, uint32_t number) KV_MUST_CHECK;
/* That segment records cannot be relied on: the next start counts again. */
kv_status kv_batch_doubt(struct kv_batch *batch) KV_MUST_CHECK;
/* Goes on with records after the file system was full. */
void kv_store_resume(struct kv_store *store);
/* Tells the owners of all batches that were answered, once their number is noted. */
void kv_store_tell(struct kv_store *store);

/* The session's record, with the number of its checkpoints, into the batch of removals. */
void kv_store_record_count(struct kv_store *store, const struct kv_session *session);

/* ---- store_history.c ---- */

/* Start-up: the bit, if this directory does not have it; and sessions that are gone. */
void kv_store_history_feature(struct kv_store *store);
kv_status kv_store_recover_deleted(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
void kv_store_note_removed(struct kv_store *store, struct kv_tree *tree,
                           const struct kv_checkpoint_id *id, uint32_t from, uint32_t to,
                           const struct kv_loss *loss);
/* The tree's history into the batch of removals. */
void kv_store_record_history(struct kv_store *store, const struct kv_tree *tree);
/* A record H of a tree that is being loaded. */
kv_status kv_store_take_history(struct kv_store *store, struct kv_tree *tree,
                                const struct kv_manifest_put *put) KV_MUST_CHECK;

/* A leaf, its record and what only it needs; not the record of the session that made it. */
void kv_store_drop_leaf(struct kv_store *store, struct kv_node *leaf, const struct kv_loss *loss);
/* ---- store_quota.c ---- */

kv_status kv_store_quota_open(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
void kv_store_quota_close(struct kv_store *store);

/* ---- store_time.c: the time that ages are counted by ---- */

/* Start-up: before records are read, and when all sessions are known; that also brings what is in
 * the index to this time. */
kv_status kv_store_time_begin(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
void kv_store_time_judge(struct kv_store *store);
void kv_store_time_tick(struct kv_store *store);
kv_status kv_batch_clock(struct kv_batch *batch, const struct kv_timeline *line) KV_MUST_CHECK;

/* ---- store_note.c: the file DIR/acknowledged ---- */

/* Highest number noted; 0: none, or it could not be read, which is logged. */
uint64_t kv_note_open(struct kv_store *store);
/* Makes the file if it is not there, and notes in it. */
void kv_note_first(struct kv_store *store, uint64_t number);
/* False: nothing to wait for.  True: `done` will run, whatever came of it. */
bool kv_note_start(struct kv_store *store, uint64_t number, void (*done)(struct kv_store *store));
/* Flushes it. */
void kv_note_close(struct kv_store *store);

/* Start-up: the places that earlier runs found bad, before any is claimed. */
kv_status kv_store_recover_old_branches(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
kv_status kv_store_recover_quarantine(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;

/* ---- store_judge.c ---- */

/* Where the key is from, to tell. */
const char *kv_keys_source(const struct kv_store_options *options);
/* Before anything of a directory is changed.  KV_INVALID, in one sentence: the key that is given
 * does not open it, or it is needed and none is given. */
kv_status kv_keys_judge(const struct kv_store_options *options,
                        const struct kv_superblock *superblock, struct kv_error *err) KV_MUST_CHECK;
/* What the superblock says of the key that is given. */
kv_status kv_keys_check_of(const struct kv_store_options *options,
                           const struct kv_directory_id *directory, struct kv_key_check *ret_check,
                           struct kv_error *err) KV_MUST_CHECK;
/* ---- store_keys.c ---- */

/* Start-up: reads the data keys, before anything is written and before users; gives each user his
 * and opens the salt of his record; then, when all users are there, gives keys to those without and
 * ends a rotation that was cut off. */
kv_status kv_keys_open(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
kv_status kv_keys_user_salt(struct kv_store *store, const struct kv_record_user *record,
                            uint8_t ret_salt[KV_SALT_BYTES], struct kv_error *err) KV_MUST_CHECK;
void kv_keys_user_found(struct kv_store *store, struct kv_user *user);
kv_status kv_keys_settle(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
void kv_keys_close(struct kv_store *store);

/* A data key where pages are encrypted and the user has none; KV_IO, KV_NOMEM. */
kv_status kv_keys_make(struct kv_store *store, struct kv_user *user) KV_MUST_CHECK;
/* The user's record as it is to be stored: with a salt that is encrypted if he has a key. */
kv_status kv_keys_seal_user(struct kv_store *store, const struct kv_user *user,
                            struct kv_record_user *record) KV_MUST_CHECK;
/* Records of the user's data keys, or their deletion. */
kv_status kv_keys_put(struct kv_batch *batch, const struct kv_user *user,
                      const uint8_t master[KV_KEY_BYTES]) KV_MUST_CHECK;
kv_status kv_keys_delete(struct kv_batch *batch, struct kv_user *user) KV_MUST_CHECK;
/* The master key in use. */
const uint8_t *kv_keys_master(const struct kv_store *store);

/* Makes a verified page of that place plain, if it is not.  KV_CORRUPT. */
kv_status kv_keys_decrypt(struct kv_store *store, const struct kv_user *user, uint32_t ssd_page,
                          uint8_t *bytes, struct kv_error *err) KV_MUST_CHECK;
/* The stamped page `from` as it is to lie at that place; the user has a key. */
void kv_keys_encrypt(struct kv_store *store, const struct kv_user *user, uint32_t ssd_page,
                     const uint8_t *from, uint8_t *to);

/* ---- store_encrypt.c: pages on their way to SSD ---- */

/* Start-up, where pages are encrypted. */
kv_status kv_encrypter_open(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
void kv_encrypter_close(struct kv_store *store);
/* Starts item->op with what is to be written, now or when a buffer is free; its place is known. */
void kv_encrypter_write(struct kv_store *store, struct kv_write_item *item);
/* The item was written: its buffer is the next one's. */
void kv_encrypter_written(struct kv_store *store, struct kv_write_item *item);

/* ---- store_recover.c ---- */

/* Start-up, when users and sessions are there: claims the place of every recorded page and counts
 * checkpoints, from segment records where these can be relied on, else from the trees.  Then the
 * records of what cannot be had are deleted, and segment records written. */
kv_status kv_store_recover(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;

/* What a start does, for whoever waits for it. */
void kv_store_tell_progress(const struct kv_store *store, const char *phase, uint32_t percent);

/* ---- store_scan.c ---- */

/* Reads all trees: claims places, fills the table of segments, counts checkpoints, and fills
 * `batch` with what puts the records right. */
kv_status kv_store_scan_trees(struct kv_store *store, struct kv_batch *batch,
                              struct kv_error *err) KV_MUST_CHECK;

/* ---- store_segments.c: segments.h from the inside ---- */

struct kv_segments;
kv_status kv_segments_create(uint32_t pages, uint32_t count,
                             struct kv_segments **ret_segments) KV_MUST_CHECK;
void kv_segments_destroy(struct kv_segments *segments);
void kv_segments_clear(struct kv_segments *segments); /* All open, nothing recorded. */
uint32_t kv_segments_number(const struct kv_segments *segments, uint32_t ssd_page);
bool kv_segments_has(const struct kv_segments *segments, uint32_t ssd_page);
void kv_segments_set(struct kv_segments *segments, uint32_t ssd_page, bool used);
/* True: its record is older than its time of use by a step and more. */
bool kv_segments_touch(struct kv_segments *segments, uint32_t number, uint64_t used_ms);
/* kv_record_segment_bytes(pages) bytes; what is written is taken for posted. */
uint32_t kv_segments_encode(struct kv_segments *segments, uint32_t number, uint8_t *value);
/* KV_CORRUPT: no record of this directory; KV_MISS: there can be no such segment. */
kv_status kv_segments_decode(struct kv_segments *segments, uint32_t number, const uint8_t *value,
                             uint32_t bytes) KV_MUST_CHECK;
