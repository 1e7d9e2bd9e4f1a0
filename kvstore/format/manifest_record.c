/*
 * Encodes and checks the records of the manifest.  All are of version 1, but for sessions and nodes
 * of forked trees, which name one more id, and where another is named; by offset:
 *
 *   store    0 version, 1 directory 16 B, 17 model 32 B, 49 u64 boots, 57 crc
 *   commit   0 version, 1 u64 number, 9 crc
 *   clock    0 version, 1 u64 floor_ms, 9 u64 before_ms, 17 crc
 *   user     0 version, 1 salt 32 B, 33 u8 name length, 34 name, crc
 *   user     0 version 2, 1 u32 key id, 5 nonce 12 B, 17 sealed salt 32 B, 49 tag 16 B,
 *            65 u8 name length, 66 name, crc
 *   session  0 version, 1 user 16 B, 17 u8 kind, 18 u64 created_ms, 26 u64 used_ms,
 *            34 u64 ttl_ms, 42 u64 epoch, 50 u8 has_head, 51 head 16 B, 67 u8 name length,
 *            68 u8 parent name length, 69 u32 head_tokens, 73 u32 checkpoints,
 *            77 u32 claimed_tokens, 81 name, parent name, in version 2 tree 16 B, u8 has_origin,
 *            origin 16 B, u32 origin_tokens, crc
 *   node     0 version, 1 id 16 B, 17 u8 has_parent, 18 parent 16 B, 34 u64 model_tag,
 *            42 u32 tokens, 46 digest 32 B, 78 u8 kind, 79 u64 created_ms, 87 u64 used_ms,
 *            95 u8 replay count, 96 u32 page count, 100 u64 kernels (0: not known),
 *            108 u32 each replay, u64 each page uid, in version 2 maker 16 B, crc
 *   page     0 version, 1 u64 uid, 9 u32 ssd_page, 13 u64 generation, 21 u32 position,
 *            25 u32 count, 29 u64 tag, 37 crc
 *   segment  0 version, 1 u8 state, 2 u64 used_ms, 10 u32 pages, 14 a bit for each page, crc
 *   doubt    0 version, 1 crc
 *
 * A value has one encoding: a length follows from its contents, absent ids are zeros, flags are 0
 * or 1, and a decoder refuses anything else.  The checksum is compared before any field is read.
 */

#include "kvstore/format/manifest_record.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/layout.h"

#include <assert.h>

enum { RECORD_VERSION = 1, RECORD_VERSION_SEALED = 2, VERSION_FORKED = 2, CRC_BYTES = 4 };
enum { SESSION_FORKED = 37, NODE_FORKED = 16 }; /* What version 2 has behind version 1. */

enum {
    STORE_BYTES = 57,
    COMMIT_BYTES = 9,
    CLOCK_BYTES = 17,
    USER_FIXED = 34,
    USER_SEALED_FIXED = 66,
    SESSION_FIXED = 81,
    NODE_FIXED = 108,
    PAGE_BYTES = 37,
    SEGMENT_FIXED = 14,
    DOUBT_BYTES = 1,
};

_Static_assert(STORE_BYTES + CRC_BYTES <= KV_RECORD_STORE_MAX, "a store record fits");
_Static_assert(COMMIT_BYTES + CRC_BYTES == KV_RECORD_COMMIT_BYTES, "a commit record fits");
_Static_assert(CLOCK_BYTES + CRC_BYTES == KV_RECORD_CLOCK_BYTES, "a clock record fits");
_Static_assert(USER_SEALED_FIXED + KV_USER_NAME_MAX + CRC_BYTES <= KV_RECORD_USER_MAX,
               "a user fits");
_Static_assert(SESSION_FIXED + 2 * KV_SESSION_NAME_MAX + SESSION_FORKED + CRC_BYTES <=
                   KV_RECORD_SESSION_MAX,
               "a session fits");
_Static_assert(PAGE_BYTES + CRC_BYTES <= KV_RECORD_PAGE_MAX, "a page record fits");
_Static_assert(DOUBT_BYTES + CRC_BYTES == KV_RECORD_DOUBT_BYTES, "a doubt fits");
_Static_assert(KV_SESSION_NAME_MAX <= UINT8_MAX && KV_USER_NAME_MAX <= UINT8_MAX,
               "name lengths are bytes");

/* Puts the checksum behind `bytes` of record; returns the whole length. */
static uint32_t seal(uint8_t *buf, uint32_t bytes)
{
    kv_store32(buf + bytes, kv_checksum(buf, bytes));
    return bytes + CRC_BYTES;
}

