/*
 * The history of removals.
 *
 * Goal: its bytes are those of docs/format.md and any change of them is refused; it stays within
 * its bounds whatever is removed, and what it answers is what was removed, also when thousands of
 * checkpoints went.
 * Method: fixed bytes; then random removals, compared with a plain list of all of them.
 */

#include "kvstore/format/removal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "tests/harness.h"

static uint64_t seed = 7;

static uint32_t random_below(uint32_t limit)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % limit;
}

static struct kv_checkpoint_id id_of(uint32_t n)
{
    struct kv_checkpoint_id id = {{0}};
    kv_store32(id.bytes, n);
    return id;
}

static void add(struct kv_history *history, enum kv_reason cause, uint32_t from, uint32_t to,
                uint64_t removed_ms, uint32_t n)
{
    const struct kv_checkpoint_id id = id_of(n);
    const struct kv_removal removal = {.cause = cause,
                                       .part = KV_REMOVED_ROWS,
                                       .from = from,
                                       .to = to,
                                       .checkpoints = 1,
                                       .removed_ms = removed_ms};
    kv_history_add(history, &removal, &id);
}

/* ---- bytes ---- */

static void test_bytes(void)
{
    static const uint8_t want[] = "\x01\x01\x01\x00"
                                  "\x02\x02\x04\x00\x10\x00\x00\x00\x22\x01\x00\x00\x01\x00\x00\x00"
                                  "\x18\x17\x16\x15\x14\x13\x12\x11\x02\x00\x00\x00\x00\x00\x00\x00"
                                  "\x03\x00\x00\x00\x00\x00\x00\x00"
                                  "\xa0\xa1\xa2\xa3\xa4\xa5\xa6\xa7\x00";
    const uint32_t body = sizeof(want) - 1;
    const struct kv_removal removal = {
        .cause = KV_REASON_QUOTA,
        .part = KV_REMOVED_CHECKPOINT,
        .limit_of = KV_LIMIT_TURNS,
        .from = 16,
        .to = 0x122,
        .checkpoints = 1,
        .removed_ms = 0x1112131415161718u,
        .limit = 2,
        .value = 3,
    };
    struct kv_checkpoint_id id;
    struct kv_history history = {0}, got;
    uint8_t buf[KV_RECORD_HISTORY_MAX], key[KV_KEY_HISTORY_BYTES];
    for (uint8_t i = 0; i < 16; i++)
        id.bytes[i] = (uint8_t)(0xa0 + i);
    kv_history_add(&history, &removal, &id);
    const uint32_t bytes = kv_record_history_encode(&history, buf);
    EXPECT_EQ_U32(bytes, body + 4);
    EXPECT_EQ_MEM(buf, want, body);
    EXPECT_EQ_U32(kv_load32(buf + body), kv_checksum(buf, body));
    EXPECT(kv_record_history_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_U32(got.removal_count, 1);
    EXPECT(got.removals[0].cause == KV_REASON_QUOTA && got.removals[0].value == 3);
    EXPECT(kv_history_of(&got, &id) == &got.removals[0]);
    const struct kv_session_id session = {{1, 2, 3}};
    EXPECT_EQ_U32(kv_key_history(&session, key), 18);
    EXPECT(key[0] == 'T' && key[17] == 'H' && memcmp(key + 1, session.bytes, 16) == 0);
}

/* Every byte changed, its checksum made right: refused, or another history with its own bytes. */
static void test_damage(void)
{
    struct kv_history history = {0}, got;
    uint8_t buf[KV_RECORD_HISTORY_MAX], again[KV_RECORD_HISTORY_MAX];
    uint32_t refused = 0;
    add(&history, KV_REASON_CAPACITY, 0, 100, 5, 1);
    add(&history, KV_REASON_EXPIRED, 100, 300, 6, 2);
    const uint32_t bytes = kv_record_history_encode(&history, buf);
    EXPECT(kv_record_history_decode(buf, bytes - 1, &got) == KV_CORRUPT);
    EXPECT(kv_record_history_decode(buf, 0, &got) == KV_CORRUPT);
    for (uint32_t at = 0; at < bytes; at++) {
        uint8_t changed[KV_RECORD_HISTORY_MAX];
        memcpy(changed, buf, bytes);
        changed[at] ^= 0x40;
        EXPECT(kv_record_history_decode(changed, bytes, &got) == KV_CORRUPT);
        if (at >= bytes - 4) continue;
        kv_store32(changed + bytes - 4, kv_checksum(changed, bytes - 4));
        if (kv_record_history_decode(changed, bytes, &got) != KV_OK) {
            refused++;
            continue;
        }
        EXPECT_EQ_U32(kv_record_history_encode(&got, again), bytes);
        EXPECT_EQ_MEM(again, changed, bytes);
    }
    EXPECT(refused >= 10); /* Version, counts, causes, parts, limits, zeros, indices. */
}

static void test_deleted(void)
{
    const struct kv_record_deleted record = {
        .user = {{9, 8, 7}},
        .cause = KV_REASON_QUOTA,
        .limit_of = KV_LIMIT_SESSIONS,
        .removed_ms = 0x1112131415161718u,
        .limit = 20,
        .value = 21,
        .checkpoints = 5,
        .bytes = 0x2122232425262728u,
    };
    struct kv_record_deleted got;
    uint8_t buf[KV_RECORD_DELETED_BYTES], key[KV_KEY_DELETED_BYTES];
    EXPECT_EQ_U32(kv_record_deleted_encode(&record, buf), 59);
    EXPECT(buf[0] == 1 && buf[1] == 9 && buf[17] == 2 && buf[18] == 3);
    EXPECT_EQ_U64(kv_load64(buf + 19), record.removed_ms);
    EXPECT_EQ_U64(kv_load64(buf + 47), record.bytes);
    EXPECT(kv_record_deleted_decode(buf, 59, &got) == KV_OK);
    EXPECT(got.cause == KV_REASON_QUOTA && got.limit_of == KV_LIMIT_SESSIONS);
    EXPECT(got.limit == 20 && got.value == 21 && got.checkpoints == 5);
    EXPECT(kv_record_deleted_decode(buf, 58, &got) == KV_CORRUPT);
    buf[17] = 1; /* EXPIRED: a session does not go so. */
    kv_store32(buf + 55, kv_checksum(buf, 55));
    EXPECT(kv_record_deleted_decode(buf, 59, &got) == KV_CORRUPT);
    EXPECT_EQ_U32(kv_key_deleted(&(struct kv_session_id){{4}}, key), 17);
    EXPECT(key[0] == 'D' && key[1] == 4);
}

/* ---- answers ---- */

static void test_joins(void)
{
    struct kv_history history = {0};
    /* A tree that expires leaf by leaf is one removal. */
    for (uint32_t i = 0; i < 300; i++)
        add(&history, KV_REASON_EXPIRED, 30 * (299 - i), 30 * (300 - i), 1000 + i, i);
    EXPECT_EQ_U32(history.removal_count, 1);
    EXPECT(history.removals[0].from == 0 && history.removals[0].to == 9000);
    EXPECT_EQ_U32(history.removals[0].checkpoints, 300);
    EXPECT(!history.cut);
    /* Another cause is another entry, and the newer one answers. */
    add(&history, KV_REASON_CAPACITY, 0, 30, 5000, 1000);
    EXPECT(kv_history_at(&history, 10, true)->cause == KV_REASON_CAPACITY);
    EXPECT(kv_history_at(&history, 40, true)->cause == KV_REASON_EXPIRED);
    EXPECT(kv_history_at(&history, 9000, true) == NULL);
    const struct kv_checkpoint_id last = id_of(299), gone = id_of(0);
    EXPECT(kv_history_of(&history, &last)->cause == KV_REASON_EXPIRED);
    EXPECT(kv_history_of(&history, &gone) == NULL); /* The last 48 are known. */
    EXPECT(kv_history_last(&history)->cause == KV_REASON_CAPACITY);
    EXPECT(kv_history_at(NULL, 0, true) == NULL && kv_history_last(NULL) == NULL);
    EXPECT(kv_history_of(NULL, &last) == NULL);
}

/* A quota that takes one checkpoint each turn, an hour apart: joined only when there is no room,
 * and no position is forgotten. */
static void test_turns(void)
{
    struct kv_history history = {0};
    for (uint32_t i = 0; i < 1000; i++) {
        const struct kv_removal removal = {
            .cause = KV_REASON_QUOTA,
            .part = KV_REMOVED_CHECKPOINT,
            .limit_of = KV_LIMIT_TURNS,
            .from = 30 * i,
            .to = 30 * i + 30,
            .checkpoints = 1,
            .removed_ms = 3600000ull * i,
            .limit = 10,
            .value = 11,
        };
        const struct kv_checkpoint_id id = id_of(i);
        kv_history_add(&history, &removal, &id);
        EXPECT(history.removal_count <= KV_REMOVALS_MAX);
        EXPECT(kv_history_of(&history, &id)->to >= 30 * i + 30);
    }
    EXPECT(!history.cut);
    for (uint32_t t = 0; t < 30000; t++) {
        EXPECT(kv_history_at(&history, t, false) != NULL);
        EXPECT(kv_history_at(&history, t, true) == NULL); /* Its rows are there. */
    }
    EXPECT_EQ_U64(kv_history_at(&history, 29999, false)->removed_ms, 3600000ull * 999);
}

/* Against a list of everything: what the history says of a position is the newest that was said of
 * it, and it says nothing only where nothing was removed, or where it says that it is cut. */
static void test_random(void)
{
    static const enum kv_reason causes[] = {KV_REASON_EXPIRED, KV_REASON_CAPACITY,
                                            KV_REASON_CORRUPT};
    enum { REMOVALS = 60, POSITIONS = 1000 };
    for (uint32_t round = 0; round < harness_count(2000); round++) {
        struct kv_history history = {0}, got;
        struct {
            uint32_t from, to;
            enum kv_reason cause;
        } all[REMOVALS];
        const uint32_t count = 1 + random_below(REMOVALS);
        for (uint32_t i = 0; i < count; i++) {
            all[i].from = random_below(POSITIONS);
            all[i].to = all[i].from + 1 + random_below(100);
            all[i].cause = causes[random_below(3)];
            add(&history, all[i].cause, all[i].from, all[i].to, 1000000ull * i, i);
        }
        uint8_t buf[KV_RECORD_HISTORY_MAX];
        const uint32_t bytes = kv_record_history_encode(&history, buf);
        EXPECT(bytes <= sizeof(buf) && kv_record_history_decode(buf, bytes, &got) == KV_OK);
        for (uint32_t t = 0; t < POSITIONS + 100; t += 7) {
            const struct kv_removal *removal = kv_history_at(&got, t, true);
            enum kv_reason newest = KV_REASON_NONE;
            for (uint32_t i = 0; i < count; i++)
                if (all[i].from <= t && t < all[i].to) newest = all[i].cause;
            if (removal == NULL)
                EXPECT(newest == KV_REASON_NONE || history.cut);
            else
                EXPECT(newest == removal->cause);
        }
    }
}

int main(void)
{
    test_bytes();
    test_damage();
    test_deleted();
    test_joins();
    test_turns();
    test_random();
    HARNESS_END();
}
