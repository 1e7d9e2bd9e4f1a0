#pragma once

/* Private to store/. */

#include "kvstore/store/store.h"

/* The batch of pending removals, made when first needed; NULL: out of memory. */
struct kv_batch *kv_store_dead_batch(struct kv_store *store);

/* Start-up, after missing pages were seen: counts the checkpoints that need one of them. */
kv_status kv_store_count_dropped(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;
