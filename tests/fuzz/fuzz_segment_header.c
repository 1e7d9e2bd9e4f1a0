/*
 * Any bytes as the header of a segment file: zeros are a miss, what is accepted is exactly what the
 * encoder writes for it, everything else is damage.  Each input is tried as it is and with its
 * checksum made right, so that the checksum does not hide the rest.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/segment_header.h"

static void check(const uint8_t *bytes)
{
    static const uint8_t zeros[KV_SEGMENT_HEADER_BYTES];
    struct kv_segment_header header;
    uint8_t encoded[KV_SEGMENT_HEADER_BYTES];
    uint32_t version = 1;

    const kv_status status = kv_segment_header_decode(bytes, &header, &version);
    const bool is_zero = memcmp(bytes, zeros, sizeof(zeros)) == 0;
    EXPECT((status == KV_MISS) == is_zero);
    EXPECT(status == KV_OK || status == KV_MISS || status == KV_CORRUPT || status == KV_INVALID);
    if (status == KV_OK) EXPECT_EQ_U32(version, 1);
    if (status == KV_INVALID) EXPECT(version != 1);
    if (status != KV_OK) return;
    kv_segment_header_encode(&header, encoded);
    EXPECT_EQ_MEM(encoded, bytes, sizeof(encoded));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t *header = calloc(1, KV_SEGMENT_HEADER_BYTES);
    EXPECT(header != NULL);
    memcpy(header, data, KV_MIN(bytes, (size_t)KV_SEGMENT_HEADER_BYTES));
    check(header);
    kv_store32(header + 8, kv_checksum(header + 12, KV_SEGMENT_HEADER_BYTES - 12));
    check(header);
    free(header);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    const struct kv_segment_header header = {
        .segment_bytes = (uint64_t)(index + 1) << 26,
        .page_bytes = 4096 * (index + 1),
        .number = index,
        .directory = {{9, 8, 7}},
    };
    if (index == 3) return 0;
    EXPECT(bytes_max >= KV_SEGMENT_HEADER_BYTES);
    kv_segment_header_encode(&header, buf);
    return KV_SEGMENT_HEADER_BYTES;
}
