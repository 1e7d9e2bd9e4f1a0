/*
 * Header of a segment file.
 *
 * Goal: version 1 is the bytes the header's comment promises, "fresh" is all zeros and nothing
 * else, and any single changed bit is noticed.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/segment_header.h"
#include "tests/harness.h"

static uint8_t bytes[KV_SEGMENT_HEADER_BYTES];

static void test_bytes_of_version_1(void)
{
    const struct kv_segment_header header = {
        .segment_bytes = 0x1122334455667788u, .page_bytes = 0x00067000, .number = 42};
    static const uint8_t want[32] = {
        'K',  'V',  'S',  'E',  'G',  'M',  '1',  '\n', 0x21, 0x42, 0x17, 0xac, 0x00, 0x70, 0x06, 0,
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 42,   0,    0,    0,    0,    0,    0,    0,
    };
    struct kv_segment_header back = {0};

    kv_segment_header_encode(&header, bytes);
    EXPECT_EQ_MEM(bytes, want, sizeof(want));
    EXPECT(kv_segment_header_decode(bytes, &back) == KV_OK);
    EXPECT_EQ_U64(back.segment_bytes, header.segment_bytes);
    EXPECT_EQ_U32(back.page_bytes, header.page_bytes);
    EXPECT_EQ_U32(back.number, header.number);
}

static void test_fresh(void)
{
    struct kv_segment_header header;
    memset(bytes, 0, sizeof(bytes));
    EXPECT(kv_segment_header_decode(bytes, &header) == KV_MISS);
    bytes[4095] = 1;
    EXPECT(kv_segment_header_decode(bytes, &header) == KV_CORRUPT);
}

static void test_every_bit_counts(void)
{
    struct kv_segment_header header = {.segment_bytes = 1u << 20, .page_bytes = 4096, .number = 1};
    kv_segment_header_encode(&header, bytes);
    for (uint32_t bit = 0; bit < 8 * KV_SEGMENT_HEADER_BYTES; bit += bit < 512 ? 1 : 7) {
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
        EXPECT(kv_segment_header_decode(bytes, &header) == KV_CORRUPT);
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
    }
    EXPECT(kv_segment_header_decode(bytes, &header) == KV_OK);
}

int main(void)
{
    test_bytes_of_version_1();
    test_fresh();
    test_every_bit_counts();
    HARNESS_END();
}
