/*
 * The record of a quarantined place.
 *
 * Goal: its bytes are those of docs/format.md, any change of them is refused, and whatever a
 * damaged disk made of a cause, nothing but printable text is recorded.
 */

#include "kvstore/format/quarantine.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "tests/harness.h"

static const struct kv_record_quarantine record = {
    .ssd_page = 0x01020304,
    .generation = 0x1112131415161718u,
    .found_ms = 0x2122232425262728u,
    .owners = 0x31323334,
    .found_by = KV_FOUND_BY_SCRUB,
    .cause = "checksum 0x00000001",
};

static void test_bytes(void)
{
    static const uint8_t want[27 + 19] =
        "\x01\x04\x03\x02\x01\x18\x17\x16\x15\x14\x13\x12\x11\x28\x27\x26\x25\x24\x23\x22\x21"
        "\x34\x33\x32\x31\x02\x13"
        "checksum 0x00000001";
    uint8_t buf[KV_RECORD_QUARANTINE_MAX], key[KV_KEY_QUARANTINE_BYTES];
    struct kv_record_quarantine got;
    const uint32_t bytes = kv_record_quarantine_encode(&record, buf);
    EXPECT_EQ_U32(bytes, sizeof(want) + 4);
    EXPECT_EQ_MEM(buf, want, sizeof(want));
    EXPECT_EQ_U32(kv_load32(buf + sizeof(want)), kv_checksum(buf, sizeof(want)));
    EXPECT(kv_record_quarantine_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_U32(got.ssd_page, record.ssd_page);
    EXPECT_EQ_U64(got.generation, record.generation);
    EXPECT_EQ_U64(got.found_ms, record.found_ms);
    EXPECT_EQ_U32(got.owners, record.owners);
    EXPECT_EQ_U32(got.found_by, record.found_by);
    EXPECT_EQ_STR(got.cause, record.cause);
    EXPECT_EQ_U32(kv_key_quarantine(0x01020304, key), 5);
    EXPECT_EQ_MEM(key, "Q\x01\x02\x03\x04", 5);
}

/* With the checksum made right again, so that it is not what refuses. */
static void refused(const uint8_t *buf, uint32_t bytes, uint32_t at, uint8_t value)
{
    uint8_t changed[KV_RECORD_QUARANTINE_MAX + 8] = {0};
    struct kv_record_quarantine got;
    memcpy(changed, buf, bytes);
    changed[at] = value;
    kv_store32(changed + bytes - 4, kv_checksum(changed, bytes - 4));
    EXPECT(kv_record_quarantine_decode(changed, bytes, &got) == KV_CORRUPT);
}

static void test_damage(void)
{
    uint8_t buf[KV_RECORD_QUARANTINE_MAX + 8] = {0};
    struct kv_record_quarantine got;
    const uint32_t bytes = kv_record_quarantine_encode(&record, buf);
    for (uint32_t cut = 0; cut < bytes; cut++)
        EXPECT(kv_record_quarantine_decode(buf, cut, &got) == KV_CORRUPT);
    EXPECT(kv_record_quarantine_decode(buf, bytes + 1, &got) == KV_CORRUPT);
    for (uint32_t bit = 0; bit < 8 * bytes; bit++) {
        buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
        EXPECT(kv_record_quarantine_decode(buf, bytes, &got) == KV_CORRUPT);
        buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    refused(buf, bytes, 0, 2);    /* A version we do not know. */
    refused(buf, bytes, 25, 0);   /* Found by nobody. */
    refused(buf, bytes, 25, 3);   /* By somebody we do not know. */
    refused(buf, bytes, 26, 0);   /* No cause. */
    refused(buf, bytes, 26, 18);  /* Of another length than there is. */
    refused(buf, bytes, 26, 121); /* Longer than one may be. */
    refused(buf, bytes, 30, 0x1b);
    refused(buf, bytes, 30, 0x7f);
    refused(buf, bytes, 30, 0);
}

static void test_causes(void)
{
    char long_text[400], cause[KV_QUARANTINE_CAUSE_MAX + 1];
    struct kv_record_quarantine longest = record, got;
    uint8_t buf[KV_RECORD_QUARANTINE_MAX];
    kv_quarantine_cause("", cause);
    EXPECT_EQ_STR(cause, "damaged");
    kv_quarantine_cause("a\x1b[2Jb\n\xc3\xa4", cause);
    EXPECT_EQ_STR(cause, "a?[2Jb???");
    memset(long_text, 'x', sizeof(long_text));
    long_text[sizeof(long_text) - 1] = '\0';
    kv_quarantine_cause(long_text, longest.cause);
    EXPECT_EQ_U64(strlen(longest.cause), KV_QUARANTINE_CAUSE_MAX);
    const uint32_t bytes = kv_record_quarantine_encode(&longest, buf);
    EXPECT(bytes <= KV_RECORD_QUARANTINE_MAX);
    EXPECT(kv_record_quarantine_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_STR(got.cause, longest.cause);
    EXPECT_EQ_STR(kv_found_by_name(KV_FOUND_BY_READ), "read");
    EXPECT_EQ_STR(kv_found_by_name(KV_FOUND_BY_SCRUB), "scrub");
}

int main(void)
{
    test_bytes();
    test_damage();
    test_causes();
    HARNESS_END();
}
