/*
 * Encodes and checks the record of a quarantined place.
 *
 * A value has one encoding, like every record: the length follows from the cause's, and a cause is
 * printable, so that what a damaged disk held can never reach a terminal or a log as control bytes.
 */

#include "kvstore/format/quarantine.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

enum {
    RECORD_VERSION = 1,
    AT_PAGE = 1,
    AT_GENERATION = 5,
    AT_FOUND = 13,
    AT_OWNERS = 21,
    AT_FOUND_BY = 25,
    AT_LENGTH = 26,
    AT_CAUSE = 27,
    CRC_BYTES = 4,
};

_Static_assert(AT_CAUSE + KV_QUARANTINE_CAUSE_MAX + CRC_BYTES <= KV_RECORD_QUARANTINE_MAX,
               "the longest cause fits");

static bool is_printable(uint8_t byte)
{
    return byte >= ' ' && byte <= '~';
}

const char *kv_found_by_name(uint8_t found_by)
{
    return found_by == KV_FOUND_BY_SCRUB ? "scrub" : "read";
}

void kv_quarantine_cause(const char *text, char ret_cause[KV_QUARANTINE_CAUSE_MAX + 1])
{
    size_t count = strnlen(text, KV_QUARANTINE_CAUSE_MAX);
    if (count == 0) {
        text = "damaged";
        count = strlen(text);
    }
    for (size_t i = 0; i < count; i++)
        ret_cause[i] = (char)(is_printable((uint8_t)text[i]) ? text[i] : '?');
    ret_cause[count] = '\0';
}

uint32_t kv_record_quarantine_encode(const struct kv_record_quarantine *record, uint8_t *buf)
{
    const uint32_t length = (uint32_t)strnlen(record->cause, KV_QUARANTINE_CAUSE_MAX + 1);
    assert(length >= 1 && length <= KV_QUARANTINE_CAUSE_MAX);
    assert(record->found_by == KV_FOUND_BY_READ || record->found_by == KV_FOUND_BY_SCRUB);
    buf[0] = RECORD_VERSION;
    kv_store32(buf + AT_PAGE, record->ssd_page);
    kv_store64(buf + AT_GENERATION, record->generation);
    kv_store64(buf + AT_FOUND, record->found_ms);
    kv_store32(buf + AT_OWNERS, record->owners);
    buf[AT_FOUND_BY] = record->found_by;
    buf[AT_LENGTH] = (uint8_t)length;
    memcpy(buf + AT_CAUSE, record->cause, length);
    const uint32_t bytes = AT_CAUSE + length;
    kv_store32(buf + bytes, kv_checksum(buf, bytes));
    return bytes + CRC_BYTES;
}

kv_status kv_record_quarantine_decode(const uint8_t *value, uint32_t bytes,
                                      struct kv_record_quarantine *ret_record)
{
    if (bytes < AT_CAUSE + CRC_BYTES) return KV_CORRUPT;
    const uint32_t body_bytes = bytes - CRC_BYTES;
    if (kv_load32(value + body_bytes) != kv_checksum(value, body_bytes)) return KV_CORRUPT;
    const uint32_t length = value[AT_LENGTH];
    if (value[0] != RECORD_VERSION || length < 1 || length > KV_QUARANTINE_CAUSE_MAX ||
        body_bytes != AT_CAUSE + length)
        return KV_CORRUPT;
    if (value[AT_FOUND_BY] != KV_FOUND_BY_READ && value[AT_FOUND_BY] != KV_FOUND_BY_SCRUB)
        return KV_CORRUPT;
    for (uint32_t i = 0; i < length; i++)
        if (!is_printable(value[AT_CAUSE + i])) return KV_CORRUPT;

    struct kv_record_quarantine record = {
        .ssd_page = kv_load32(value + AT_PAGE),
        .generation = kv_load64(value + AT_GENERATION),
        .found_ms = kv_load64(value + AT_FOUND),
        .owners = kv_load32(value + AT_OWNERS),
        .found_by = value[AT_FOUND_BY],
    };
    memcpy(record.cause, value + AT_CAUSE, length);
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_key_quarantine(uint32_t ssd_page, uint8_t key[KV_KEY_QUARANTINE_BYTES])
{
    key[0] = 'Q';
    for (uint32_t i = 0; i < 4; i++)
        key[1 + i] = (uint8_t)(ssd_page >> (24 - 8 * i));
    return KV_KEY_QUARANTINE_BYTES;
}
