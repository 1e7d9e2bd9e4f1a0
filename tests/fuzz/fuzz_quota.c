/*
 * Any bytes as the record of a plan, or of a user's own limits: never read beyond the value, and
 * what is accepted is exactly what the encoder writes for it.  Each value is tried as it is and
 * with its checksum made right.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/quota.h"

static void check(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_plan plan;
    struct kv_record_quota quota;
    uint8_t buf[KV_RECORD_QUOTA_MAX];
    if (kv_record_plan_decode(value, bytes, &plan) == KV_OK) {
        EXPECT_EQ_U32(kv_record_plan_encode(&plan, buf), bytes);
        EXPECT_EQ_MEM(buf, value, bytes);
    }
    if (kv_record_quota_decode(value, bytes, &quota) == KV_OK) {
        EXPECT_EQ_U32(kv_record_quota_encode(&quota, buf), bytes);
        EXPECT_EQ_MEM(buf, value, bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint32_t value_bytes = (uint32_t)bytes;
    check(data, value_bytes);
    if (value_bytes < 4) return 0;

    uint8_t *repaired = malloc(value_bytes);
    EXPECT(repaired != NULL);
    memcpy(repaired, data, value_bytes);
    kv_store32(repaired + value_bytes - 4, kv_checksum(repaired, value_bytes - 4));
    check(repaired, value_bytes);
    free(repaired);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    const struct kv_record_plan plan = {.name = "small",
                                        .limits = {20, 10, UINT64_MAX, 5, 6, 7, 8}};
    const struct kv_record_quota quota = {
        .user = "alice", .plan = "small", .set = 5, .limits = {7, 0, UINT64_MAX}};
    const struct kv_record_quota plain = {.user = "b"};
    if (index == 3) return 0;
    EXPECT(bytes_max >= KV_RECORD_QUOTA_MAX);
    if (index == 0) return kv_record_plan_encode(&plan, buf);
    return kv_record_quota_encode(index == 1 ? &quota : &plain, buf);
}
