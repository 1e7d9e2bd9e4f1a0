/*
 * Records of the manifest.
 *
 * Goal: what is encoded is decoded to the same, in the documented bytes; a value damaged in any
 * single byte or cut anywhere is KV_CORRUPT; a bound that is wrong is KV_CORRUPT even when the
 * checksum is right; keys sort as documented.
 * Method: one full and one smallest record of each type; every length below and every one-byte
 * change of each; fields changed by hand under a new checksum.
 */

#include "kvstore/format/manifest_record.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "tests/harness.h"

enum { BUF = 1024 };

typedef kv_status decode_fn(const uint8_t *value, uint32_t bytes);

static kv_status decode_store(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_store record;
    return kv_record_store_decode(value, bytes, &record);
}

static kv_status decode_clock(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_clock record;
    return kv_record_clock_decode(value, bytes, &record);
}

static kv_status decode_commit(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_commit record;
    return kv_record_commit_decode(value, bytes, &record);
}

static kv_status decode_user(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_user record;
    return kv_record_user_decode(value, bytes, &record);
}

static kv_status decode_session(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_session record;
    return kv_record_session_decode(value, bytes, &record);
}

static kv_status decode_node(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_node record;
    return kv_record_node_decode(value, bytes, &record);
}

static kv_status decode_page(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_page record;
    return kv_record_page_decode(value, bytes, &record);
}

static kv_status decode_segment(const uint8_t *value, uint32_t bytes)
{
    struct kv_record_segment record;
    return kv_record_segment_decode(value, bytes, &record);
}

/* Every cut and every changed byte is refused.  The copy has the exact size, so that a sanitizer
 * sees a read beyond it. */
static void check_damage(decode_fn *decode, const uint8_t *value, uint32_t bytes)
{
    EXPECT(decode(value, bytes) == KV_OK);
    for (uint32_t count = 0; count < bytes; count++) {
        uint8_t *copy = malloc(count + 1);
        EXPECT(copy != NULL);
        memcpy(copy, value, count);
        uint8_t *exact = realloc(copy, count == 0 ? 1 : count);
        EXPECT(exact != NULL);
        EXPECT(decode(exact, count) == KV_CORRUPT);
        free(exact);
    }
    uint8_t changed[BUF + 1];
    memcpy(changed, value, bytes);
    for (uint32_t i = 0; i < bytes; i++) {
        changed[i] ^= 0x10;
        EXPECT(decode(changed, bytes) == KV_CORRUPT);
        changed[i] ^= 0x10;
    }
    changed[bytes] = 0;
    EXPECT(decode(changed, bytes + 1) == KV_CORRUPT);
}

/* Changes `count` bytes at `at` and makes the checksum right again. */
static void check_refused(decode_fn *decode, const uint8_t *value, uint32_t bytes, uint32_t at,
                          uint64_t field, uint32_t count)
{
    uint8_t changed[BUF];
    memcpy(changed, value, bytes);
    for (uint32_t i = 0; i < count; i++)
        changed[at + i] = (uint8_t)(field >> (8 * i));
    kv_store32(changed + bytes - 4, kv_checksum(changed, bytes - 4));
    EXPECT(decode(changed, bytes) == KV_CORRUPT);
}

static void fill(uint8_t *bytes, size_t count, uint8_t from)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)(from + i);
}