/* The value is at least fixed_bytes and a checksum long, and undamaged. */
static bool is_whole(const uint8_t *value, uint32_t bytes, uint32_t fixed_bytes)
{
    if (bytes < fixed_bytes + CRC_BYTES) return false;
    const uint32_t body_bytes = bytes - CRC_BYTES;
    return kv_load32(value + body_bytes) == kv_checksum(value, body_bytes);
}

/* And of that version. */
static bool is_version(const uint8_t *value, uint32_t bytes, uint32_t fixed_bytes, uint8_t version)
{
    return is_whole(value, bytes, fixed_bytes) && value[0] == version;
}

static bool is_sound(const uint8_t *value, uint32_t bytes, uint32_t fixed_bytes)
{
    return is_version(value, bytes, fixed_bytes, RECORD_VERSION);
}

/* Version 1 or 2, and the length that the fields up to `at` say. */
static bool is_forked_sound(const uint8_t *value, uint32_t bytes, uint32_t at,
                            uint32_t forked_bytes)
{
    const bool is_forked = value[0] == VERSION_FORKED;
    if (value[0] != RECORD_VERSION && !is_forked) return false;
    return bytes == at + (is_forked ? forked_bytes : 0u) + CRC_BYTES;
}

/* An optional id is 16 zero bytes when its flag is 0. */
static bool read_optional_id(uint8_t flag, const uint8_t *at, bool *ret_has, uint8_t ret_id[16])
{
    static const uint8_t absent[16];
    if (flag > 1) return false;
    if (flag == 0 && memcmp(at, absent, sizeof(absent)) != 0) return false;
    *ret_has = flag == 1;
    memcpy(ret_id, at, 16);
    return true;
}

static void write_optional_id(bool has, const uint8_t id[16], uint8_t *flag, uint8_t *at)
{
    *flag = has ? 1 : 0;
    memset(at, 0, 16);
    if (has) memcpy(at, id, 16);
}

static uint32_t name_length(const char *name, uint32_t max)
{
    const size_t length = strnlen(name, (size_t)max + 1);
    assert(length <= max);
    return (uint32_t)length;
}

/* Names are text: a NUL inside would make two different values read as one name. */
static bool read_name(const uint8_t *at, uint32_t length, char *ret_name)
{
    if (memchr(at, 0, length) != NULL) return false;
    memcpy(ret_name, at, length);
    ret_name[length] = 0;
    return true;
}

uint32_t kv_record_store_encode(const struct kv_record_store *record, uint8_t *buf)
{
    buf[0] = RECORD_VERSION;
    memcpy(buf + 1, record->directory.bytes, sizeof(record->directory.bytes));
    memcpy(buf + 17, record->model.bytes, sizeof(record->model.bytes));
    kv_store64(buf + 49, record->boots);
    return seal(buf, STORE_BYTES);
}

kv_status kv_record_store_decode(const uint8_t *value, uint32_t bytes,
                                 struct kv_record_store *ret_record)
{
    if (!is_sound(value, bytes, STORE_BYTES)) return KV_CORRUPT;
    if (bytes != STORE_BYTES + CRC_BYTES) return KV_CORRUPT;

