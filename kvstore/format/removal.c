/*
 * The history of removals: how it stays small without losing the answer.
 *
 * What a miss asks is "what took this position?", so removals are ranges, and neighbours of one
 * kind are one range.  A session whose quota takes a checkpoint each turn, or whose tree expires
 * leaf by leaf, has one entry for it.  Only a session with more than KV_REMOVALS_MAX kinds of
 * ranges forgets, the oldest first, and says so.  Ids are kept beside the ranges, because a call
 * that names a checkpoint that is gone is to hear its cause and not that of another.
 *
 * A value has one encoding, like every record.
 */

#include "kvstore/format/removal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"

#include <assert.h>
#include <string.h>

enum {
    RECORD_VERSION = 1,
    HEAD_BYTES = 4,
    REMOVAL_BYTES = 40,
    ID_BYTES = 9,
    CRC_BYTES = 4,
};

#define TOGETHER_MS 60000u

/* Numbers of causes on disk; never renumbered. */
static const struct {
    enum kv_reason cause;
    uint8_t code;
} causes[] = {
    {KV_REASON_EXPIRED, 1},     {KV_REASON_QUOTA, 2},         {KV_REASON_CAPACITY, 3},
    {KV_REASON_ROLLED_BACK, 4}, {KV_REASON_DELETED, 5},       {KV_REASON_LOST_NODE, 6},
    {KV_REASON_CORRUPT, 7},     {KV_REASON_MODEL_CHANGED, 8},
};

static uint8_t cause_code(enum kv_reason cause)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(causes); i++)
        if (causes[i].cause == cause) return causes[i].code;
    return 0;
}

static bool cause_of(uint8_t code, enum kv_reason *ret_cause)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(causes); i++) {
        if (causes[i].code != code) continue;
        *ret_cause = causes[i].cause;
        return true;
    }
    return false;
}

const char *kv_limit_name(enum kv_limit limit)
{
    static const char *const names[KV_LIMIT_COUNT] = {
        [KV_LIMIT_NONE] = "",
        [KV_LIMIT_TTL_MS] = "ttl_ms",
        [KV_LIMIT_SSD_BYTES] = "ssd_bytes",
        [KV_LIMIT_SESSIONS] = "sessions",
        [KV_LIMIT_TURNS] = "turns",
        [KV_LIMIT_USER_BYTES] = "bytes_ssd",
    };
    assert(limit < KV_LIMIT_COUNT);
    return names[limit];
}

bool kv_removal_cause(enum kv_reason cause)
{
    return cause_code(cause) != 0;
}

/* ---- adding ---- */

static bool same_kind(const struct kv_removal *a, const struct kv_removal *b)
{
    return a->cause == b->cause && a->part == b->part && a->limit_of == b->limit_of &&
           a->limit == b->limit;
}

static bool touch(const struct kv_removal *a, const struct kv_removal *b)
{
    return a->from <= b->to && b->from <= a->to;
}

static void join(struct kv_removal *to, const struct kv_removal *more)
{
    to->from = KV_MIN(to->from, more->from);
    to->to = KV_MAX(to->to, more->to);
    to->checkpoints += KV_MIN(more->checkpoints, UINT32_MAX - to->checkpoints);
    to->removed_ms = KV_MAX(to->removed_ms, more->removed_ms);
    to->value = KV_MAX(to->value, more->value);
}

/* Takes entry k out; ids that named it name `heir` (counted after k is gone), or go with it. */
static void take_out(struct kv_history *history, uint32_t k, uint32_t heir)
{
    uint32_t kept = 0;
    history->removal_count--;
    memmove(&history->removals[k], &history->removals[k + 1],
            sizeof(history->removals[0]) * (history->removal_count - k));
    for (uint32_t i = 0; i < history->id_count; i++) {
        struct kv_removed_id id = history->ids[i];
        if (id.removal == k && heir == UINT32_MAX) continue;
        if (id.removal == k)
            id.removal = (uint8_t)heir;
        else if (id.removal > k)
            id.removal--;
        history->ids[kept++] = id;
    }
    history->id_count = kept;
}

/* As one they count as removed when the newer one was: not where another cause came between. */
static bool may_join(const struct kv_history *history, uint32_t older, uint32_t newer)
{
    const struct kv_removal *removals = history->removals;
    if (!same_kind(&removals[older], &removals[newer])) return false;
    if (!touch(&removals[older], &removals[newer])) return false;
    for (uint32_t k = older + 1; k < newer; k++)
        if (!same_kind(&removals[k], &removals[older]) && touch(&removals[k], &removals[older]))
            return false;
    return true;
}

