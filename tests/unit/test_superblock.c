/*
 * The superblock.
 *
 * Goal: layout version 1 is the bytes that docs/format.md promises; one damaged copy loses nothing,
 * two are damage; another version is told from damage, whatever else it holds.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/superblock.h"
#include "tests/harness.h"

static uint8_t bytes[KV_SUPERBLOCK_BYTES];
static uint32_t version, damaged;

static const struct kv_superblock sample = {
    .id = {{0xa0, 0xa1, [15] = 0xaf}},
    .page_bytes = 20480,
    .window_tokens = 16,
    .segment_bytes = 0x0000004000000000u,
    .features = 0,
    .created_ms = 1700000000000u,
};

static void test_bytes_of_version_1(void)
{
    static const uint8_t want[64] = {
        'K',  'V',  'S', 'U', 'P', 'E', 'R', '\n', 0xe4, 0xa4, 0x5f, 0xc9, 1,    0, 0, 0,
        0xa0, 0xa1, 0,   0,   0,   0,   0,   0,    0,    0,    0,    0,    0,    0, 0, 0xaf,
        0x00, 0x50, 0,   0,   16,  0,   0,   0,    0,    0,    0,    0,    0x40, 0, 0, 0,
        0,    0,    0,   0,   0,   0,   0,   0,    0x00, 0x68, 0xe5, 0xcf, 0x8b, 1, 0, 0,
    };
    struct kv_superblock got;

    kv_superblock_encode(&sample, bytes);
    EXPECT_EQ_MEM(bytes, want, sizeof(want));
    EXPECT_EQ_MEM(bytes + 4096, want, sizeof(want));
    for (uint32_t i = 64; i < 4096; i++)
        EXPECT_EQ_U32(bytes[i], 0);
    EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_OK);
    EXPECT_EQ_U32(version, KV_LAYOUT_VERSION);
    EXPECT_EQ_U32(damaged, 0);
    EXPECT_EQ_MEM(got.id.bytes, sample.id.bytes, 16);
    EXPECT_EQ_U32(got.page_bytes, sample.page_bytes);
    EXPECT_EQ_U32(got.window_tokens, sample.window_tokens);
    EXPECT_EQ_U64(got.segment_bytes, sample.segment_bytes);
    EXPECT_EQ_U64(got.features, 0);
    EXPECT_EQ_U64(got.created_ms, sample.created_ms);
}

static void test_every_bit_counts(void)
{
    struct kv_superblock got;
    kv_superblock_encode(&sample, bytes);
    for (uint32_t bit = 0; bit < 8 * KV_SUPERBLOCK_BYTES; bit += bit % 32768 < 640 ? 1 : 13) {
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
        EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_OK);
        EXPECT_EQ_U32(damaged, 1);
        EXPECT_EQ_MEM(&got, &sample, sizeof(got));
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
    }
}

static void test_both_copies_damaged(void)
{
    struct kv_superblock got;
    kv_superblock_encode(&sample, bytes);
    bytes[20] ^= 1;
    bytes[4096 + 3000] ^= 1;
    EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_CORRUPT);
    EXPECT_EQ_U32(damaged, 2);
    memset(bytes, 0, sizeof(bytes));
    EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_CORRUPT);
    memset(bytes, 0xff, sizeof(bytes));
    EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_CORRUPT);
}

/* Changes a field of the first copy and makes its checksum right. */
static kv_status decode_changed(uint32_t at, uint64_t field, uint32_t count)
{
    struct kv_superblock got;
    kv_superblock_encode(&sample, bytes);
    for (uint32_t i = 0; i < count; i++)
        bytes[at + i] = (uint8_t)(field >> (8 * i));
    kv_store32(bytes + 8, kv_checksum(bytes + 12, 4096 - 12));
    memcpy(bytes + 4096, bytes, 4096);
    return kv_superblock_decode(bytes, &got, &version, &damaged);
}

static void test_fields(void)
{
    EXPECT(decode_changed(12, 0, 4) == KV_INVALID);
    EXPECT_EQ_U32(version, 0);
    EXPECT(decode_changed(12, 2, 4) == KV_INVALID);
    EXPECT_EQ_U32(version, 2);
    EXPECT_EQ_U32(damaged, 0);
    EXPECT(decode_changed(12, UINT32_MAX, 4) == KV_INVALID);
    EXPECT(decode_changed(32, 0, 4) == KV_CORRUPT);
    EXPECT(decode_changed(32, 20481, 4) == KV_CORRUPT);
    EXPECT(decode_changed(36, 0, 4) == KV_CORRUPT);
    EXPECT(decode_changed(40, 20480, 8) == KV_CORRUPT);
    EXPECT(decode_changed(64, 1, 1) == KV_CORRUPT);
    EXPECT(decode_changed(4095, 1, 1) == KV_CORRUPT);
    /* A reader decides about these. */
    EXPECT(decode_changed(48, 1, 1) == KV_OK);
    EXPECT(decode_changed(48, 1ull << 63, 8) == KV_OK);
}

/* With bit 1: what it says of one master key or two, at the documented places. */
static void test_encrypted(void)
{
    struct kv_superblock want = sample, got;
    want.features = KV_FEATURE_ENCRYPTION;
    memset(&want.master, 0x11, sizeof(want.master));
    memset(&want.next_master, 0x22, sizeof(want.next_master));
    for (int i = 0; i < 2; i++) {
        want.has_next_master = i == 1;
        kv_superblock_encode(&want, bytes);
        EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_OK);
        EXPECT(got.has_next_master == want.has_next_master);
        EXPECT_EQ_MEM(&got.master, &want.master, sizeof(got.master));
        if (i == 1) EXPECT_EQ_MEM(&got.next_master, &want.next_master, sizeof(got.master));
        for (uint32_t at = 64; at < 256; at++)
            EXPECT_EQ_U32(bytes[at], at < 100 ? 0x11 : at < 136 && i == 1 ? 0x22 : 0);
    }
    memset(&want.master, 0, sizeof(want.master)); /* A bit without a key. */
    want.has_next_master = false;
    kv_superblock_encode(&want, bytes);
    EXPECT(kv_superblock_decode(bytes, &got, &version, &damaged) == KV_CORRUPT);
}

int main(void)
{
    test_bytes_of_version_1();
    test_every_bit_counts();
    test_both_copies_damaged();
    test_fields();
    test_encrypted();
    HARNESS_END();
}
