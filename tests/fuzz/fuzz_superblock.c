/*
 * Any bytes as a superblock: what is accepted is what the encoder writes for it, in the copy that
 * was read.  Each input is tried as it is and with its checksums made right, so that they do not
 * hide the rest.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/superblock.h"

static void check(const uint8_t *bytes)
{
    struct kv_superblock superblock;
    uint8_t encoded[KV_SUPERBLOCK_BYTES];
    uint32_t version = KV_LAYOUT_VERSION, damaged = 99;

    const kv_status status = kv_superblock_decode(bytes, &superblock, &version, &damaged);
    EXPECT(status == KV_OK || status == KV_INVALID || status == KV_CORRUPT);
    EXPECT((status == KV_CORRUPT) == (damaged == 2));
    EXPECT((status == KV_INVALID) == (version != KV_LAYOUT_VERSION));
    if (status != KV_OK) return;
    kv_superblock_encode(&superblock, encoded);
    const bool first = memcmp(encoded, bytes, KV_SUPERBLOCK_COPY_BYTES) == 0;
    const bool second =
        memcmp(encoded, bytes + KV_SUPERBLOCK_COPY_BYTES, KV_SUPERBLOCK_COPY_BYTES) == 0;
    EXPECT(first || second);
    EXPECT_EQ_U32(damaged, first && second ? 0 : 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t *whole = calloc(1, KV_SUPERBLOCK_BYTES);
    EXPECT(whole != NULL);
    memcpy(whole, data, KV_MIN(bytes, (size_t)KV_SUPERBLOCK_BYTES));
    check(whole);
    for (uint32_t at = 0; at < KV_SUPERBLOCK_BYTES; at += KV_SUPERBLOCK_COPY_BYTES) {
        kv_store32(whole + at + 8, kv_checksum(whole + at + 12, KV_SUPERBLOCK_COPY_BYTES - 12));
        check(whole);
    }
    free(whole);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    const struct kv_superblock superblock = {
        .id = {{(uint8_t)index, 2, 3}},
        .page_bytes = 4096 * (index + 1),
        .window_tokens = 16u << index,
        .segment_bytes = (uint64_t)(index + 1) << 26,
        .features = index,
        .created_ms = 1700000000000u + index,
        .master = {.master = {{(uint8_t)index, 1}}},
        .next_master = {.master = {{7}}},
        .has_next_master = index == 2,
    };
    if (index == 3) return 0;
    EXPECT(bytes_max >= KV_SUPERBLOCK_BYTES);
    kv_superblock_encode(&superblock, buf);
    return KV_SUPERBLOCK_BYTES;
}