    struct kv_record_store record = {.boots = kv_load64(value + 49)};
    memcpy(record.directory.bytes, value + 1, sizeof(record.directory.bytes));
    memcpy(record.model.bytes, value + 17, sizeof(record.model.bytes));
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_record_commit_encode(const struct kv_record_commit *record, uint8_t *buf)
{
    buf[0] = RECORD_VERSION;
    kv_store64(buf + 1, record->number);
    return seal(buf, COMMIT_BYTES);
}

kv_status kv_record_commit_decode(const uint8_t *value, uint32_t bytes,
                                  struct kv_record_commit *ret_record)
{
    if (!is_sound(value, bytes, COMMIT_BYTES)) return KV_CORRUPT;
    if (bytes != COMMIT_BYTES + CRC_BYTES) return KV_CORRUPT;
    ret_record->number = kv_load64(value + 1);
    return KV_OK;
}

uint32_t kv_record_clock_encode(const struct kv_record_clock *record, uint8_t *buf)
{
    buf[0] = RECORD_VERSION;
    kv_store64(buf + 1, record->floor_ms);
    kv_store64(buf + 9, record->before_ms);
    return seal(buf, CLOCK_BYTES);
}

kv_status kv_record_clock_decode(const uint8_t *value, uint32_t bytes,
                                 struct kv_record_clock *ret_record)
{
    if (!is_sound(value, bytes, CLOCK_BYTES)) return KV_CORRUPT;
    if (bytes != CLOCK_BYTES + CRC_BYTES) return KV_CORRUPT;
    ret_record->floor_ms = kv_load64(value + 1);
    ret_record->before_ms = kv_load64(value + 9);
    return KV_OK;
}

static uint32_t user_encode_sealed(const struct kv_record_user *record, uint32_t length,
                                   uint8_t *buf)
{
    const struct kv_sealed_salt *sealed = &record->sealed;
    buf[0] = RECORD_VERSION_SEALED;
    kv_store32(buf + 1, sealed->key_id);
    memcpy(buf + 5, sealed->nonce, sizeof(sealed->nonce));
    memcpy(buf + 17, sealed->salt, sizeof(sealed->salt));
    memcpy(buf + 49, sealed->tag, sizeof(sealed->tag));
    buf[65] = (uint8_t)length;
    memcpy(buf + USER_SEALED_FIXED, record->name, length);
    return seal(buf, USER_SEALED_FIXED + length);
}

uint32_t kv_record_user_encode(const struct kv_record_user *record, uint8_t *buf)
{
    const uint32_t length = name_length(record->name, KV_USER_NAME_MAX);
    assert(length > 0);
    if (record->sealed.key_id > 0) return user_encode_sealed(record, length, buf);
    buf[0] = RECORD_VERSION;
    memcpy(buf + 1, record->salt, sizeof(record->salt));
    buf[33] = (uint8_t)length;
    memcpy(buf + USER_FIXED, record->name, length);
    return seal(buf, USER_FIXED + length);
}

kv_status kv_record_user_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_user *ret_record)
{
    const bool is_sealed = bytes > 0 && value[0] == RECORD_VERSION_SEALED;
    const uint32_t fixed = is_sealed ? USER_SEALED_FIXED : USER_FIXED;
    if (!is_version(value, bytes, fixed, is_sealed ? RECORD_VERSION_SEALED : RECORD_VERSION))
        return KV_CORRUPT;
    const uint32_t length = value[fixed - 1];
    if (length < 1 || length > KV_USER_NAME_MAX) return KV_CORRUPT;
    if (bytes != fixed + length + CRC_BYTES) return KV_CORRUPT;

    struct kv_record_user record = {.name = {0}};
    if (!read_name(value + fixed, length, record.name)) return KV_CORRUPT;
    if (is_sealed) {
        record.sealed.key_id = kv_load32(value + 1);
        if (record.sealed.key_id == 0) return KV_CORRUPT;
        memcpy(record.sealed.nonce, value + 5, sizeof(record.sealed.nonce));
        memcpy(record.sealed.salt, value + 17, sizeof(record.sealed.salt));
        memcpy(record.sealed.tag, value + 49, sizeof(record.sealed.tag));
    } else {
        memcpy(record.salt, value + 1, sizeof(record.salt));
    }
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_record_session_encode(const struct kv_record_session *record, uint8_t *buf)
{
    const uint32_t length = name_length(record->name, KV_SESSION_NAME_MAX);
    const uint32_t parent_length = name_length(record->parent_name, KV_SESSION_NAME_MAX);
    assert(length > 0);
    memcpy(buf + 1, record->user.bytes, sizeof(record->user.bytes));
    buf[17] = record->kind;
    kv_store64(buf + 18, record->created_ms);
    kv_store64(buf + 26, record->used_ms);
    kv_store64(buf + 34, record->ttl_ms);
    kv_store64(buf + 42, record->epoch);
    write_optional_id(record->has_head, record->head.bytes, buf + 50, buf + 51);
    buf[67] = (uint8_t)length;
    buf[68] = (uint8_t)parent_length;
    kv_store32(buf + 69, record->head_tokens);
    kv_store32(buf + 73, record->checkpoints);
    kv_store32(buf + 77, record->claimed_tokens);
    memcpy(buf + SESSION_FIXED, record->name, length);
    memcpy(buf + SESSION_FIXED + length, record->parent_name, parent_length);
    uint32_t at = SESSION_FIXED + length + parent_length;
    assert(record->has_tree || !record->has_origin);
    buf[0] = record->has_tree ? VERSION_FORKED : RECORD_VERSION;
    if (record->has_tree) {
        memcpy(buf + at, record->tree.bytes, sizeof(record->tree.bytes));
        write_optional_id(record->has_origin, record->origin.bytes, buf + at + 16, buf + at + 17);
        kv_store32(buf + at + 33, record->has_origin ? record->origin_tokens : 0);
        at += SESSION_FORKED;
    }
    return seal(buf, at);
}

kv_status kv_record_session_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_record_session *ret_record)
{
    if (!is_whole(value, bytes, SESSION_FIXED)) return KV_CORRUPT;
    const uint32_t length = value[67];
    const uint32_t parent_length = value[68];
    if (length < 1 || length > KV_SESSION_NAME_MAX) return KV_CORRUPT;
    if (parent_length > KV_SESSION_NAME_MAX) return KV_CORRUPT;

    struct kv_record_session record = {
        .kind = value[17],
        .created_ms = kv_load64(value + 18),
        .used_ms = kv_load64(value + 26),
        .ttl_ms = kv_load64(value + 34),
        .epoch = kv_load64(value + 42),
        .head_tokens = kv_load32(value + 69),
        .checkpoints = kv_load32(value + 73),
        .claimed_tokens = kv_load32(value + 77),
    };
    if (record.head_tokens > KV_PROMPT_TOKENS_MAX) return KV_CORRUPT;
    if (record.claimed_tokens > KV_PROMPT_TOKENS_MAX) return KV_CORRUPT;
    const uint32_t at = SESSION_FIXED + length + parent_length;
    if (!is_forked_sound(value, bytes, at, SESSION_FORKED)) return KV_CORRUPT;
    record.has_tree = value[0] == VERSION_FORKED;
    if (record.has_tree) {
        memcpy(record.tree.bytes, value + at, sizeof(record.tree.bytes));
        if (!read_optional_id(value[at + 16], value + at + 17, &record.has_origin,
                              record.origin.bytes))
            return KV_CORRUPT;
        record.origin_tokens = kv_load32(value + at + 33);
        if (record.origin_tokens > KV_PROMPT_TOKENS_MAX) return KV_CORRUPT;
        if (!record.has_origin && record.origin_tokens != 0) return KV_CORRUPT;
    }
    const uint8_t *name = value + SESSION_FIXED;
    memcpy(record.user.bytes, value + 1, sizeof(record.user.bytes));
    if (!read_optional_id(value[50], value + 51, &record.has_head, record.head.bytes))
        return KV_CORRUPT;
    if (!read_name(name, length, record.name)) return KV_CORRUPT;
    if (!read_name(name + length, parent_length, record.parent_name)) return KV_CORRUPT;
    *ret_record = record;
    return KV_OK;
}

