/*
 * CRC-32C.
 *
 * Goal: the published values, and hardware equal to the table for every size where the loop changes
 * (3 x 1024, 3 x 64, 8, 1) at every alignment; symptom T86: payloads of 1..8193 bytes.
 */

#include "kvstore/base/checksum.h"
#include "kvstore/base/clock.h"
#include "tests/harness.h"

#define BYTES_MAX 8193u

static uint8_t bytes[BYTES_MAX + 16];

static void test_known_values(void)
{
    uint8_t block[32];
    EXPECT_EQ_U32(kv_checksum("123456789", 9), 0xe3069283u);
    EXPECT_EQ_U32(kv_checksum("", 0), 0);
    EXPECT_EQ_U32(kv_checksum(NULL, 0), 0);
    /* RFC 3720, B.4. */
    memset(block, 0, sizeof(block));
    EXPECT_EQ_U32(kv_checksum(block, sizeof(block)), 0x8a9136aau);
    memset(block, 0xff, sizeof(block));
    EXPECT_EQ_U32(kv_checksum(block, sizeof(block)), 0x62a8ab43u);
    for (uint8_t i = 0; i < 32; i++)
        block[i] = i;
    EXPECT_EQ_U32(kv_checksum(block, sizeof(block)), 0x46dd794eu);
    for (uint8_t i = 0; i < 32; i++)
        block[i] = (uint8_t)(31 - i);
    EXPECT_EQ_U32(kv_checksum(block, sizeof(block)), 0x113fdb5cu);
}

static void test_hardware_equals_table(void)
{
    /* The table's value of every length, in one walk. */
    for (uint32_t align = 0; align < 9; align++) {
        uint32_t want = 0;
        for (uint32_t count = 1; count <= BYTES_MAX; count++) {
            want = kv_checksum_portable(want, bytes + align + count - 1, 1);
            EXPECT_EQ_U32(kv_checksum(bytes + align, count), want);
        }
    }
}

static void test_continues(void)
{
    const uint32_t whole = kv_checksum(bytes, BYTES_MAX);
    for (uint32_t cut = 0; cut <= BYTES_MAX; cut += 13) {
        const uint32_t first = kv_checksum(bytes, cut);
        EXPECT_EQ_U32(kv_checksum_more(first, bytes + cut, BYTES_MAX - cut), whole);
        EXPECT_EQ_U32(kv_checksum_portable(first, bytes + cut, BYTES_MAX - cut), whole);
    }
}

static void print_rate(void)
{
    static uint8_t page[1u << 20];
    uint64_t best_ns = UINT64_MAX;
    uint32_t value = 0;
    for (int i = 0; i < 20; i++) {
        const uint64_t start_ns = kv_clock_stopwatch_ns();
        value = kv_checksum_more(value, page, sizeof(page));
        const uint64_t ns = kv_clock_stopwatch_ns() - start_ns;
        if (ns < best_ns) best_ns = ns;
    }
    (void)printf("  %.1f GB/s (best of 20, 1 MiB; value %08x)\n",
                 (double)sizeof(page) / (double)best_ns, value);
}

int main(void)
{
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof(bytes); i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(state >> 24);
    }
    test_known_values();
    test_hardware_equals_table();
    test_continues();
    print_rate();
    HARNESS_END();
}
