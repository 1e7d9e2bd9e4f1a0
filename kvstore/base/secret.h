#pragma once

/*
 * Memory for keys: kept out of core dumps and out of swap, and wiped before it is given back.
 * Items of one size; one never moves.  Owned by: one thread at a time.
 *
 * The kernel may refuse to lock it (RLIMIT_MEMLOCK): it is used all the same, and says so.
 */

#include "kvstore/base/status.h"

#include <stddef.h>

struct kv_secrets;

/* KV_NOMEM. */
kv_status kv_secrets_create(size_t item_bytes, struct kv_secrets **ret_secrets,
                            struct kv_error *err) KV_MUST_CHECK;
/* Wipes everything, also what was never freed. */
void kv_secrets_destroy(struct kv_secrets *secrets);

/* Zeros; NULL: out of memory. */
void *kv_secrets_alloc(struct kv_secrets *secrets);
void kv_secrets_free(struct kv_secrets *secrets, void *item); /* NULL: nothing. */

/* 0: all of it is locked; else the errno of the first refusal. */
int kv_secrets_unlocked_errno(const struct kv_secrets *secrets);