static bool are_replays_valid(const uint32_t *replays, uint32_t count, uint32_t tokens)
{
    for (uint32_t i = 0; i < count; i++) {
        if (replays[i] == 0 || replays[i] > tokens) return false;
        if (i > 0 && replays[i] <= replays[i - 1]) return false;
    }
    return true;
}

uint32_t kv_record_node_max(uint32_t page_count)
{
    assert(page_count <= KV_PAGES_PER_SESSION_MAX);
    return NODE_FIXED + 4u * KV_REPLAYS_MAX + 8u * page_count + NODE_FORKED + CRC_BYTES;
}

uint32_t kv_record_node_encode(const struct kv_record_node *record, uint8_t *buf)
{
    assert(record->tokens <= KV_PROMPT_TOKENS_MAX);
    assert(record->replay_count <= KV_REPLAYS_MAX);
    assert(record->page_count <= kv_pages_for(record->tokens));
    assert(are_replays_valid(record->replays, record->replay_count, record->tokens));

    memcpy(buf + 1, record->id.bytes, sizeof(record->id.bytes));
    write_optional_id(record->has_parent, record->parent.bytes, buf + 17, buf + 18);
    kv_store64(buf + 34, record->model_tag);
    kv_store32(buf + 42, record->tokens);
    memcpy(buf + 46, record->digest.bytes, sizeof(record->digest.bytes));
    buf[78] = record->kind;
    kv_store64(buf + 79, record->created_ms);
    kv_store64(buf + 87, record->used_ms);
    buf[95] = (uint8_t)record->replay_count;
    kv_store32(buf + 96, record->page_count);
    kv_store64(buf + 100, record->kernels);
    for (uint32_t i = 0; i < record->replay_count; i++)
        kv_store32(buf + NODE_FIXED + 4u * i, record->replays[i]);
    const uint32_t uids_at = NODE_FIXED + 4u * record->replay_count;
    if (record->page_count > 0) memcpy(buf + uids_at, record->page_uids, 8u * record->page_count);
    const uint32_t end = uids_at + 8u * record->page_count;
    buf[0] = record->has_maker ? VERSION_FORKED : RECORD_VERSION;
    if (record->has_maker) memcpy(buf + end, record->maker.bytes, sizeof(record->maker.bytes));
    return seal(buf, end + (record->has_maker ? NODE_FORKED : 0u));
}

