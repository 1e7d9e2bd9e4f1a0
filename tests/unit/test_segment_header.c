/*
 * Header of a segment file.
 *
 * Goal: version 1 is the bytes the header's comment promises, "fresh" is all zeros and nothing
 * else, and any single changed bit is noticed.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/segment_header.h"
#include "tests/harness.h"

static uint8_t bytes[KV_SEGMENT_HEADER_BYTES];
static uint32_t version;

static void test_bytes_of_version_1(void)
{
    const struct kv_segment_header header = {.segment_bytes = 0x1122334455667788u,
                                             .page_bytes = 0x00067000,
                                             .number = 42,
                                             .directory = {{0xd1, 0xd2, [15] = 0xdf}}};
    static const uint8_t want[52] = {
        'K',  'V',  'S',  'E', 'G',  'M',  '1',  '\n', 0x08, 0x1a, 0x3f, 0x81,
        0x00, 0x70, 0x06, 0,   0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
        42,   0,    0,    0,   1,    0,    0,    0,    0xd1, 0xd2, 0,    0,
        0,    0,    0,    0,   0,    0,    0,    0,    0,    0,    0,    0xdf,
    };
    struct kv_segment_header back = {0};

    kv_segment_header_encode(&header, bytes);
    EXPECT_EQ_MEM(bytes, want, sizeof(want));
    EXPECT(kv_segment_header_decode(bytes, &back, &version) == KV_OK);
    EXPECT_EQ_U32(version, 1);
    EXPECT_EQ_MEM(back.directory.bytes, header.directory.bytes, 16);
    EXPECT_EQ_U64(back.segment_bytes, header.segment_bytes);
    EXPECT_EQ_U32(back.page_bytes, header.page_bytes);
    EXPECT_EQ_U32(back.number, header.number);
}

static void test_fresh(void)
{
    struct kv_segment_header header;
    memset(bytes, 0, sizeof(bytes));
    EXPECT(kv_segment_header_decode(bytes, &header, &version) == KV_MISS);
    bytes[4095] = 1;
    EXPECT(kv_segment_header_decode(bytes, &header, &version) == KV_CORRUPT);
}

static void test_every_bit_counts(void)
{
    struct kv_segment_header header = {.segment_bytes = 1u << 20, .page_bytes = 4096, .number = 1};
    kv_segment_header_encode(&header, bytes);
    for (uint32_t bit = 0; bit < 8 * KV_SEGMENT_HEADER_BYTES; bit += bit < 512 ? 1 : 7) {
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
        EXPECT(kv_segment_header_decode(bytes, &header, &version) == KV_CORRUPT);
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
    }
    EXPECT(kv_segment_header_decode(bytes, &header, &version) == KV_OK);
}

/* Whole, but not ours: never taken for damage, which would be written over. */
static void test_other_versions(void)
{
    const uint32_t versions[] = {0, 2, UINT32_MAX};
    struct kv_segment_header header = {.segment_bytes = 1u << 20, .page_bytes = 4096, .number = 1};
    for (size_t i = 0; i < KV_ARRAY_COUNT(versions); i++) {
        kv_segment_header_encode(&header, bytes);
        kv_store32(bytes + 28, versions[i]);
        bytes[3000] = 7; /* Whatever another version keeps there. */
        EXPECT(kv_segment_header_decode(bytes, &header, &version) == KV_CORRUPT);
        kv_store32(bytes + 8, kv_checksum(bytes + 12, sizeof(bytes) - 12));
        EXPECT(kv_segment_header_decode(bytes, &header, &version) == KV_INVALID);
        EXPECT_EQ_U32(version, versions[i]);
    }
}

int main(void)
{
    test_other_versions();
    test_bytes_of_version_1();
    test_fresh();
    test_every_bit_counts();
    HARNESS_END();
}
