/*
 * Any bytes as the message of any method, in pieces of any size.
 *
 * What is refused has a reason with a gRPC status, and its details can be packed.  What is accepted
 * keeps every promise the shard relies on: names, ids, counts, levels and tokens within their
 * limits.  The way a message is cut into pieces changes nothing.  The first input byte chooses the
 * method, the second how the rest is cut.
 */

#include "tests/fuzz/fuzz_main.h"

#include "admin.pb-c.h"
#include "cached/rpc/rpc_decode.h"
#include "cached/rpc/rpc_encode.h"
#include "kvstore/base/bytes.h"
#include "session.pb-c.h"

enum { VOCAB = 512, PIECES_MAX = 64, ARENA_MAX = 1 << 20, NAMED_SEEDS = 10 };

#define NAME_BYTES "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"

static void check_tokens(const struct request_tokens *tokens, uint32_t count_min)
{
    EXPECT(tokens->count >= count_min);
    EXPECT(tokens->count <= KV_PROMPT_TOKENS_MAX);
    for (uint32_t i = 0; i < tokens->count; i++)
        EXPECT(tokens->ids[i] < VOCAB);
}

static void check_name(const char *name)
{
    EXPECT(name != NULL);
    EXPECT(strlen(name) >= 1 && strlen(name) <= KV_SESSION_NAME_MAX);
    EXPECT(strspn(name, NAME_BYTES) == strlen(name));
}

static void check_decode(const struct request_in *in)
{
    EXPECT(in->u.decode.max_tokens >= 1 && in->u.decode.max_tokens <= KV_DECODE_TOKENS_MAX);
    EXPECT(in->u.decode.temperature >= 0.0f && in->u.decode.temperature <= 10.0f);
    EXPECT(in->u.decode.top_p > 0.0f && in->u.decode.top_p <= 1.0f);
    EXPECT(in->u.decode.forced.count <= in->u.decode.max_tokens);
    EXPECT(in->u.decode.stop_count <= 16);
    EXPECT(in->u.decode.from_position <= KV_PROMPT_TOKENS_MAX);
    for (uint32_t i = 0; i < in->u.decode.stop_count; i++)
        EXPECT(in->u.decode.stop_tokens[i] < VOCAB);
    check_tokens(&in->u.decode.forced, 0);
}

static void check_prefill(const struct request_in *in)
{
    check_tokens(&in->u.prefill.tokens, 1);
    EXPECT(in->u.prefill.anchor_count <= KV_ANCHORS_MAX);
    EXPECT(in->u.prefill.stable_tokens <= KV_PROMPT_TOKENS_MAX);
    uint32_t before = 0;
    for (uint32_t i = 0; i < in->u.prefill.anchor_count; i++) {
        EXPECT(in->u.prefill.anchors[i] > before);
        before = in->u.prefill.anchors[i];
        EXPECT(before <= KV_PROMPT_TOKENS_MAX);
    }
}