static void test_commit(void)
{
    const struct kv_record_commit record = {.number = 0x0102030405060708u};
    struct kv_record_commit got;
    uint8_t buf[KV_RECORD_COMMIT_BYTES], key[KV_RECORD_KEY_MAX];
    const uint32_t bytes = kv_record_commit_encode(&record, buf);
    EXPECT_EQ_U32(bytes, 13);
    EXPECT_EQ_U32(buf[0], 1);
    EXPECT_EQ_U64(kv_load64(buf + 1), record.number);
    EXPECT(kv_record_commit_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_U64(got.number, record.number);
    EXPECT_EQ_U32(kv_key_commit(key), 1);
    EXPECT_EQ_U32(key[0], 'C');
    check_damage(decode_commit, buf, bytes);
}

static void test_clock(void)
{
    const struct kv_record_clock record = {.floor_ms = 0x0102030405060708u,
                                           .before_ms = 0x1112131415161718u};
    struct kv_record_clock got;
    uint8_t buf[KV_RECORD_CLOCK_BYTES], key[KV_RECORD_KEY_MAX];
    const uint32_t bytes = kv_record_clock_encode(&record, buf);
    EXPECT_EQ_U32(bytes, 21);
    EXPECT_EQ_U32(buf[0], 1);
    EXPECT_EQ_U64(kv_load64(buf + 1), record.floor_ms);
    EXPECT(kv_record_clock_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_U64(got.floor_ms, record.floor_ms);
    EXPECT_EQ_U64(kv_load64(buf + 9), record.before_ms);
    EXPECT_EQ_U64(got.before_ms, record.before_ms);
    EXPECT_EQ_U32(kv_key_clock(key), 1);
    EXPECT_EQ_U32(key[0], 'W');
    check_damage(decode_clock, buf, bytes);
}

static void test_store(void)
{
    struct kv_record_store record = {.boots = 7};
    struct kv_record_store got;
    uint8_t buf[KV_RECORD_STORE_MAX];

    fill(record.model.bytes, 32, 10);
    fill(record.directory.bytes, 16, 200);
    const uint32_t bytes = kv_record_store_encode(&record, buf);
    EXPECT_EQ_U32(bytes, 61);
    EXPECT_EQ_U32(buf[0], 1);
    EXPECT_EQ_U64(kv_load64(buf + 49), 7);
    EXPECT(kv_record_store_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_MEM(got.model.bytes, record.model.bytes, 32);
    EXPECT_EQ_U64(got.boots, 7);
    EXPECT_EQ_MEM(got.directory.bytes, record.directory.bytes, 16);
    check_damage(decode_store, buf, bytes);
    check_refused(decode_store, buf, bytes, 0, 2, 1); /* A version we do not know. */
}

/* Version 2: the salt under a key. */
static void test_user_sealed(void)
{
    struct kv_record_user record = {.name = "bob", .sealed = {.key_id = 5}};
    struct kv_record_user got;
    uint8_t buf[KV_RECORD_USER_MAX];
    fill(record.sealed.nonce, sizeof(record.sealed.nonce), 1);
    fill(record.sealed.salt, sizeof(record.sealed.salt), 0x40);
    fill(record.sealed.tag, sizeof(record.sealed.tag), 0x80);
    const uint32_t bytes = kv_record_user_encode(&record, buf);
    EXPECT_EQ_U32(bytes, 66 + 3 + 4);
    EXPECT_EQ_U32(buf[0], 2);
    EXPECT_EQ_U32(buf[1], 5);
    EXPECT_EQ_MEM(buf + 5, record.sealed.nonce, 12);
    EXPECT_EQ_MEM(buf + 17, record.sealed.salt, 32);
    EXPECT_EQ_MEM(buf + 49, record.sealed.tag, 16);
    EXPECT_EQ_U32(buf[65], 3);
    EXPECT(kv_record_user_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_MEM(&got.sealed, &record.sealed, sizeof(got.sealed));
    EXPECT(strcmp(got.name, "bob") == 0);
    check_damage(decode_user, buf, bytes);
    check_refused(decode_user, buf, bytes, 1, 0, 4); /* No key. */
    check_refused(decode_user, buf, bytes, 65, 0, 1);
    check_refused(decode_user, buf, bytes, 65, 4, 1);
    check_refused(decode_user, buf, bytes, 67, 0, 1);
}

static void test_user(void)
{
    struct kv_record_user record = {.name = "alice"};
    struct kv_record_user got;
    uint8_t buf[KV_RECORD_USER_MAX];

    fill(record.salt, 32, 90);
    uint32_t bytes = kv_record_user_encode(&record, buf);
    EXPECT(kv_record_user_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_STR(got.name, "alice");
    EXPECT_EQ_MEM(got.salt, record.salt, 32);
    check_damage(decode_user, buf, bytes);
    check_refused(decode_user, buf, bytes, 33, 0, 1);
    check_refused(decode_user, buf, bytes, 33, 4, 1);
    check_refused(decode_user, buf, bytes, 33, 255, 1);
    check_refused(decode_user, buf, bytes, 35, 0, 1); /* NUL inside the name. */

    memset(record.name, 'x', KV_USER_NAME_MAX);
    record.name[KV_USER_NAME_MAX] = 0;
    bytes = kv_record_user_encode(&record, buf);
    EXPECT(kv_record_user_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_STR(got.name, record.name);
}

static struct kv_record_session full_session(void)
{
    struct kv_record_session record = {
        .kind = 2,
        .created_ms = 1700000000001,
        .used_ms = 1700000000002,
        .ttl_ms = 259200000,
        .epoch = 5,
        .head_tokens = 77,
        .claimed_tokens = 99,
        .checkpoints = 3,
        .has_head = true,
        .name = "run:1.main",
        .parent_name = "run:1",
    };
    fill(record.user.bytes, 16, 1);
    fill(record.head.bytes, 16, 50);
    return record;
}

static void test_session(void)
{
    const struct kv_record_session record = full_session();
    struct kv_record_session got;
    uint8_t buf[KV_RECORD_SESSION_MAX];

    const uint32_t bytes = kv_record_session_encode(&record, buf);
    EXPECT(kv_record_session_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_MEM(got.user.bytes, record.user.bytes, 16);
    EXPECT_EQ_U32(got.kind, 2);
    EXPECT_EQ_U64(got.created_ms, record.created_ms);
    EXPECT_EQ_U64(got.used_ms, record.used_ms);
    EXPECT_EQ_U64(got.ttl_ms, record.ttl_ms);
    EXPECT_EQ_U64(got.epoch, 5);
    EXPECT_EQ_U32(got.head_tokens, 77);
    EXPECT_EQ_U32(got.claimed_tokens, 99);
    EXPECT_EQ_U32(got.checkpoints, 3);
    EXPECT(got.has_head);
    EXPECT_EQ_MEM(got.head.bytes, record.head.bytes, 16);
    EXPECT_EQ_STR(got.name, "run:1.main");
    EXPECT_EQ_STR(got.parent_name, "run:1");
    check_damage(decode_session, buf, bytes);
    check_refused(decode_session, buf, bytes, 50, 2, 1); /* has_head is 0 or 1. */
    check_refused(decode_session, buf, bytes, 50, 0, 1); /* No head, yet an id. */
    check_refused(decode_session, buf, bytes, 67, 0, 1);
    check_refused(decode_session, buf, bytes, 67, 11, 1);
    check_refused(decode_session, buf, bytes, 68, 129, 1);
    check_refused(decode_session, buf, bytes, 69, 0xffffffff, 4); /* Beyond any position. */
    check_refused(decode_session, buf, bytes, 77, 0xffffffff, 4);
    check_refused(decode_session, buf, bytes, 82, 0, 1); /* NUL inside the names. */
    check_refused(decode_session, buf, bytes, 92, 0, 1);
}

static void test_session_smallest_and_largest(void)
{
    struct kv_record_session record = {.name = "s"};
    struct kv_record_session got;
    uint8_t buf[KV_RECORD_SESSION_MAX];

    /* A stale head is not written when there is none. */
    fill(record.head.bytes, 16, 50);
    uint32_t bytes = kv_record_session_encode(&record, buf);
    EXPECT(kv_record_session_decode(buf, bytes, &got) == KV_OK);
    EXPECT(!got.has_head);
    EXPECT_EQ_STR(got.parent_name, "");
    check_damage(decode_session, buf, bytes);

    memset(record.name, 'n', KV_SESSION_NAME_MAX);
    memset(record.parent_name, 'p', KV_SESSION_NAME_MAX);
    bytes = kv_record_session_encode(&record, buf);
    EXPECT(bytes <= sizeof(buf));
    EXPECT(kv_record_session_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_STR(got.name, record.name);
    EXPECT_EQ_STR(got.parent_name, record.parent_name);
}

/* Version 2: its head is in another tree, where it was forked or not. */
static void test_session_of_another_tree(void)
{
    struct kv_record_session record = full_session();
    struct kv_record_session got;
    uint8_t buf[KV_RECORD_SESSION_MAX];
    const uint32_t plain = kv_record_session_encode(&record, buf);
    EXPECT_EQ_U32(buf[0], 1);
    record.has_tree = true;
    fill(record.tree.bytes, 16, 60);
    uint32_t bytes = kv_record_session_encode(&record, buf);
    EXPECT_EQ_U32(buf[0], 2);
    EXPECT_EQ_U32(bytes, plain + 37);
    EXPECT(kv_record_session_decode(buf, bytes, &got) == KV_OK);
    EXPECT(got.has_tree && !got.has_origin && got.origin_tokens == 0);
    check_refused(decode_session, buf, bytes, plain - 4 + 33, 7, 4); /* No fork, yet a position. */

    record.has_origin = true;
    record.origin_tokens = 55;
    fill(record.origin.bytes, 16, 90);
    bytes = kv_record_session_encode(&record, buf);
    EXPECT(kv_record_session_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_MEM(buf + plain - 4, record.tree.bytes, 16); /* docs/format.md */
    EXPECT_EQ_U32(buf[plain - 4 + 16], 1);
    EXPECT_EQ_MEM(buf + plain - 4 + 17, record.origin.bytes, 16);
    EXPECT_EQ_U32(kv_load32(buf + plain - 4 + 33), 55);
    EXPECT_EQ_MEM(got.tree.bytes, record.tree.bytes, 16);
    EXPECT_EQ_MEM(got.origin.bytes, record.origin.bytes, 16);
    EXPECT(got.has_origin && got.origin_tokens == 55);
    EXPECT_EQ_STR(got.name, "run:1.main");
    check_damage(decode_session, buf, bytes);
    check_refused(decode_session, buf, bytes, 0, 1, 1); /* Version 1 ends before. */
    check_refused(decode_session, buf, bytes, 0, 3, 1);
    check_refused(decode_session, buf, bytes, plain - 4 + 16, 2, 1);
    check_refused(decode_session, buf, bytes, plain - 4 + 33, 0xffffffff, 4);
}

static struct kv_record_node full_node(const uint8_t *uids)
{
    struct kv_record_node record = {
        .has_parent = true,
        .model_tag = 0x1122334455667788,
        .kernels = kv_kernels_tag("fp32"),
        .tokens = 300,
        .kind = 3,
        .created_ms = 11,
        .used_ms = 12,
        .replays = {130, 260},
        .replay_count = 2,
        .page_count = 2,
        .page_uids = uids,
    };
    fill(record.id.bytes, 16, 1);
    fill(record.parent.bytes, 16, 40);
    fill(record.digest.bytes, 32, 100);
    return record;
}

/* Version 2: made by another session than the tree is named for. */
static void test_node_of_another_maker(void)
{
    uint8_t uids[16];
    uint8_t buf[BUF];
    fill(uids, sizeof(uids), 7);
    struct kv_record_node record = full_node(uids);
    struct kv_record_node got;
    const uint32_t plain = kv_record_node_encode(&record, buf);
    EXPECT_EQ_U32(buf[0], 1);
    record.has_maker = true;
    fill(record.maker.bytes, 16, 70);
    const uint32_t bytes = kv_record_node_encode(&record, buf);
    EXPECT_EQ_U32(buf[0], 2);
    EXPECT_EQ_U32(bytes, plain + 16);
    EXPECT_EQ_MEM(buf + plain - 4, record.maker.bytes, 16); /* docs/format.md */
    EXPECT(kv_record_node_decode(buf, bytes, &got) == KV_OK);
    EXPECT(got.has_maker && got.tokens == 300);
    EXPECT_EQ_MEM(got.maker.bytes, record.maker.bytes, 16);
    EXPECT_EQ_MEM(got.page_uids, uids, sizeof(uids));
    check_damage(decode_node, buf, bytes);
    check_refused(decode_node, buf, bytes, 0, 1, 1);
}

static void test_node(void)
{
    uint8_t uids[16];
    kv_store64(uids, 0xaabbccdd00112233);
    kv_store64(uids + 8, 9);
    const struct kv_record_node record = full_node(uids);
    struct kv_record_node got;
    uint8_t buf[BUF];

    const uint32_t bytes = kv_record_node_encode(&record, buf);
    EXPECT(bytes <= kv_record_node_max(2));
    EXPECT(kv_record_node_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_MEM(got.id.bytes, record.id.bytes, 16);
    EXPECT(got.has_parent);
    EXPECT_EQ_MEM(got.parent.bytes, record.parent.bytes, 16);
    EXPECT_EQ_U64(got.model_tag, record.model_tag);
    EXPECT_EQ_U64(got.kernels, kv_kernels_tag("fp32"));
    EXPECT_EQ_U32(got.tokens, 300);
    EXPECT_EQ_MEM(got.digest.bytes, record.digest.bytes, 32);
    EXPECT_EQ_U32(got.kind, 3);
    EXPECT_EQ_U64(got.created_ms, 11);
    EXPECT_EQ_U64(got.used_ms, 12);
    EXPECT_EQ_U32(got.replay_count, 2);
    EXPECT_EQ_U32(got.replays[1], 260);
    EXPECT_EQ_U32(got.page_count, 2);
    EXPECT_EQ_MEM(got.page_uids, uids, 16);
    check_damage(decode_node, buf, bytes);

    check_refused(decode_node, buf, bytes, 17, 0, 1); /* No parent, yet an id. */
    check_refused(decode_node, buf, bytes, 17, 7, 1); /* has_parent is 0 or 1. */
    check_refused(decode_node, buf, bytes, 42, 1048577, 4);
    check_refused(decode_node, buf, bytes, 42, 128, 4);        /* Two pages need 129 tokens. */
    check_refused(decode_node, buf, bytes, 42, 259, 4);        /* A replay beyond t. */
    check_refused(decode_node, buf, bytes, 95, 17, 1);         /* Too many replays. */
    check_refused(decode_node, buf, bytes, 96, 1, 4);          /* Fewer pages than bytes. */
    check_refused(decode_node, buf, bytes, 96, 0x20000002, 4); /* Times 8 would wrap. */
    check_refused(decode_node, buf, bytes, 108, 260, 4);       /* Replays do not ascend. */
    check_refused(decode_node, buf, bytes, 108, 0, 4);
    check_refused(decode_node, buf, bytes, 0, 2, 1); /* A version we do not know. */
}

static void test_kernel_names(void)
{
    char name[KV_KERNELS_NAME_BYTES];
    EXPECT_EQ_STR(kv_kernels_name(kv_kernels_tag("amx"), name), "amx");
    EXPECT_EQ_STR(kv_kernels_name(kv_kernels_tag("12345678"), name), "12345678");
    EXPECT_EQ_STR(kv_kernels_name(kv_kernels_tag("SYNTHETIC"), name), "SYNTHETI");
    EXPECT_EQ_STR(kv_kernels_name(KV_KERNELS_UNKNOWN, name), "unknown");
    EXPECT_EQ_STR(kv_kernels_name(0x0a22, name), "??"); /* A record may hold anything. */
    EXPECT(kv_kernels_tag("amx") != kv_kernels_tag("fp32"));
}

static void test_node_smallest_and_largest(void)
{
    struct kv_record_node record = {.tokens = 0};
    struct kv_record_node got;
    uint8_t small[BUF];
    uint32_t bytes = kv_record_node_encode(&record, small);
    EXPECT(kv_record_node_decode(small, bytes, &got) == KV_OK);
    EXPECT(!got.has_parent);
    EXPECT_EQ_U32(got.page_count, 0);
    check_damage(decode_node, small, bytes);

    const uint32_t pages = KV_PAGES_PER_SESSION_MAX;
    uint8_t *uids = malloc(8u * pages);
    uint8_t *buf = malloc(kv_record_node_max(pages));
    EXPECT(uids != NULL && buf != NULL);
    fill(uids, 8u * pages, 3);
    record.tokens = KV_PROMPT_TOKENS_MAX;
    record.page_count = pages;
    record.page_uids = uids;
    record.kernels = UINT64_MAX;
    record.has_maker = true;
    record.replay_count = KV_REPLAYS_MAX;
    for (uint32_t i = 0; i < KV_REPLAYS_MAX; i++)
        record.replays[i] = 1000 * (i + 1);
    bytes = kv_record_node_encode(&record, buf);
    EXPECT_EQ_U32(bytes, kv_record_node_max(pages));
    EXPECT(kv_record_node_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_MEM(got.page_uids, uids, 8u * pages);
    free(uids);
    free(buf);
}

/* A value one element longer than allowed, consistent in every other way: `insert` bytes put in at
 * `at`, the count byte at `count_at` raised, a new checksum. */
static void check_one_too_many(decode_fn *decode, const uint8_t *value, uint32_t bytes, uint32_t at,
                               const void *insert, uint32_t insert_bytes, uint32_t count_at)
{
    uint8_t longer[BUF];
    const uint32_t longer_bytes = bytes + insert_bytes;
    EXPECT(decode(value, bytes) == KV_OK);
    EXPECT(longer_bytes <= sizeof(longer));
    memcpy(longer, value, at);
    memcpy(longer + at, insert, insert_bytes);
    memcpy(longer + at + insert_bytes, value + at, bytes - at);
    longer[count_at]++;
    kv_store32(longer + longer_bytes - 4, kv_checksum(longer, longer_bytes - 4));
    EXPECT(decode(longer, longer_bytes) == KV_CORRUPT);
}

static void test_one_too_many(void)
{
    struct kv_record_user user = {.name = {0}};
    struct kv_record_session session = {.name = {0}};
    struct kv_record_node node = {.tokens = 1000, .replay_count = KV_REPLAYS_MAX};
    uint8_t buf[BUF];

    memset(user.name, 'u', KV_USER_NAME_MAX);
    uint32_t bytes = kv_record_user_encode(&user, buf);
    check_one_too_many(decode_user, buf, bytes, 34, "u", 1, 33);

    memset(session.name, 's', KV_SESSION_NAME_MAX);
    memset(session.parent_name, 'p', KV_SESSION_NAME_MAX);
    bytes = kv_record_session_encode(&session, buf);
    check_one_too_many(decode_session, buf, bytes, 69, "s", 1, 67);
    check_one_too_many(decode_session, buf, bytes, bytes - 4, "p", 1, 68);

    for (uint32_t i = 0; i < KV_REPLAYS_MAX; i++)
        node.replays[i] = i + 1;
    const uint8_t replay[4] = {KV_REPLAYS_MAX + 1};
    bytes = kv_record_node_encode(&node, buf);
    check_one_too_many(decode_node, buf, bytes, bytes - 4, replay, 4, 95);
}

/* A name of no bytes, in a value of the right length. */
static void test_empty_name(void)
{
    const struct kv_record_user user = {.name = "u"};
    uint8_t buf[KV_RECORD_USER_MAX];
    const uint32_t bytes = kv_record_user_encode(&user, buf) - 1;
    buf[33] = 0;
    kv_store32(buf + bytes - 4, kv_checksum(buf, bytes - 4));
    EXPECT(decode_user(buf, bytes) == KV_CORRUPT);
}

static void test_page(void)
{
    const struct kv_record_page record = {
        .uid = 77,
        .ssd_page = 0xfffffffe,
        .generation = 0x100000002,
        .position = KV_PROMPT_TOKENS_MAX - 128,
        .count = 128,
        .tag = 0xdeadbeefcafe,
    };
    struct kv_record_page got;
    uint8_t buf[KV_RECORD_PAGE_MAX];

    const uint32_t bytes = kv_record_page_encode(&record, buf);
    EXPECT_EQ_U32(bytes, 41);
    EXPECT(kv_record_page_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_U64(got.uid, 77);
    EXPECT_EQ_U32(got.ssd_page, 0xfffffffe);
    EXPECT_EQ_U64(got.generation, 0x100000002);
    EXPECT_EQ_U32(got.position, KV_PROMPT_TOKENS_MAX - 128);
    EXPECT_EQ_U32(got.count, 128);
    EXPECT_EQ_U64(got.tag, 0xdeadbeefcafe);
    check_damage(decode_page, buf, bytes);
    check_refused(decode_page, buf, bytes, 21, 130, 4);
    check_refused(decode_page, buf, bytes, 21, KV_PROMPT_TOKENS_MAX, 4);
    check_refused(decode_page, buf, bytes, 25, 0, 4);
    check_refused(decode_page, buf, bytes, 25, 129, 4);
}

static void test_segment(void)
{
    const uint8_t bits[2] = {0x81, 0x02};
    const struct kv_record_segment record = {
        .state = KV_SEGMENT_SEALED, .used_ms = 0x1122334455, .pages = 12, .bits = bits};
    struct kv_record_segment got;
    uint8_t buf[BUF];

    const uint32_t bytes = kv_record_segment_encode(&record, buf);
    EXPECT_EQ_U32(bytes, kv_record_segment_bytes(12));
    EXPECT_EQ_U32(bytes, 20);
    EXPECT(kv_record_segment_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_U32(got.state, KV_SEGMENT_SEALED);
    EXPECT_EQ_U64(got.used_ms, 0x1122334455);
    EXPECT_EQ_U32(got.pages, 12);
    EXPECT_EQ_MEM(got.bits, bits, 2);
    check_damage(decode_segment, buf, bytes);
    check_refused(decode_segment, buf, bytes, 0, 2, 1);
    check_refused(decode_segment, buf, bytes, 1, 0, 1);
    check_refused(decode_segment, buf, bytes, 1, 3, 1);
    check_refused(decode_segment, buf, bytes, 10, 0, 4);
    check_refused(decode_segment, buf, bytes, 10, 8, 4);  /* A byte more than 8 pages need. */
    check_refused(decode_segment, buf, bytes, 10, 17, 4); /* A byte less. */
    check_refused(decode_segment, buf, bytes, 10, 9, 4);  /* Page 9 is behind the last. */
    check_refused(decode_segment, buf, bytes, 10, UINT32_MAX, 4);

    EXPECT_EQ_U32(kv_record_segment_bits(8), 1);
    EXPECT_EQ_U32(kv_record_segment_bits(9), 2);
    EXPECT_EQ_U32(kv_record_doubt_encode(buf), KV_RECORD_DOUBT_BYTES);
}

static void test_segment_keys(void)
{
    uint8_t key[KV_RECORD_KEY_MAX], other[KV_RECORD_KEY_MAX];
    uint32_t number = 0;
    EXPECT_EQ_U32(kv_key_doubt(key), 1);
    EXPECT_EQ_U32(key[0], 'G');
    EXPECT(!kv_key_segment_parse(key, 1, &number));
    EXPECT_EQ_U32(kv_key_segment(0x01020304, key), 5);
    EXPECT_EQ_MEM(key, "G\1\2\3\4", 5);
    EXPECT(kv_key_segment_parse(key, 5, &number));
    EXPECT_EQ_U32(number, 0x01020304);
    EXPECT(!kv_key_segment_parse(key, 4, &number));
    key[0] = 'S';
    EXPECT(!kv_key_segment_parse(key, 5, &number));
    (void)kv_key_segment(255, key);
    (void)kv_key_segment(256, other);
    EXPECT(memcmp(key, other, 5) < 0);
}

static void test_keys(void)
{
    struct kv_user_id user;
    struct kv_session_id session;
    struct kv_checkpoint_id id;
    uint8_t key[KV_RECORD_KEY_MAX];
    uint8_t other[KV_RECORD_KEY_MAX];

    fill(user.bytes, 16, 0x20);
    fill(session.bytes, 16, 0x40);
    fill(id.bytes, 16, 0x60);
    EXPECT_EQ_U32(kv_key_store(key), 1);
    EXPECT_EQ_U32(key[0], 'M');
    EXPECT_EQ_U32(kv_key_user(&user, key), 17);
    EXPECT(key[0] == 'U' && memcmp(key + 1, user.bytes, 16) == 0);
    EXPECT_EQ_U32(kv_key_session(&session, key), 17);
    EXPECT(key[0] == 'S' && memcmp(key + 1, session.bytes, 16) == 0);

    EXPECT_EQ_U32(kv_key_tree(&session, other), 17);
    EXPECT_EQ_U32(kv_key_node(&session, &id, key), 34);
    EXPECT_EQ_MEM(key, other, 17); /* The tree's key is a prefix of its nodes and pages. */
    EXPECT(key[17] == 'N' && memcmp(key + 18, id.bytes, 16) == 0);
    EXPECT_EQ_U32(kv_key_page(&session, 0x0102030405060708, key), 26);
    EXPECT_EQ_MEM(key, other, 17);
    EXPECT_EQ_MEM(key + 17, "P\1\2\3\4\5\6\7\10", 9);

    /* Keys of pages sort as their uids. */
    for (uint64_t uid = 1; uid < (1ull << 60); uid *= 3) {
        (void)kv_key_page(&session, uid, key);
        (void)kv_key_page(&session, uid + 1, other);
        EXPECT(memcmp(key, other, 26) < 0);
    }
}

int main(void)
{
    test_store();
    test_commit();
    test_clock();
    test_user();
    test_user_sealed();
    test_session();
    test_session_smallest_and_largest();
    test_session_of_another_tree();
    test_node_of_another_maker();
    test_node();
    test_kernel_names();
    test_node_smallest_and_largest();
    test_one_too_many();
    test_empty_name();
    test_page();
    test_segment();
    test_segment_keys();
    test_keys();
    HARNESS_END();
}