kv_status kv_record_node_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_node *ret_record)
{
    if (!is_whole(value, bytes, NODE_FIXED)) return KV_CORRUPT;

    struct kv_record_node record = {
        .model_tag = kv_load64(value + 34),
        .tokens = kv_load32(value + 42),
        .kind = value[78],
        .created_ms = kv_load64(value + 79),
        .used_ms = kv_load64(value + 87),
        .replay_count = value[95],
        .page_count = kv_load32(value + 96),
        .kernels = kv_load64(value + 100),
    };
    if (record.tokens > KV_PROMPT_TOKENS_MAX) return KV_CORRUPT;
    if (record.replay_count > KV_REPLAYS_MAX) return KV_CORRUPT;
    if (record.page_count > kv_pages_for(record.tokens)) return KV_CORRUPT;
    const uint32_t uids_at = NODE_FIXED + 4u * record.replay_count;
    const uint32_t end = uids_at + 8u * record.page_count;
    if (!is_forked_sound(value, bytes, end, NODE_FORKED)) return KV_CORRUPT;
    record.has_maker = value[0] == VERSION_FORKED;
    if (record.has_maker) memcpy(record.maker.bytes, value + end, sizeof(record.maker.bytes));

    for (uint32_t i = 0; i < record.replay_count; i++)
        record.replays[i] = kv_load32(value + NODE_FIXED + 4u * i);
    if (!are_replays_valid(record.replays, record.replay_count, record.tokens)) return KV_CORRUPT;
    if (!read_optional_id(value[17], value + 18, &record.has_parent, record.parent.bytes))
        return KV_CORRUPT;
    memcpy(record.id.bytes, value + 1, sizeof(record.id.bytes));
    memcpy(record.digest.bytes, value + 46, sizeof(record.digest.bytes));
    record.page_uids = value + uids_at;
    *ret_record = record;
    return KV_OK;
}

static bool is_page_place_valid(uint32_t position, uint32_t count)
{
    return position % KV_PAGE_TOKENS == 0 && position < KV_PROMPT_TOKENS_MAX && count >= 1 &&
           count <= KV_PAGE_TOKENS;
}

uint32_t kv_record_page_encode(const struct kv_record_page *record, uint8_t *buf)
{
    assert(is_page_place_valid(record->position, record->count));
    buf[0] = RECORD_VERSION;
    kv_store64(buf + 1, record->uid);
    kv_store32(buf + 9, record->ssd_page);
    kv_store64(buf + 13, record->generation);
    kv_store32(buf + 21, record->position);
    kv_store32(buf + 25, record->count);
    kv_store64(buf + 29, record->tag);
    return seal(buf, PAGE_BYTES);
}