/* Room for one more entry. */
static void make_room(struct kv_history *history)
{
    if (history->removal_count < KV_REMOVALS_MAX) return;
    for (uint32_t i = 0; i < KV_REMOVALS_MAX; i++) {
        for (uint32_t j = i + 1; j < KV_REMOVALS_MAX; j++) {
            if (!may_join(history, i, j)) continue;
            join(&history->removals[j], &history->removals[i]);
            take_out(history, i, j - 1);
            return;
        }
    }
    take_out(history, 0, UINT32_MAX);
    history->cut = true;
}

void kv_history_add(struct kv_history *history, const struct kv_removal *removal,
                    const struct kv_checkpoint_id *id)
{
    assert(kv_removal_cause(removal->cause) && removal->from < removal->to);
    assert(removal->checkpoints > 0 && removal->limit_of < KV_LIMIT_COUNT);
    const uint32_t count = history->removal_count;
    struct kv_removal *last = count == 0 ? NULL : &history->removals[count - 1];
    const uint64_t since_ms = last == NULL || removal->removed_ms < last->removed_ms
                                  ? 0
                                  : removal->removed_ms - last->removed_ms;
    if (last != NULL && same_kind(last, removal) && touch(last, removal) &&
        since_ms <= TOGETHER_MS) {
        join(last, removal);
    } else {
        make_room(history);
        history->removals[history->removal_count++] = *removal;
    }
    if (history->id_count == KV_REMOVED_IDS_MAX) {
        history->id_count--;
        memmove(history->ids, history->ids + 1, sizeof(history->ids[0]) * history->id_count);
    }
    history->ids[history->id_count++] = (struct kv_removed_id){
        .id = kv_load64(id->bytes), .removal = (uint8_t)(history->removal_count - 1)};
}

/* ---- asking ---- */

const struct kv_removal *kv_history_at(const struct kv_history *history, uint32_t position,
                                       bool rows_only)
{
    const struct kv_removal *found = NULL;
    for (uint32_t i = 0; history != NULL && i < history->removal_count; i++) {
        const struct kv_removal *removal = &history->removals[i];
        if (position < removal->from || position >= removal->to) continue;
        if (rows_only && removal->part != KV_REMOVED_ROWS) continue;
        if (found == NULL || removal->removed_ms >= found->removed_ms) found = removal;
    }
    return found;
}

const struct kv_removal *kv_history_of(const struct kv_history *history,
                                       const struct kv_checkpoint_id *id)
{
    if (history == NULL) return NULL;
    for (uint32_t i = history->id_count; i-- > 0;)
        if (history->ids[i].id == kv_load64(id->bytes))
            return &history->removals[history->ids[i].removal];
    return NULL;
}

const struct kv_removal *kv_history_last(const struct kv_history *history)
{
    if (history == NULL || history->removal_count == 0) return NULL;
    return &history->removals[history->removal_count - 1];
}

/* ---- bytes ---- */

static void removal_encode(const struct kv_removal *removal, uint8_t *buf)
{
    buf[0] = cause_code(removal->cause);
    buf[1] = (uint8_t)removal->part;
    buf[2] = (uint8_t)removal->limit_of;
    buf[3] = 0;
    kv_store32(buf + 4, removal->from);
    kv_store32(buf + 8, removal->to);
    kv_store32(buf + 12, removal->checkpoints);
    kv_store64(buf + 16, removal->removed_ms);
    kv_store64(buf + 24, removal->limit);
    kv_store64(buf + 32, removal->value);
}

static bool removal_decode(const uint8_t *buf, struct kv_removal *ret_removal)
{
    if (!cause_of(buf[0], &ret_removal->cause)) return false;
    if (buf[1] != KV_REMOVED_ROWS && buf[1] != KV_REMOVED_CHECKPOINT) return false;
    if (buf[2] >= KV_LIMIT_COUNT || buf[3] != 0) return false;
    ret_removal->part = (enum kv_removal_part)buf[1];
    ret_removal->limit_of = (enum kv_limit)buf[2];
    ret_removal->from = kv_load32(buf + 4);
    ret_removal->to = kv_load32(buf + 8);
    ret_removal->checkpoints = kv_load32(buf + 12);
    ret_removal->removed_ms = kv_load64(buf + 16);
    ret_removal->limit = kv_load64(buf + 24);
    ret_removal->value = kv_load64(buf + 32);
    return ret_removal->from < ret_removal->to && ret_removal->checkpoints > 0;
}

