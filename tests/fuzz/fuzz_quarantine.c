/*
 * Any bytes as the record of a quarantined place: never read beyond the value, and what is accepted
 * is exactly what the encoder writes for it.  Each value is tried as it is and with its checksum
 * made right, so that the checksum does not hide the rest.  The same bytes as a cause: whatever
 * they are, it can be recorded.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/quarantine.h"

static void check(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_quarantine record;
    uint8_t buf[KV_RECORD_QUARANTINE_MAX];
    if (kv_record_quarantine_decode(value, bytes, &record) != KV_OK) return;
    EXPECT_EQ_U32(kv_record_quarantine_encode(&record, buf), bytes);
    EXPECT_EQ_MEM(buf, value, bytes);
}

static void check_cause(const uint8_t *data, size_t bytes)
{
    struct kv_record_quarantine record = {.found_by = KV_FOUND_BY_READ}, got;
    uint8_t buf[KV_RECORD_QUARANTINE_MAX];
    char *text = calloc(1, bytes + 1);
    EXPECT(text != NULL);
    if (bytes > 0) memcpy(text, data, bytes);
    kv_quarantine_cause(text, record.cause);
    const uint32_t encoded = kv_record_quarantine_encode(&record, buf);
    EXPECT(kv_record_quarantine_decode(buf, encoded, &got) == KV_OK);
    EXPECT_EQ_STR(got.cause, record.cause);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint32_t value_bytes = (uint32_t)bytes;
    check(data, value_bytes);
    check_cause(data, bytes);
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
    struct kv_record_quarantine record = {
        .ssd_page = 7, .generation = 9, .owners = 2, .found_by = KV_FOUND_BY_SCRUB};
    if (index == 2) return 0;
    EXPECT(bytes_max >= KV_RECORD_QUARANTINE_MAX);
    if (index == 1) record.found_by = KV_FOUND_BY_READ;
    kv_quarantine_cause(index == 0 ? "checksum 0x00000001, computed 0x00000002" : "x",
                        record.cause);
    return kv_record_quarantine_encode(&record, buf);
}