kv_status kv_record_page_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_page *ret_record)
{
    if (!is_sound(value, bytes, PAGE_BYTES)) return KV_CORRUPT;
    if (bytes != PAGE_BYTES + CRC_BYTES) return KV_CORRUPT;

    const struct kv_record_page record = {
        .uid = kv_load64(value + 1),
        .ssd_page = kv_load32(value + 9),
        .generation = kv_load64(value + 13),
        .position = kv_load32(value + 21),
        .count = kv_load32(value + 25),
        .tag = kv_load64(value + 29),
    };
    if (!is_page_place_valid(record.position, record.count)) return KV_CORRUPT;
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_record_segment_bits(uint32_t pages)
{
    return pages / 8 + (pages % 8 != 0);
}

uint32_t kv_record_segment_bytes(uint32_t pages)
{
    return SEGMENT_FIXED + kv_record_segment_bits(pages) + CRC_BYTES;
}

/* The bits behind the last page are zeros. */
static bool is_end_clear(const uint8_t *bits, uint32_t pages)
{
    return pages % 8 == 0 || bits[pages / 8] >> (pages % 8) == 0;
}

uint32_t kv_record_segment_encode(const struct kv_record_segment *record, uint8_t *buf)
{
    const uint32_t bits_bytes = kv_record_segment_bits(record->pages);
    assert(record->pages > 0 && is_end_clear(record->bits, record->pages));
    buf[0] = RECORD_VERSION;
    buf[1] = record->state;
    kv_store64(buf + 2, record->used_ms);
    kv_store32(buf + 10, record->pages);
    memcpy(buf + SEGMENT_FIXED, record->bits, bits_bytes);
    return seal(buf, SEGMENT_FIXED + bits_bytes);
}

kv_status kv_record_segment_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_record_segment *ret_record)
{
    if (!is_sound(value, bytes, SEGMENT_FIXED)) return KV_CORRUPT;
    const struct kv_record_segment record = {
        .state = value[1],
        .used_ms = kv_load64(value + 2),
        .pages = kv_load32(value + 10),
        .bits = value + SEGMENT_FIXED,
    };
    if (record.state != KV_SEGMENT_OPEN && record.state != KV_SEGMENT_SEALED) return KV_CORRUPT;
    if (record.pages == 0) return KV_CORRUPT;
    if (bytes != (uint64_t)SEGMENT_FIXED + kv_record_segment_bits(record.pages) + CRC_BYTES)
        return KV_CORRUPT;
    if (!is_end_clear(record.bits, record.pages)) return KV_CORRUPT;
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_record_doubt_encode(uint8_t *buf)
{
    buf[0] = RECORD_VERSION;
    return seal(buf, DOUBT_BYTES);
}

uint32_t kv_key_store(uint8_t key[KV_RECORD_KEY_MAX])
{
    key[0] = 'M';
    return 1;
}

static uint32_t key_with_id(uint8_t letter, const uint8_t id[16], uint8_t key[KV_RECORD_KEY_MAX])
{
    key[0] = letter;
    memcpy(key + 1, id, 16);
    return 17;
}

uint32_t kv_key_commit(uint8_t key[KV_RECORD_KEY_MAX])
{
    key[0] = 'C';
    return 1;
}

uint32_t kv_key_clock(uint8_t key[KV_RECORD_KEY_MAX])
{
    key[0] = 'W';
    return 1;
}

uint32_t kv_key_doubt(uint8_t key[KV_RECORD_KEY_MAX])
{
    key[0] = 'G';
    return 1;
}

uint32_t kv_key_segment(uint32_t number, uint8_t key[KV_RECORD_KEY_MAX])
{
    uint32_t bytes = kv_key_doubt(key);
    for (int shift = 24; shift >= 0; shift -= 8)
        key[bytes++] = (uint8_t)(number >> shift);
    return bytes;
}

bool kv_key_segment_parse(const uint8_t *key, uint32_t key_bytes, uint32_t *ret_number)
{
    if (key_bytes != 5 || key[0] != 'G') return false;
    *ret_number = (uint32_t)key[1] << 24 | (uint32_t)key[2] << 16 | (uint32_t)key[3] << 8 | key[4];
    return true;
}

uint32_t kv_key_user(const struct kv_user_id *user, uint8_t key[KV_RECORD_KEY_MAX])
{
    return key_with_id('U', user->bytes, key);
}

uint32_t kv_key_session(const struct kv_session_id *session, uint8_t key[KV_RECORD_KEY_MAX])
{
    return key_with_id('S', session->bytes, key);
}

uint32_t kv_key_tree(const struct kv_session_id *session, uint8_t key[KV_RECORD_KEY_MAX])
{
    return key_with_id('T', session->bytes, key);
}

uint32_t kv_key_node(const struct kv_session_id *session, const struct kv_checkpoint_id *id,
                     uint8_t key[KV_RECORD_KEY_MAX])
{
    uint32_t bytes = kv_key_tree(session, key);
    key[bytes++] = 'N';
    memcpy(key + bytes, id->bytes, sizeof(id->bytes));
    return bytes + (uint32_t)sizeof(id->bytes);
}

uint32_t kv_key_page(const struct kv_session_id *session, uint64_t uid,
                     uint8_t key[KV_RECORD_KEY_MAX])
{
    uint32_t bytes = kv_key_tree(session, key);
    key[bytes++] = 'P';
    /* Big-endian, so that RocksDB's order is the order of uids. */
    for (int shift = 56; shift >= 0; shift -= 8)
        key[bytes++] = (uint8_t)(uid >> shift);
    return bytes;
}
