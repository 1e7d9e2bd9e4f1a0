/*
 * The kinds of limits; encodes and checks the records of plans and of users' own limits.
 *
 * A value has one encoding: lengths follow from the names, bits beyond the limits are zero, and a
 * limit that is not the user's own is zero.
 */

#include "kvstore/format/quota.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

enum { RECORD_VERSION = 1, CRC_BYTES = 4, LIMIT_BYTES = 8 * KV_RECORD_QUOTA_LIMITS };

_Static_assert(KV_PLAN_NAME_MAX == KV_USER_NAME_MAX, "one reader for both");

/* ---- kinds ---- */

static const struct {
    const char *name;
    uint64_t least, most;
} kinds[KV_QUOTA_COUNT] = {
    [KV_QUOTA_SESSIONS] = {"sessions", 1, 1000000},
    [KV_QUOTA_TURNS] = {"turns", 1, 1000000},
    [KV_QUOTA_BYTES_SSD] = {"bytes_ssd", 1u << 20, 1ull << 50},
    [KV_QUOTA_REQUESTS_PER_S] = {"requests_per_s", 1, 1000000000},
    [KV_QUOTA_TOKENS_PER_S] = {"tokens_per_s", 1, 1000000000},
    [KV_QUOTA_SAVES] = {"saves", 1, 1000000},
    [KV_QUOTA_TTL_MS] = {"ttl_ms", 1, KV_TTL_MS_MAX},
};

const char *kv_quota_name(enum kv_quota_kind kind)
{
    assert(kind < KV_QUOTA_COUNT);
    return kinds[kind].name;
}

bool kv_quota_find(const char *name, enum kv_quota_kind *ret_kind)
{
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        if (strcmp(kinds[i].name, name) != 0) continue;
        *ret_kind = (enum kv_quota_kind)i;
        return true;
    }
    return false;
}

uint64_t kv_quota_least(enum kv_quota_kind kind)
{
    assert(kind < KV_QUOTA_COUNT);
    return kinds[kind].least;
}

uint64_t kv_quota_most(enum kv_quota_kind kind)
{
    assert(kind < KV_QUOTA_COUNT);
    return kinds[kind].most;
}

bool kv_quota_is_valid(enum kv_quota_kind kind, uint64_t limit)
{
    return limit == KV_QUOTA_UNLIMITED ||
           (limit >= kv_quota_least(kind) && limit <= kv_quota_most(kind));
}

/* ---- records ---- */

static uint8_t *put_name(uint8_t *at, const char *name)
{
    const size_t count = strnlen(name, KV_PLAN_NAME_MAX + 1);
    assert(count <= KV_PLAN_NAME_MAX);
    *at++ = (uint8_t)count;
    memcpy(at, name, count);
    return at + count;
}

static uint8_t *put_limits(uint8_t *at, const uint64_t limits[KV_RECORD_QUOTA_LIMITS])
{
    for (uint32_t i = 0; i < KV_RECORD_QUOTA_LIMITS; i++, at += 8)
        kv_store64(at, limits[i]);
    return at;
}

static uint32_t seal(const uint8_t *buf, uint8_t *at)
{
    const uint32_t bytes = (uint32_t)(at - buf);
    kv_store32(at, kv_checksum(buf, bytes));
    return bytes + CRC_BYTES;
}

uint32_t kv_record_plan_encode(const struct kv_record_plan *record, uint8_t *buf)
{
    buf[0] = RECORD_VERSION;
    return seal(buf, put_limits(put_name(buf + 1, record->name), record->limits));
}

uint32_t kv_record_quota_encode(const struct kv_record_quota *record, uint8_t *buf)
{
    buf[0] = RECORD_VERSION;
    uint8_t *at = put_name(put_name(buf + 1, record->user), record->plan);
    kv_store32(at, record->set);
    return seal(buf, put_limits(at + 4, record->limits));
}

/* What is left of a value. */
struct reader {
    const uint8_t *at, *end;
};

static bool open_value(const uint8_t *value, uint32_t bytes, struct reader *ret_reader)
{
    if (bytes < 1 + CRC_BYTES || value[0] != RECORD_VERSION) return false;
    const uint32_t body_bytes = bytes - CRC_BYTES;
    if (kv_load32(value + body_bytes) != kv_checksum(value, body_bytes)) return false;
    *ret_reader = (struct reader){value + 1, value + body_bytes};
    return true;
}

static bool take_name(struct reader *reader, uint32_t least, char name[KV_PLAN_NAME_MAX + 1])
{
    if (reader->at == reader->end) return false;
    const uint32_t count = *reader->at++;
    if (count < least || count > KV_PLAN_NAME_MAX || reader->end - reader->at < (ptrdiff_t)count)
        return false;
    memcpy(name, reader->at, count);
    name[count] = '\0';
    reader->at += count;
    return strlen(name) == count;
}

static void take_limits(struct reader *reader, uint64_t limits[KV_RECORD_QUOTA_LIMITS])
{
    for (uint32_t i = 0; i < KV_RECORD_QUOTA_LIMITS; i++, reader->at += 8)
        limits[i] = kv_load64(reader->at);
}

kv_status kv_record_plan_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_plan *ret_record)
{
    struct kv_record_plan record = {0};
    struct reader reader;
    if (!open_value(value, bytes, &reader) || !take_name(&reader, 1, record.name) ||
        reader.end - reader.at != LIMIT_BYTES)
        return KV_CORRUPT;
    take_limits(&reader, record.limits);
    *ret_record = record;
    return KV_OK;
}

kv_status kv_record_quota_decode(const uint8_t *value, uint32_t bytes,
                                 struct kv_record_quota *ret_record)
{
    struct kv_record_quota record = {0};
    struct reader reader;
    if (!open_value(value, bytes, &reader) || !take_name(&reader, 1, record.user) ||
        !take_name(&reader, 0, record.plan) || reader.end - reader.at != 4 + LIMIT_BYTES)
        return KV_CORRUPT;
    record.set = kv_load32(reader.at);
    reader.at += 4;
    take_limits(&reader, record.limits);
    if (record.set >> KV_RECORD_QUOTA_LIMITS != 0) return KV_CORRUPT;
    for (uint32_t i = 0; i < KV_RECORD_QUOTA_LIMITS; i++)
        if ((record.set & 1u << i) == 0 && record.limits[i] != 0) return KV_CORRUPT;
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_key_plan(const char *name, uint8_t key[KV_KEY_QUOTA_MAX])
{
    const size_t count = strnlen(name, KV_PLAN_NAME_MAX + 1);
    assert(count <= KV_PLAN_NAME_MAX);
    key[0] = 'Y';
    memcpy(key + 1, name, count);
    return 1 + (uint32_t)count;
}

uint32_t kv_key_quota(const struct kv_user_id *user, uint8_t key[KV_KEY_QUOTA_MAX])
{
    key[0] = 'B';
    memcpy(key + 1, user->bytes, sizeof(user->bytes));
    return 1 + sizeof(user->bytes);
}