static void check_accepted(const struct request *req)
{
    const struct request_in *in = &req->in;
    EXPECT(in->level <= LEVEL_SSD);
    if (req->method < REQUEST_LIST_SESSIONS || req->method == REQUEST_GET_SESSION ||
        req->method == REQUEST_DELETE_SESSION)
        check_name(in->session_name);
    if (req->method == REQUEST_LOOKUP) check_tokens(&in->u.lookup.tokens, 1);
    if (req->method == REQUEST_PREFILL) check_prefill(in);
    if (req->method == REQUEST_DECODE) check_decode(in);
    if (req->method == REQUEST_OPEN_SESSION) {
        EXPECT(in->u.open.kind >= 1 && in->u.open.kind <= 3);
        EXPECT((in->u.open.kind == 2) == (in->u.open.parent_name != NULL));
        if (in->u.open.parent_name != NULL) check_name(in->u.open.parent_name);
    }
    if (in->request_id != NULL) {
        EXPECT(strlen(in->request_id) >= 1 && strlen(in->request_id) <= KV_REQUEST_ID_MAX);
        EXPECT(in->field_count <= KV_REQUEST_FIELDS_MAX);
        for (uint32_t i = 0; i < in->field_count; i++)
            EXPECT(in->fields[i].name != NULL);
    }
    if (req->method == REQUEST_COMPACT)
        EXPECT(in->u.compact.keep_ms >= 1 && in->u.compact.keep_ms <= KV_TTL_MS_MAX);
    if (req->method == REQUEST_PIN) EXPECT(in->u.node.ttl_ms <= KV_PIN_MS_MAX);
    if (req->method == REQUEST_DISK_USAGE && in->u.usage.has_user)
        EXPECT(strlen(in->u.usage.user_name) <= KV_USER_NAME_MAX);
    if (req->method == REQUEST_SCRUB) {
        const uint64_t rate_bytes = in->u.scrub.rate_bytes;
        EXPECT(in->u.scrub.action >= SCRUB_STATUS && in->u.scrub.action <= SCRUB_RELEASE);
        EXPECT(rate_bytes == 0 ||
               (in->u.scrub.action == SCRUB_START && rate_bytes >= KV_SCRUB_RATE_MIN &&
                rate_bytes <= KV_SCRUB_RATE_MAX));
    }
    if (req->method == REQUEST_WHY) EXPECT(in->u.why.position < KV_PROMPT_TOKENS_MAX);
    if (req->method == REQUEST_SET_QUOTA || req->method == REQUEST_SET_PLAN) {
        EXPECT((in->u.quota.set & in->u.quota.unset) == 0);
        for (unsigned i = 0; i < KV_QUOTA_COUNT; i++)
            EXPECT((in->u.quota.set & 1u << i) == 0 ||
                   kv_quota_is_valid((enum kv_quota_kind)i, in->u.quota.limits[i]));
    }
    if (req->method == REQUEST_CHECKPOINT)
        EXPECT(in->u.checkpoint.kind >= KIND_PREFILL_END && in->u.checkpoint.kind <= KIND_MANUAL);
    if (req->method == REQUEST_WAIT_DURABLE)
        EXPECT(in->level == LEVEL_RAM || in->level == LEVEL_SSD);
    if (req->method == REQUEST_LIST_SESSIONS)
        EXPECT(in->u.list.page_size >= 1 && in->u.list.page_size <= KV_LIST_PAGE_MAX);
    if (req->method == REQUEST_ADVANCE_CLOCK)
        EXPECT(in->u.advance.ms >= 1 && in->u.advance.ms <= 365ull * 24 * 3600 * 1000);
}

static const struct rpc_about about = {
    .version = "v", .commit = "c", .vocab_tokens = VOCAB, .context_tokens = KV_PROMPT_TOKENS_MAX};

/* An empty answer to what was accepted, and the details of what was not, can be packed. */
static void check_answer(struct request *req)
{
    struct rpc_snapshot snapshot = {0};
    if (req->out.failure.failed) {
        EXPECT(kv_reason_info(req->out.failure.reason)->grpc_code != 0);
        EXPECT(req->out.failure.text != NULL);
        EXPECT(rpc_encode_failure(req).count > 0);
        return;
    }
    req->out.stats = kv_arena_alloc(req->arena, sizeof(*req->out.stats));
    req->out.scrub = kv_arena_alloc(req->arena, sizeof(*req->out.scrub));
    req->out.usage = kv_arena_alloc(req->arena, sizeof(*req->out.usage));
    req->out.why = kv_arena_alloc(req->arena, sizeof(*req->out.why));
    req->out.purge = kv_arena_alloc(req->arena, sizeof(*req->out.purge));
    EXPECT(req->out.stats != NULL && req->out.scrub != NULL && req->out.usage != NULL);
    req->out.quota = kv_arena_alloc(req->arena, sizeof(*req->out.quota));
    EXPECT(req->out.why != NULL && req->out.purge != NULL && req->out.quota != NULL);
    const ProtobufCMessage *message = rpc_encode(req, &about, &snapshot);
    EXPECT(message != NULL);
    EXPECT(protobuf_c_message_get_packed_size(message) < 4096);
}

