#pragma once

/* Private to store/. */

#include "kvstore/store/store.h"

/* The batch of pending removals, made when first needed; NULL: out of memory. */
struct kv_batch *kv_store_dead_batch(struct kv_store *store);

/* Start-up: the changes in one batch, numbered like the others, and durable when it returns. */
kv_status kv_store_commit_now(struct kv_store *store, const struct kv_manifest_put *puts,
                              uint32_t put_count, struct kv_error *err) KV_MUST_CHECK;
/* Tells the owners of all batches that were answered, once their number is noted. */
void kv_store_tell(struct kv_store *store);

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
kv_status kv_store_recover_quarantine(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;

/* Start-up: claims the place of every recorded page, counts checkpoints, and deletes the records of
 * what cannot be had. */
kv_status kv_store_recover_trees(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
