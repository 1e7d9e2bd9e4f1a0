/*
 * Any bytes as a manifest record: never read beyond the value, and what is accepted is exactly what
 * the encoder writes for it.  Input: one byte for the type, then the value.  Each value is tried as
 * it is and with its checksum made right, so that the checksum does not hide the rest.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/manifest_record.h"

enum {
    TYPE_STORE,
    TYPE_COMMIT,
    TYPE_USER,
    TYPE_SESSION,
    TYPE_NODE,
    TYPE_SEGMENT,
    TYPE_PAGE,
    TYPE_CLOCK,
    TYPE_COUNT
};

/* Decodes; on success encodes again into *ret_buf (caller frees) and returns the length, else 0. */
static uint32_t round_trip(uint32_t type, const uint8_t *value, uint32_t bytes, uint8_t **ret_buf)
{
    struct kv_record_store store;
    struct kv_record_commit commit;
    struct kv_record_clock clock;
    struct kv_record_user user;
    struct kv_record_session session;
    struct kv_record_node node;
    struct kv_record_segment segment;
    struct kv_record_page page;
    uint8_t *buf = malloc(KV_MAX(kv_record_node_max(KV_PAGES_PER_SESSION_MAX), bytes));
    EXPECT(buf != NULL);
    *ret_buf = buf;

    switch (type) {
    case TYPE_STORE:
        if (kv_record_store_decode(value, bytes, &store) != KV_OK) return 0;
        return kv_record_store_encode(&store, buf);
    case TYPE_COMMIT:
        if (kv_record_commit_decode(value, bytes, &commit) != KV_OK) return 0;
        return kv_record_commit_encode(&commit, buf);
    case TYPE_CLOCK:
        if (kv_record_clock_decode(value, bytes, &clock) != KV_OK) return 0;
        return kv_record_clock_encode(&clock, buf);
    case TYPE_USER:
        if (kv_record_user_decode(value, bytes, &user) != KV_OK) return 0;
        return kv_record_user_encode(&user, buf);
    case TYPE_SESSION:
        if (kv_record_session_decode(value, bytes, &session) != KV_OK) return 0;
        return kv_record_session_encode(&session, buf);
    case TYPE_NODE:
        if (kv_record_node_decode(value, bytes, &node) != KV_OK) return 0;
        return kv_record_node_encode(&node, buf);
    case TYPE_SEGMENT:
        if (kv_record_segment_decode(value, bytes, &segment) != KV_OK) return 0;
        return kv_record_segment_encode(&segment, buf);
    default:
        if (kv_record_page_decode(value, bytes, &page) != KV_OK) return 0;
        return kv_record_page_encode(&page, buf);
    }
}

static void check(uint32_t type, const uint8_t *value, uint32_t bytes)
{
    uint8_t *buf = NULL;
    const uint32_t encoded = round_trip(type, value, bytes, &buf);
    if (encoded > 0) {
        EXPECT_EQ_U32(encoded, bytes);
        EXPECT_EQ_MEM(buf, value, bytes);
    }
    free(buf);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 1) return 0;
    const uint32_t type = data[0] % TYPE_COUNT;
    const uint32_t value_bytes = (uint32_t)bytes - 1;
    check(type, data + 1, value_bytes);
    if (value_bytes < 4) return 0;

    uint8_t *repaired = malloc(value_bytes);
    EXPECT(repaired != NULL);
    memcpy(repaired, data + 1, value_bytes);
    kv_store32(repaired + value_bytes - 4, kv_checksum(repaired, value_bytes - 4));
    check(type, repaired, value_bytes);
    free(repaired);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static const uint8_t uids[16] = {1, 2, 3};
    const struct kv_record_store store = {.directory = {{1, 2}}, .model = {{3}}, .boots = 3};
    const struct kv_record_commit commit = {.number = 0x0102030405060708u};
    const struct kv_record_clock clock = {.floor_ms = 0x0102030405060708u, .before_ms = 7};
    const struct kv_record_user user = {.name = "alice", .salt = {7}};
    const struct kv_record_session session = {
        .kind = 1, .epoch = 2, .has_head = true, .name = "s.1", .parent_name = "p"};
    const struct kv_record_node node = {
        .has_parent = true,
        .tokens = 200,
        .replays = {130, 160},
        .replay_count = 2,
        .page_count = 2,
        .kernels = 0x32337066,
        .page_uids = uids,
    };
    const struct kv_record_segment segment = {
        .state = KV_SEGMENT_SEALED, .used_ms = 7, .pages = 12, .bits = (const uint8_t[2]){5, 8}};
    const struct kv_record_page page = {.uid = 1, .position = 128, .count = 72};

    struct kv_record_session forked;
    struct kv_record_node made;

    (void)bytes_max;
    buf[0] = (uint8_t)index;
    switch (index) {
    case TYPE_STORE:
        return 1 + kv_record_store_encode(&store, buf + 1);
    case TYPE_COMMIT:
        return 1 + kv_record_commit_encode(&commit, buf + 1);
    case TYPE_CLOCK:
        return 1 + kv_record_clock_encode(&clock, buf + 1);
    case TYPE_USER:
        return 1 + kv_record_user_encode(&user, buf + 1);
    case TYPE_SESSION:
        return 1 + kv_record_session_encode(&session, buf + 1);
    case TYPE_NODE:
        return 1 + kv_record_node_encode(&node, buf + 1);
    case TYPE_SEGMENT:
        return 1 + kv_record_segment_encode(&segment, buf + 1);
    case TYPE_PAGE:
        return 1 + kv_record_page_encode(&page, buf + 1);
    case TYPE_COUNT: /* Of a forked tree. */
        forked = session;
        forked.has_tree = forked.has_origin = true;
        forked.origin_tokens = 200;
        buf[0] = TYPE_SESSION;
        return 1 + kv_record_session_encode(&forked, buf + 1);
    case TYPE_COUNT + 1:
        made = node;
        made.has_maker = true;
        buf[0] = TYPE_NODE;
        return 1 + kv_record_node_encode(&made, buf + 1);
    default:
        return 0;
    }
}