static bool try(struct request *req, enum request_method method, const uint8_t *data, size_t bytes,
                size_t step)
{
    struct kv_bytes pieces[PIECES_MAX];
    uint32_t count = 0;
    for (size_t at = 0; at < bytes; count++) {
        const size_t size = count + 1 == PIECES_MAX ? bytes - at : KV_MIN(step, bytes - at);
        pieces[count] = (struct kv_bytes){data + at, size};
        at += size;
    }
    *req = (struct request){.method = method, .arena = kv_arena_create(ARENA_MAX)};
    EXPECT(req->arena != NULL);
    const bool ok = rpc_decode(req, (struct rpc_pieces){pieces, count}, &about);
    EXPECT(ok != req->out.failure.failed);
    if (ok) check_accepted(req);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct request whole;
    struct request cut;
    if (bytes < 2) return 0;
    const enum request_method method = data[0] % REQUEST_METHOD_COUNT;

    const bool ok = try(&whole, method, data + 2, bytes - 2, SIZE_MAX);
    EXPECT(try(&cut, method, data + 2, bytes - 2, 1u + data[1] % 32) == ok);
    EXPECT(whole.out.failure.reason == cut.out.failure.reason);
    /* The same call, however it arrived. */
    EXPECT_EQ_U32(whole.in.field_count, cut.in.field_count);
    for (uint32_t i = 0; i < whole.in.field_count; i++)
        EXPECT_EQ_U64(whole.in.fields[i].value, cut.in.fields[i].value);
    if (ok && method == REQUEST_PREFILL) {
        EXPECT_EQ_U32(cut.in.u.prefill.tokens.count, whole.in.u.prefill.tokens.count);
        EXPECT_EQ_MEM(cut.in.u.prefill.tokens.ids, whole.in.u.prefill.tokens.ids,
                      4ul * whole.in.u.prefill.tokens.count);
    }
    check_answer(&whole);
    kv_arena_destroy(whole.arena);
    kv_arena_destroy(cut.arena);
    return 0;
}

static size_t seed(enum request_method method, const ProtobufCMessage *message, uint8_t *buf,
                   size_t bytes_max)
{
    EXPECT(protobuf_c_message_get_packed_size(message) + 2 <= bytes_max);
    buf[0] = (uint8_t)method;
    buf[1] = 6;
    return 2 + protobuf_c_message_pack(message, buf + 2);
}

static size_t seed_prefill(uint8_t *buf, size_t bytes_max)
{
    static uint8_t ids[] = {1, 0, 0, 0, 2, 1, 0, 0, 255, 1, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0};
    static uint8_t parent[16] = {1, 2, 3};
    static uint32_t anchors[] = {1, 2, 4};
    Cached__Session__V1__PrefillRequest m = CACHED__SESSION__V1__PREFILL_REQUEST__INIT;
    m.session_id = (char *)"session-1";
    m.tokens = (ProtobufCBinaryData){sizeof(ids), ids};
    m.parent_checkpoint_id = (ProtobufCBinaryData){sizeof(parent), parent};
    m.stable_tokens = 5;
    m.anchors = anchors;
    m.n_anchors = 3;
    m.level = CACHED__SESSION__V1__LEVEL__LEVEL_SSD;
    m.request_id = (char *)"request-1";
    m.epoch = 3;
    return seed(REQUEST_PREFILL, &m.base, buf, bytes_max);
}

