/*
 * Any bytes as a history of removals, or as the record of a deleted session: never read beyond the
 * value, and what is accepted is exactly what the encoder writes for it.  Each value is tried as it
 * is and with its checksum made right.  A history that was accepted takes more removals and stays
 * one that can be recorded.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/removal.h"

static void check_history(const uint8_t *value, uint32_t bytes)
{
    struct kv_history history, got;
    uint8_t buf[KV_RECORD_HISTORY_MAX];
    if (kv_record_history_decode(value, bytes, &history) != KV_OK) return;
    EXPECT_EQ_U32(kv_record_history_encode(&history, buf), bytes);
    EXPECT_EQ_MEM(buf, value, bytes);
    for (uint32_t i = 0; i < 2 * KV_REMOVALS_MAX; i++) {
        const struct kv_removal more = {.cause = KV_REASON_EXPIRED,
                                        .part = KV_REMOVED_ROWS,
                                        .from = 100 * i,
                                        .to = 100 * i + 50,
                                        .checkpoints = 1,
                                        .removed_ms = 1000000u * i};
        kv_history_add(&history, &more, &(struct kv_checkpoint_id){{(uint8_t)i}});
        EXPECT(kv_history_at(&history, more.from, true) != NULL);
    }
    const uint32_t encoded = kv_record_history_encode(&history, buf);
    EXPECT(encoded <= sizeof(buf) && kv_record_history_decode(buf, encoded, &got) == KV_OK);
}

static void check_deleted(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_deleted record;
    uint8_t buf[KV_RECORD_DELETED_BYTES];
    if (kv_record_deleted_decode(value, bytes, &record) != KV_OK) return;
    EXPECT_EQ_U32(kv_record_deleted_encode(&record, buf), bytes);
    EXPECT_EQ_MEM(buf, value, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint32_t value_bytes = (uint32_t)bytes;
    check_history(data, value_bytes);
    check_deleted(data, value_bytes);
    if (value_bytes < 4) return 0;

    uint8_t *repaired = malloc(value_bytes);
    EXPECT(repaired != NULL);
    memcpy(repaired, data, value_bytes);
    kv_store32(repaired + value_bytes - 4, kv_checksum(repaired, value_bytes - 4));
    check_history(repaired, value_bytes);
    check_deleted(repaired, value_bytes);
    free(repaired);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    struct kv_history history = {0};
    const struct kv_record_deleted deleted = {
        .user = {{1, 2, 3}}, .cause = KV_REASON_DELETED, .removed_ms = 77, .checkpoints = 4};
    if (index == 3) return 0;
    EXPECT(bytes_max >= KV_RECORD_HISTORY_MAX);
    if (index == 2) return kv_record_deleted_encode(&deleted, buf);
    for (uint32_t i = 0; i < (index == 0 ? 2u : 40u); i++) {
        const struct kv_removal removal = {
            .cause = i % 2 == 0 ? KV_REASON_CAPACITY : KV_REASON_QUOTA,
            .part = i % 3 == 0 ? KV_REMOVED_CHECKPOINT : KV_REMOVED_ROWS,
            .limit_of = i % 2 == 0 ? KV_LIMIT_SSD_BYTES : KV_LIMIT_TURNS,
            .from = 300 * i,
            .to = 300 * i + 30,
            .checkpoints = 1,
            .removed_ms = 1796000000000u + 100000u * i,
            .limit = 10,
            .value = 11,
        };
        kv_history_add(&history, &removal, &(struct kv_checkpoint_id){{(uint8_t)i, 1}});
    }
    return kv_record_history_encode(&history, buf);
}
