/* The record of a branch that a compaction left: its bytes, and that any change is refused. */

#include "kvstore/format/old_branch.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/base/limits.h"
#include "tests/harness.h"

static struct kv_record_old_branch sample(void)
{
    struct kv_record_old_branch record = {.until_ms = 0x1112131415161718u, .stop_tokens = 0x12345};
    memset(record.session.bytes, 0xa1, sizeof(record.session.bytes));
    memset(record.end.bytes, 0xb2, sizeof(record.end.bytes));
    return record;
}

static void test_bytes(void)
{
    static const uint8_t want[13] = "\x01\x18\x17\x16\x15\x14\x13\x12\x11\x45\x23\x01";
    const struct kv_record_old_branch record = sample();
    uint8_t buf[KV_RECORD_OLD_BRANCH_BYTES], key[KV_KEY_OLD_BRANCH_BYTES];
    struct kv_record_old_branch got;
    EXPECT_EQ_U32(kv_record_old_branch_encode(&record, buf), 17);
    EXPECT_EQ_MEM(buf, want, sizeof(want));
    EXPECT_EQ_U32(kv_load32(buf + 13), kv_checksum(buf, 13));
    EXPECT_EQ_U32(kv_key_old_branch(&record, key), 33);
    EXPECT_EQ_U32(key[0], 'L');
    EXPECT_EQ_MEM(key + 1, record.session.bytes, 16);
    EXPECT_EQ_MEM(key + 17, record.end.bytes, 16);
    EXPECT(kv_record_old_branch_decode(key, 33, buf, 17, &got) == KV_OK);
    EXPECT_EQ_MEM(got.session.bytes, record.session.bytes, 16);
    EXPECT_EQ_MEM(got.end.bytes, record.end.bytes, 16);
    EXPECT_EQ_U64(got.until_ms, record.until_ms);
    EXPECT_EQ_U32(got.stop_tokens, record.stop_tokens);
}

static void test_damage(void)
{
    const struct kv_record_old_branch record = sample();
    uint8_t buf[KV_RECORD_OLD_BRANCH_BYTES + 1] = {0}, key[KV_KEY_OLD_BRANCH_BYTES + 1] = {0};
    struct kv_record_old_branch got;
    (void)kv_record_old_branch_encode(&record, buf);
    (void)kv_key_old_branch(&record, key);
    for (uint32_t bit = 0; bit < 8 * KV_RECORD_OLD_BRANCH_BYTES; bit++) {
        buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
        EXPECT(kv_record_old_branch_decode(key, 33, buf, 17, &got) == KV_CORRUPT);
        buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (uint32_t bytes = 0; bytes <= 18; bytes++)
        EXPECT((kv_record_old_branch_decode(key, 33, buf, bytes, &got) == KV_OK) == (bytes == 17));
    for (uint32_t bytes = 0; bytes <= 34; bytes++)
        EXPECT((kv_record_old_branch_decode(key, bytes, buf, 17, &got) == KV_OK) == (bytes == 33));
    key[0] = 'M';
    EXPECT(kv_record_old_branch_decode(key, 33, buf, 17, &got) == KV_CORRUPT);
    key[0] = 'L';
    /* With the checksum made right again, so that it is not what refuses. */
    buf[0] = 2;
    kv_store32(buf + 13, kv_checksum(buf, 13));
    EXPECT(kv_record_old_branch_decode(key, 33, buf, 17, &got) == KV_CORRUPT);
    buf[0] = 1;
    kv_store32(buf + 9, KV_PROMPT_TOKENS_MAX);
    kv_store32(buf + 13, kv_checksum(buf, 13));
    EXPECT(kv_record_old_branch_decode(key, 33, buf, 17, &got) == KV_CORRUPT);
    kv_store32(buf + 9, KV_PROMPT_TOKENS_MAX - 1);
    kv_store32(buf + 13, kv_checksum(buf, 13));
    EXPECT(kv_record_old_branch_decode(key, 33, buf, 17, &got) == KV_OK);
}

int main(void)
{
    test_bytes();
    test_damage();
    HARNESS_END();
}