static size_t seed_decode(uint8_t *buf, size_t bytes_max)
{
    static uint8_t ids[] = {1, 0, 0, 0, 2, 1, 0, 0};
    static uint32_t stops[] = {5, 6};
    Cached__Session__V1__DecodeRequest m = CACHED__SESSION__V1__DECODE_REQUEST__INIT;
    m.session_id = (char *)"session-1";
    m.max_tokens = 100;
    m.temperature = 0.7f;
    m.top_p = 0.9f;
    m.top_k = 40;
    m.seed = 12345678901ull;
    m.forced_tokens = (ProtobufCBinaryData){sizeof(ids), ids};
    m.stop_tokens = stops;
    m.n_stop_tokens = 2;
    m.from_position = 17;
    m.request_id = (char *)"request-2";
    return seed(REQUEST_DECODE, &m.base, buf, bytes_max);
}

static size_t seed_named(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static uint8_t id[16] = {9, 8, 7};
    Cached__Session__V1__OpenSessionRequest open = CACHED__SESSION__V1__OPEN_SESSION_REQUEST__INIT;
    Cached__Session__V1__CheckpointRequest check = CACHED__SESSION__V1__CHECKPOINT_REQUEST__INIT;
    Cached__Session__V1__WaitDurableRequest wait = CACHED__SESSION__V1__WAIT_DURABLE_REQUEST__INIT;
    Cached__Session__V1__RollbackRequest roll = CACHED__SESSION__V1__ROLLBACK_REQUEST__INIT;
    Cached__Session__V1__ListSessionsRequest list =
        CACHED__SESSION__V1__LIST_SESSIONS_REQUEST__INIT;
    Cached__Admin__V1__AdvanceClockRequest clock = CACHED__ADMIN__V1__ADVANCE_CLOCK_REQUEST__INIT;
    Cached__Session__V1__ForkRequest fork = CACHED__SESSION__V1__FORK_REQUEST__INIT;
    fork.session_id = (char *)"s";
    fork.new_session_id = (char *)"f";
    fork.checkpoint_id = (ProtobufCBinaryData){sizeof(id), id};
    fork.kind = CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_EPHEMERAL;
    fork.ttl_ms = 1000;
    open.session_id = check.session_id = wait.session_id = roll.session_id = (char *)"s";
    open.kind = CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_SUB;
    open.parent_session_id = (char *)"p";
    open.ttl_ms = 1000;
    check.kind = CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_ANCHOR;
    wait.checkpoint_id = roll.checkpoint_id = (ProtobufCBinaryData){sizeof(id), id};
    wait.level = CACHED__SESSION__V1__LEVEL__LEVEL_RAM;
    list.page_size = 10;
    list.page_token = (char *)"00112233445566778899aabbccddeeff";
    clock.ms = 5;
    const struct {
        enum request_method method;
        const ProtobufCMessage *message;
    } all[] = {
        {REQUEST_OPEN_SESSION, &open.base},  {REQUEST_CHECKPOINT, &check.base},
        {REQUEST_WAIT_DURABLE, &wait.base},  {REQUEST_ROLLBACK, &roll.base},
        {REQUEST_LIST_SESSIONS, &list.base}, {REQUEST_ADVANCE_CLOCK, &clock.base},
        {REQUEST_CLOSE_SESSION, &open.base}, {REQUEST_GET_SESSION, &open.base},
        {REQUEST_GET_STATS, &clock.base},    {REQUEST_FORK, &fork.base},
    };
    _Static_assert(KV_ARRAY_COUNT(all) == NAMED_SEEDS, "the rest begins behind them");
    return seed(all[index].method, all[index].message, buf, bytes_max);
}

