/*
 * Any bytes as the record of a branch that a compaction left: never read beyond key and value, and
 * what is accepted is exactly what the encoder writes for it.  Each value is tried as it is and
 * with its checksum made right.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/old_branch.h"

static void check(const uint8_t *key, uint32_t key_bytes, const uint8_t *value, uint32_t bytes)
{
    struct kv_record_old_branch record;
    uint8_t buf[KV_RECORD_OLD_BRANCH_BYTES], again[KV_KEY_OLD_BRANCH_BYTES];
    if (kv_record_old_branch_decode(key, key_bytes, value, bytes, &record) != KV_OK) return;
    EXPECT_EQ_U32(kv_record_old_branch_encode(&record, buf), bytes);
    EXPECT_EQ_MEM(buf, value, bytes);
    EXPECT_EQ_U32(kv_key_old_branch(&record, again), key_bytes);
    EXPECT_EQ_MEM(again, key, key_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint32_t key_bytes =
        (uint32_t)(bytes < KV_KEY_OLD_BRANCH_BYTES ? bytes : KV_KEY_OLD_BRANCH_BYTES);
    const uint32_t value_bytes = (uint32_t)bytes - key_bytes;
    check(data, key_bytes, data + key_bytes, value_bytes);
    if (value_bytes < 4) return 0;

    uint8_t *repaired = malloc(value_bytes);
    EXPECT(repaired != NULL);
    memcpy(repaired, data + key_bytes, value_bytes);
    kv_store32(repaired + value_bytes - 4, kv_checksum(repaired, value_bytes - 4));
    check(data, key_bytes, repaired, value_bytes);
    free(repaired);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    const struct kv_record_old_branch record = {
        .session.bytes = "one", .end.bytes = "two", .until_ms = 7, .stop_tokens = index};
    if (index == 3) return 0;
    EXPECT(bytes_max >= KV_KEY_OLD_BRANCH_BYTES + KV_RECORD_OLD_BRANCH_BYTES);
    const uint32_t key_bytes = kv_key_old_branch(&record, buf);
    return key_bytes + kv_record_old_branch_encode(&record, buf + key_bytes);
}