uint32_t kv_record_history_encode(const struct kv_history *history, uint8_t *buf)
{
    uint8_t *at = buf + HEAD_BYTES;
    buf[0] = RECORD_VERSION;
    buf[1] = (uint8_t)history->removal_count;
    buf[2] = (uint8_t)history->id_count;
    buf[3] = history->cut;
    for (uint32_t i = 0; i < history->removal_count; i++, at += REMOVAL_BYTES)
        removal_encode(&history->removals[i], at);
    for (uint32_t i = 0; i < history->id_count; i++, at += ID_BYTES) {
        kv_store64(at, history->ids[i].id);
        at[8] = history->ids[i].removal;
    }
    const uint32_t bytes = (uint32_t)(at - buf);
    kv_store32(at, kv_checksum(buf, bytes));
    return bytes + CRC_BYTES;
}

kv_status kv_record_history_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_history *ret_history)
{
    if (bytes < HEAD_BYTES + CRC_BYTES) return KV_CORRUPT;
    const uint32_t body_bytes = bytes - CRC_BYTES;
    if (kv_load32(value + body_bytes) != kv_checksum(value, body_bytes)) return KV_CORRUPT;
    struct kv_history history = {
        .removal_count = value[1], .id_count = value[2], .cut = value[3] == 1};
    if (value[0] != RECORD_VERSION || value[3] > 1) return KV_CORRUPT;
    if (history.removal_count > KV_REMOVALS_MAX || history.id_count > KV_REMOVED_IDS_MAX)
        return KV_CORRUPT;
    if (body_bytes !=
        HEAD_BYTES + REMOVAL_BYTES * history.removal_count + ID_BYTES * history.id_count)
        return KV_CORRUPT;
    const uint8_t *at = value + HEAD_BYTES;
    for (uint32_t i = 0; i < history.removal_count; i++, at += REMOVAL_BYTES)
        if (!removal_decode(at, &history.removals[i])) return KV_CORRUPT;
    for (uint32_t i = 0; i < history.id_count; i++, at += ID_BYTES) {
        history.ids[i] = (struct kv_removed_id){.id = kv_load64(at), .removal = at[8]};
        if (at[8] >= history.removal_count) return KV_CORRUPT;
    }
    *ret_history = history;
    return KV_OK;
}

uint32_t kv_key_history(const struct kv_session_id *session, uint8_t key[KV_KEY_HISTORY_BYTES])
{
    key[0] = 'T';
    memcpy(key + 1, session->bytes, sizeof(session->bytes));
    key[17] = 'H';
    return KV_KEY_HISTORY_BYTES;
}

uint32_t kv_record_deleted_encode(const struct kv_record_deleted *record, uint8_t *buf)
{
    assert(record->cause == KV_REASON_DELETED || record->cause == KV_REASON_QUOTA);
    assert(record->limit_of < KV_LIMIT_COUNT);
    buf[0] = RECORD_VERSION;
    memcpy(buf + 1, record->user.bytes, sizeof(record->user.bytes));
    buf[17] = cause_code(record->cause);
    buf[18] = (uint8_t)record->limit_of;
    kv_store64(buf + 19, record->removed_ms);
    kv_store64(buf + 27, record->limit);
    kv_store64(buf + 35, record->value);
    kv_store32(buf + 43, record->checkpoints);
    kv_store64(buf + 47, record->bytes);
    kv_store32(buf + 55, kv_checksum(buf, 55));
    return KV_RECORD_DELETED_BYTES;
}

kv_status kv_record_deleted_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_record_deleted *ret_record)
{
    struct kv_record_deleted record = {0};
    if (bytes != KV_RECORD_DELETED_BYTES || kv_load32(value + 55) != kv_checksum(value, 55))
        return KV_CORRUPT;
    if (value[0] != RECORD_VERSION || !cause_of(value[17], &record.cause) ||
        value[18] >= KV_LIMIT_COUNT)
        return KV_CORRUPT;
    if (record.cause != KV_REASON_DELETED && record.cause != KV_REASON_QUOTA) return KV_CORRUPT;
    memcpy(record.user.bytes, value + 1, sizeof(record.user.bytes));
    record.limit_of = (enum kv_limit)value[18];
    record.removed_ms = kv_load64(value + 19);
    record.limit = kv_load64(value + 27);
    record.value = kv_load64(value + 35);
    record.checkpoints = kv_load32(value + 43);
    record.bytes = kv_load64(value + 47);
    *ret_record = record;
    return KV_OK;
}

uint32_t kv_key_deleted(const struct kv_session_id *session, uint8_t key[KV_KEY_DELETED_BYTES])
{
    key[0] = 'D';
    memcpy(key + 1, session->bytes, sizeof(session->bytes));
    return KV_KEY_DELETED_BYTES;
}
