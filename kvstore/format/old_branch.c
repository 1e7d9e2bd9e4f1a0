/*
 * Encodes and checks the record of a branch that a compaction left.
 *
 * It is a record of its own, not a field of the node's: it is written and deleted with the
 * session's, and a build that does not know it lets the branch live until it expires.
 */

#include "kvstore/format/old_branch.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <string.h>

enum { RECORD_VERSION = 1, AT_UNTIL = 1, AT_STOP = 9, AT_CRC = 13 };

_Static_assert(AT_CRC + 4 == KV_RECORD_OLD_BRANCH_BYTES, "the checksum ends it");

uint32_t kv_record_old_branch_encode(const struct kv_record_old_branch *record,
                                     uint8_t buf[KV_RECORD_OLD_BRANCH_BYTES])
{
    assert(record->stop_tokens < KV_PROMPT_TOKENS_MAX);
    buf[0] = RECORD_VERSION;
    kv_store64(buf + AT_UNTIL, record->until_ms);
    kv_store32(buf + AT_STOP, record->stop_tokens);
    kv_store32(buf + AT_CRC, kv_checksum(buf, AT_CRC));
    return KV_RECORD_OLD_BRANCH_BYTES;
}

kv_status kv_record_old_branch_decode(const uint8_t *key, uint32_t key_bytes, const uint8_t *value,
                                      uint32_t bytes, struct kv_record_old_branch *ret_record)
{
    if (key_bytes != KV_KEY_OLD_BRANCH_BYTES || key[0] != 'L') return KV_CORRUPT;
    if (bytes != KV_RECORD_OLD_BRANCH_BYTES || value[0] != RECORD_VERSION) return KV_CORRUPT;
    if (kv_load32(value + AT_CRC) != kv_checksum(value, AT_CRC)) return KV_CORRUPT;
    struct kv_record_old_branch record = {
        .until_ms = kv_load64(value + AT_UNTIL),
        .stop_tokens = kv_load32(value + AT_STOP),
    };
    if (record.stop_tokens >= KV_PROMPT_TOKENS_MAX) return KV_CORRUPT;
    memcpy(record.session.bytes, key + 1, sizeof(record.session.bytes));
    memcpy(record.end.bytes, key + 17, sizeof(record.end.bytes));
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_key_old_branch(const struct kv_record_old_branch *record,
                           uint8_t key[KV_KEY_OLD_BRANCH_BYTES])
{
    key[0] = 'L';
    memcpy(key + 1, record->session.bytes, sizeof(record->session.bytes));
    memcpy(key + 17, record->end.bytes, sizeof(record->end.bytes));
    return KV_KEY_OLD_BRANCH_BYTES;
}
