#pragma once

/* Private to store/. */

#include "kvstore/store/store.h"

/* The batch of pending removals, made when first needed; NULL: out of memory. */
struct kv_batch *kv_store_dead_batch(struct kv_store *store);

/* Start-up: claims the place of every recorded page, counts checkpoints, and deletes the records of
 * what cannot be had. */
kv_status kv_store_recover_trees(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
