/*
 * The file `acknowledged`.
 *
 * Goal: a slot is the bytes that docs/format.md promises; of two whole slots the higher number
 * counts, of one whole slot it does, whatever stands in the other; nothing that is not whole is
 * believed.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/acknowledged.h"
#include "tests/harness.h"

static uint8_t bytes[KV_ACKNOWLEDGED_BYTES];
static struct kv_acknowledged got;
static uint32_t slot, damaged;

static uint8_t *slot_at(uint32_t i)
{
    return bytes + (size_t)i * KV_ACKNOWLEDGED_SLOT_BYTES;
}

static void put(uint32_t i, uint64_t number)
{
    kv_acknowledged_encode(
        &(struct kv_acknowledged){.directory = {{0xa0, [15] = 0xaf}}, .number = number},
        slot_at(i));
}

static void expect(kv_status status, uint64_t number, uint32_t at, uint32_t bad)
{
    damaged = 99;
    EXPECT(kv_acknowledged_decode(bytes, &got, &slot, &damaged) == status);
    EXPECT_EQ_U32(damaged, bad);
    if (status != KV_OK) return;
    EXPECT_EQ_U64(got.number, number);
    EXPECT_EQ_U32(slot, at);
    EXPECT_EQ_U32(got.directory.bytes[0], 0xa0);
    EXPECT_EQ_U32(got.directory.bytes[15], 0xaf);
}

static void test_bytes(void)
{
    put(0, 0x0102030405060708u);
    EXPECT_EQ_MEM(bytes, "KVACKED\n", 8);
    EXPECT_EQ_U32(kv_load32(bytes + 8), kv_checksum(bytes + 12, 4084));
    EXPECT_EQ_U32(kv_load32(bytes + 12), 1);
    EXPECT_EQ_U32(bytes[16], 0xa0);
    EXPECT_EQ_U64(kv_load64(bytes + 32), 0x0102030405060708u);
    for (uint32_t i = 40; i < 4096; i++)
        EXPECT(bytes[i] == 0);
}

static void test_which_counts(void)
{
    memset(bytes, 0, sizeof(bytes));
    expect(KV_MISS, 0, 0, 0);
    put(0, 5);
    expect(KV_OK, 5, 0, 0);
    put(1, 6);
    expect(KV_OK, 6, 1, 0);
    put(0, 7);
    expect(KV_OK, 7, 0, 0);
    put(0, 0);
    put(1, 0);
    expect(KV_OK, 0, 0, 0);
}

/* Any changed byte of a slot, and the other one counts; with that one damaged too, none does. */
static void test_damage(void)
{
    for (uint32_t i = 0; i < KV_ACKNOWLEDGED_SLOT_BYTES; i++) {
        put(0, 10);
        put(1, 11);
        slot_at(1)[i] ^= 0x20;
        expect(KV_OK, 10, 0, 1);
        slot_at(0)[4095 - i] ^= 1;
        expect(KV_CORRUPT, 0, 0, 2);
    }
    memset(bytes, 0, sizeof(bytes));
    put(0, 10);
    bytes[0] = 'X';
    expect(KV_CORRUPT, 0, 0, 1);
}

/* Not even under a checksum that is right. */
static void test_other_version(void)
{
    memset(bytes, 0, sizeof(bytes));
    put(1, 4);
    put(0, 10);
    kv_store32(bytes + 12, 2);
    kv_store32(bytes + 8, kv_checksum(bytes + 12, 4084));
    expect(KV_OK, 4, 1, 1);
    put(0, 10);
    bytes[4000] = 1;
    kv_store32(bytes + 8, kv_checksum(bytes + 12, 4084));
    expect(KV_OK, 4, 1, 1);
}

int main(void)
{
    test_bytes();
    test_which_counts();
    test_damage();
    test_other_version();
    HARNESS_END();
}
