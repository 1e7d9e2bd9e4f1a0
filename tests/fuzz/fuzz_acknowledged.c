/*
 * Any bytes as the file `acknowledged`: what is accepted is what the encoder writes for it, in the
 * slot that was read, and no whole slot has a higher number.  Each input is tried as it is and with
 * its checksums made right, so that they do not hide the rest.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/acknowledged.h"

static void check(const uint8_t *bytes)
{
    struct kv_acknowledged found;
    uint8_t encoded[KV_ACKNOWLEDGED_SLOT_BYTES];
    uint32_t slot = 9, damaged = 9;
    const kv_status status = kv_acknowledged_decode(bytes, &found, &slot, &damaged);
    EXPECT(status == KV_OK || status == KV_MISS || status == KV_CORRUPT);
    EXPECT(damaged <= 2);
    EXPECT((status == KV_CORRUPT) == (status != KV_OK && damaged > 0));
    if (status != KV_OK) return;
    EXPECT(slot < 2);
    kv_acknowledged_encode(&found, encoded);
    EXPECT_EQ_MEM(encoded, bytes + (size_t)slot * KV_ACKNOWLEDGED_SLOT_BYTES, sizeof(encoded));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t *whole = calloc(1, KV_ACKNOWLEDGED_BYTES);
    EXPECT(whole != NULL);
    memcpy(whole, data, KV_MIN(bytes, (size_t)KV_ACKNOWLEDGED_BYTES));
    check(whole);
    for (uint32_t at = 0; at < KV_ACKNOWLEDGED_BYTES; at += KV_ACKNOWLEDGED_SLOT_BYTES) {
        kv_store32(whole + at + 8, kv_checksum(whole + at + 12, KV_ACKNOWLEDGED_SLOT_BYTES - 12));
        check(whole);
    }
    free(whole);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    if (index == 3) return 0;
    EXPECT(bytes_max >= KV_ACKNOWLEDGED_BYTES);
    memset(buf, 0, KV_ACKNOWLEDGED_BYTES);
    for (uint32_t i = 0; i < index; i++)
        kv_acknowledged_encode(
            &(struct kv_acknowledged){.directory = {{7, (uint8_t)index}}, .number = 100 + i},
            buf + (size_t)i * KV_ACKNOWLEDGED_SLOT_BYTES);
    return KV_ACKNOWLEDGED_BYTES;
}
