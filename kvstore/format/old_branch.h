#pragma once

/*
 * The record of a branch that a compaction left, and of when it goes (docs/format.md).  Stands
 * under "L" session(16) checkpoint(16): the end of the branch.  Integers of the value
 * little-endian:
 *
 *     0  version
 *     1  u64 until_ms: wall time
 *     9  u32 stop_tokens: checkpoints at or above this position stay
 *    13  u32 checksum of all before it
 *
 * Pure; any thread.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"

#include <stdint.h>

#define KV_RECORD_OLD_BRANCH_BYTES 17u
#define KV_KEY_OLD_BRANCH_BYTES 33u

struct kv_record_old_branch {
    struct kv_session_id session;
    struct kv_checkpoint_id end; /* Deepest checkpoint of the branch. */
    uint64_t until_ms;
    uint32_t stop_tokens;
};

uint32_t kv_record_old_branch_encode(const struct kv_record_old_branch *record,
                                     uint8_t buf[KV_RECORD_OLD_BRANCH_BYTES]);
/* Of key and value.  KV_CORRUPT: length, version, checksum or a bound is wrong. */
kv_status kv_record_old_branch_decode(const uint8_t *key, uint32_t key_bytes, const uint8_t *value,
                                      uint32_t bytes,
                                      struct kv_record_old_branch *ret_record) KV_MUST_CHECK;
uint32_t kv_key_old_branch(const struct kv_record_old_branch *record,
                           uint8_t key[KV_KEY_OLD_BRANCH_BYTES]);