static size_t seed_ops(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    Cached__Session__V1__DeleteSessionRequest drop =
        CACHED__SESSION__V1__DELETE_SESSION_REQUEST__INIT;
    Cached__Admin__V1__EraseUserRequest erase = CACHED__ADMIN__V1__ERASE_USER_REQUEST__INIT;
    Cached__Admin__V1__RotateKeyRequest rotate = CACHED__ADMIN__V1__ROTATE_KEY_REQUEST__INIT;
    Cached__Admin__V1__ScrubRequest scrub = CACHED__ADMIN__V1__SCRUB_REQUEST__INIT;
    Cached__Admin__V1__DiskUsageRequest usage = CACHED__ADMIN__V1__DISK_USAGE_REQUEST__INIT;
    Cached__Admin__V1__WhyRequest why = CACHED__ADMIN__V1__WHY_REQUEST__INIT;
    Cached__Admin__V1__PurgeModelRequest purge = CACHED__ADMIN__V1__PURGE_MODEL_REQUEST__INIT;
    Cached__Admin__V1__SetQuotaRequest quota = CACHED__ADMIN__V1__SET_QUOTA_REQUEST__INIT;
    Cached__Admin__V1__SetPlanRequest plan = CACHED__ADMIN__V1__SET_PLAN_REQUEST__INIT;
    Cached__Admin__V1__ListUsersRequest users = CACHED__ADMIN__V1__LIST_USERS_REQUEST__INIT;
    Cached__Admin__V1__SetLimit limit = CACHED__ADMIN__V1__SET_LIMIT__INIT;
    Cached__Admin__V1__SetLimit *limits[1] = {&limit};
    why.user = quota.user = (char *)"alice";
    why.session_id = (char *)"s";
    why.has_position = true;
    purge.model = (char *)"0123456789abcdef";
    limit.name = (char *)"turns";
    limit.limit = 5;
    plan.name = quota.plan = (char *)"small";
    plan.limits = quota.limits = limits;
    plan.n_limits = quota.n_limits = 1;
    users.page_size = 5;
    static uint8_t id[16] = {1, 2};
    Cached__Session__V1__CompactRequest compact = CACHED__SESSION__V1__COMPACT_REQUEST__INIT;
    Cached__Session__V1__PinRequest pin = CACHED__SESSION__V1__PIN_REQUEST__INIT;
    Cached__Session__V1__TouchRequest touch = CACHED__SESSION__V1__TOUCH_REQUEST__INIT;
    drop.session_id = compact.session_id = pin.session_id = touch.session_id = (char *)"s";
    compact.keep_old_for_ms = 60000;
    compact.request_id = drop.request_id = (char *)"r";
    pin.checkpoint_id = touch.checkpoint_id = (ProtobufCBinaryData){sizeof(id), id};
    pin.ttl_ms = 600000;
    drop.dry_run = true;
    erase.user = usage.user = (char *)"alice";
    scrub.action = CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_START;
    scrub.rate_bytes = 1 << 20;
    usage.page_token = (char *)"00112233445566778899aabbccddeeff";
    const struct {
        enum request_method method;
        const ProtobufCMessage *message;
    } all[] = {
        {REQUEST_DELETE_SESSION, &drop.base},
        {REQUEST_COMPACT, &compact.base},
        {REQUEST_PIN, &pin.base},
        {REQUEST_TOUCH, &touch.base},
        {REQUEST_ERASE_USER, &erase.base},
        {REQUEST_SCRUB, &scrub.base},
        {REQUEST_ROTATE_KEY, &rotate.base},
        {REQUEST_DISK_USAGE, &usage.base},
        {REQUEST_WHY, &why.base},
        {REQUEST_PURGE_MODEL, &purge.base},
        {REQUEST_SET_QUOTA, &quota.base},
        {REQUEST_GET_QUOTA, &why.base},
        {REQUEST_SET_PLAN, &plan.base},
        {REQUEST_LIST_USERS, &users.base},
    };
    if (index >= KV_ARRAY_COUNT(all)) return 0;
    return seed(all[index].method, all[index].message, buf, bytes_max);
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    if (index == 0) return seed_prefill(buf, bytes_max);
    if (index == 1) return seed_decode(buf, bytes_max);
    if (index == 2) { /* Lookup has the fields of a Prefill without the rest. */
        const size_t bytes = seed_prefill(buf, bytes_max);
        buf[0] = REQUEST_LOOKUP;
        return bytes;
    }
    if (index < 3 + NAMED_SEEDS) return seed_named(index - 3, buf, bytes_max);
    return seed_ops(index - 3 - NAMED_SEEDS, buf, bytes_max);
}
