/*
 * The door: nothing gets past this file unchecked.
 *
 * Each method has one function that unpacks its message and checks its fields in the order of the
 * .proto file.  The first field that is wrong ends the call with that field's own reason, its limit
 * and the value found; nothing is corrected silently.  What only the session's state can tell
 * (a position beyond a parent checkpoint, an epoch) is left to the shard.
 */

#include "cached/rpc/rpc_decode.h"

#include "admin.pb-c.h"
#include "cached/rpc/rpc_request_id.h"
#include "kvstore/base/bytes.h"
#include "session.pb-c.h"

#include <assert.h>
#include <stdio.h>

#define TEMPERATURE_MAX 10.0f
#define LIST_PAGE_DEFAULT 100u

typedef Cached__Session__V1__PrefillRequest pb_prefill;
typedef Cached__Session__V1__DecodeRequest pb_decode;

struct decoder {
    struct request *req;
    uint32_t vocab_tokens, context_tokens;
    ProtobufCAllocator allocator;
    const uint8_t *rest;
    struct rpc_split split;
    const ProtobufCMessage *message;
};

static void *alloc_in_arena(void *context, size_t bytes)
{
    return kv_arena_alloc(context, bytes);
}

static void free_with_arena(void *context, void *memory)
{
    (void)context;
    (void)memory;
}

static bool malformed(struct request *req)
{
    request_fail(req, KV_REASON_MESSAGE_MALFORMED, "message", NULL, NULL, NULL);
    return false;
}

static bool split(struct decoder *d, struct rpc_pieces pieces, uint32_t field)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < pieces.count; i++)
        total += pieces.items[i].count;
    const size_t room = (size_t)KV_MIN(total, KV_REST_BYTES_MAX);
    uint8_t *rest = kv_arena_alloc(d->req->arena, room);
    if (rest == NULL) return malformed(d->req);

    switch (rpc_wire_split(pieces, field, rest, room, &d->split)) {
    case KV_OK:
        d->rest = rest;
        return true;
    case KV_BUSY:
        request_fail(d->req, KV_REASON_MESSAGE_MALFORMED, "message",
                     request_u64(d->req, KV_REST_BYTES_MAX), request_u64(d->req, total),
                     "The message has more than %u bytes besides its token list.",
                     KV_REST_BYTES_MAX);
        return false;
    default:
        return malformed(d->req);
    }
}

/* The next varint of a message that rpc_wire_split() has found sound. */
static uint64_t next_varint(const uint8_t **at)
{
    uint64_t value = 0;
    unsigned shift = 0;
    do
        value |= (uint64_t)(**at & 0x7f) << shift, shift += 7;
    while ((*(*at)++ & 0x80) != 0);
    return value;
}

/* protobuf-c hands strings out as C strings: one with a NUL inside would silently be another. */
static const char *string_with_nul(const struct decoder *d, const ProtobufCMessageDescriptor *type)
{
    const uint8_t *at = d->rest;
    const uint8_t *end = at + d->split.rest_bytes;
    while (at < end) {
        const uint64_t key = next_varint(&at);
        if ((key & 7) == 0) (void)next_varint(&at);
        if ((key & 7) == 1) at += 8;
        if ((key & 7) == 5) at += 4;
        if ((key & 7) != 2) continue;
        const uint64_t bytes = next_varint(&at);
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field(type, (unsigned)(key >> 3));
        if (field != NULL && field->type == PROTOBUF_C_TYPE_STRING &&
            memchr(at, 0, (size_t)bytes) != NULL)
            return field->name;
        at += bytes;
    }
    return NULL;
}

static void *unpack(struct decoder *d, const ProtobufCMessageDescriptor *type)
{
    const char *field = string_with_nul(d, type);
    if (field != NULL) {
        request_fail(d->req, KV_REASON_MESSAGE_MALFORMED, field, "no NUL", NULL,
                     "The text field %s holds a NUL byte.", field);
        return NULL;
    }
    ProtobufCMessage *message =
        protobuf_c_message_unpack(type, &d->allocator, d->split.rest_bytes, d->rest);
    if (message == NULL) (void)malformed(d->req);
    d->message = message;
    return message;
}

static bool check_name(struct request *req, const char *field, const char *name)
{
    const size_t count = strlen(name);
    if (count < 1 || count > KV_SESSION_NAME_MAX) {
        request_fail(req, KV_REASON_SESSION_ID_INVALID, field, "1 to 128 bytes",
                     request_u64(req, count), NULL);
        return false;
    }
    const size_t good =
        strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-");
    if (good == count) return true;
    char text[48];
    const int used = snprintf(text, sizeof(text), "byte 0x%02x at %zu", (uint8_t)name[good], good);
    request_fail(req, KV_REASON_SESSION_ID_INVALID, field, "[A-Za-z0-9._:-]",
                 kv_arena_strdup(req->arena, text, (size_t)used), NULL);
    return false;
}

static bool take_session(struct request *req, const char *name)
{
    if (!check_name(req, "session_id", name)) return false;
    req->in.session_name = name;
    req->in.session = kv_session_id_of(&req->user, name);
    return true;
}

/* Numbers beyond what a field may hold, all alike. */
static bool check_max(struct request *req, enum kv_reason reason, const char *field, uint64_t value,
                      uint64_t max)
{
    if (value <= max) return true;
    request_fail(req, reason, field, request_u64(req, max), request_u64(req, value), NULL);
    return false;
}

static bool take_level(struct request *req, int level)
{
    if (level < 0 || level > LEVEL_SSD) {
        request_fail(req, KV_REASON_LEVEL_INVALID, "level", "0 to 3",
                     request_u64(req, (uint32_t)level), NULL);
        return false;
    }
    req->in.level = (enum request_level)level;
    return true;
}

static bool take_checkpoint_id(struct request *req, const char *field,
                               const ProtobufCBinaryData *data, struct kv_checkpoint_id *ret_id)
{
    if (data->len == sizeof(ret_id->bytes)) {
        memcpy(ret_id->bytes, data->data, sizeof(ret_id->bytes));
        return true;
    }
    request_fail(req, KV_REASON_CHECKPOINT_ID_INVALID, field, "16 bytes",
                 request_u64(req, data->len), NULL);
    return false;
}

static bool fail_token(struct decoder *d, const char *field, uint32_t index, uint32_t id)
{
    char text[48];
    const int used = snprintf(text, sizeof(text), "%s[%u]", field, index);
    request_fail(d->req, KV_REASON_TOKEN_OUT_OF_VOCAB,
                 kv_arena_strdup(d->req->arena, text, (size_t)used),
                 request_u64(d->req, d->vocab_tokens), request_u64(d->req, id), NULL);
    return false;
}

/* The list that split() took out: copied once, aligned, in host order, each id checked. */
static bool take_tokens(struct decoder *d, const char *field, struct request_tokens *ret_tokens)
{
    struct request *req = d->req;
    const uint64_t bytes = d->split.has_big ? d->split.big_bytes : 0;
    if (bytes % 4 != 0) {
        request_fail(req, KV_REASON_TOKENS_MALFORMED, field, "a multiple of 4 bytes",
                     request_u64(req, bytes), NULL);
        return false;
    }
    if (!check_max(req, KV_REASON_PROMPT_TOO_LONG, field, bytes / 4, d->context_tokens))
        return false;

    const uint32_t count = (uint32_t)(bytes / 4);
    uint32_t *ids = kv_arena_alloc(req->arena, (size_t)bytes);
    if (ids == NULL) {
        request_fail(req, KV_REASON_QUEUE_FULL, field, NULL, NULL, "No memory for the token list.");
        return false;
    }
    if (count > 0) {
        const bool read = rpc_cursor_read(&d->split.big, ids, bytes);
        assert(read); /* split() has checked the length. */
    }
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = kv_load32((const uint8_t *)&ids[i]);
        if (ids[i] >= d->vocab_tokens) return fail_token(d, field, i, ids[i]);
    }
    *ret_tokens = (struct request_tokens){.ids = ids, .count = count};
    return true;
}

static bool take_prompt(struct decoder *d, struct request_tokens *ret_tokens)
{
    if (!take_tokens(d, "tokens", ret_tokens)) return false;
    if (ret_tokens->count > 0) return true;
    request_fail(d->req, KV_REASON_TOKENS_EMPTY, "tokens", "1", "0", NULL);
    return false;
}

static bool decode_open(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__OpenSessionRequest *m =
        unpack(d, &cached__session__v1__open_session_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    if (!check_max(req, KV_REASON_SESSION_KIND_INVALID, "kind", (uint32_t)m->kind,
                   CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_EPHEMERAL))
        return false;

    const bool is_sub = m->kind == CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_SUB;
    const bool has_parent = m->parent_session_id[0] != '\0';
    if (is_sub != has_parent) {
        request_fail(req, KV_REASON_SESSION_KIND_INVALID, "parent_session_id",
                     is_sub ? "1 to 128 bytes" : "empty",
                     request_u64(req, strlen(m->parent_session_id)), NULL);
        return false;
    }
    if (has_parent && !check_name(req, "parent_session_id", m->parent_session_id)) return false;
    if (!check_max(req, KV_REASON_TTL_INVALID, "ttl_ms", m->ttl_ms, KV_TTL_MS_MAX)) return false;
    req->in.u.open.kind =
        m->kind == 0 ? CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_MAIN : (uint32_t)m->kind;
    req->in.u.open.parent_name = has_parent ? m->parent_session_id : NULL;
    req->in.u.open.ttl_ms = m->ttl_ms;
    return true;
}

static bool decode_lookup(struct decoder *d)
{
    const Cached__Session__V1__LookupRequest *m =
        unpack(d, &cached__session__v1__lookup_request__descriptor);
    return m != NULL && take_session(d->req, m->session_id) &&
           take_prompt(d, &d->req->in.u.lookup.tokens);
}

/* With a parent the prompt's length is known to the shard only; then positions are checked there.
 */
static bool take_stops(const struct decoder *d, const pb_prefill *m)
{
    struct request *req = d->req;
    const uint32_t end =
        m->parent_checkpoint_id.len > 0 ? d->context_tokens : req->in.u.prefill.tokens.count;
    if (!check_max(req, KV_REASON_STABLE_TOKENS_INVALID, "stable_tokens", m->stable_tokens, end))
        return false;
    req->in.u.prefill.stable_tokens = m->stable_tokens;
    if (!check_max(req, KV_REASON_ANCHORS_INVALID, "anchors", m->n_anchors, KV_ANCHORS_MAX))
        return false;

    uint32_t before = 0;
    for (uint32_t i = 0; i < m->n_anchors; i++) {
        if (m->anchors[i] <= before || m->anchors[i] > end) {
            request_fail(req, KV_REASON_ANCHORS_INVALID, "anchors", request_u64(req, end),
                         request_u64(req, m->anchors[i]), NULL);
            return false;
        }
        before = m->anchors[i];
        req->in.u.prefill.anchors[i] = before;
    }
    req->in.u.prefill.anchor_count = (uint32_t)m->n_anchors;
    return true;
}

static bool decode_prefill(struct decoder *d)
{
    struct request *req = d->req;
    const pb_prefill *m = unpack(d, &cached__session__v1__prefill_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    if (!take_prompt(d, &req->in.u.prefill.tokens)) return false;
    req->in.u.prefill.has_parent = m->parent_checkpoint_id.len > 0;
    if (req->in.u.prefill.has_parent &&
        !take_checkpoint_id(req, "parent_checkpoint_id", &m->parent_checkpoint_id,
                            &req->in.u.prefill.parent))
        return false;
    if (!take_stops(d, m) || !take_level(req, (int)m->level)) return false;
    req->in.u.prefill.no_checkpoint = m->no_checkpoint;
    req->in.u.prefill.exact = m->exact;
    req->in.epoch = m->epoch;
    return true;
}

static bool fail_sampling(struct request *req, const char *field, const char *limit, double value)
{
    char text[40];
    const int used = snprintf(text, sizeof(text), "%g", value);
    request_fail(req, KV_REASON_SAMPLING_INVALID, field, limit,
                 kv_arena_strdup(req->arena, text, (size_t)used), NULL);
    return false;
}

/* Written so that a NaN fails. */
static bool take_sampling(struct request *req, const pb_decode *m)
{
    if (!(m->temperature >= 0.0f && m->temperature <= TEMPERATURE_MAX))
        return fail_sampling(req, "temperature", "0 to 10", (double)m->temperature);
    if (!(m->top_p >= 0.0f && m->top_p <= 1.0f))
        return fail_sampling(req, "top_p", "0 to 1", (double)m->top_p);
    req->in.u.decode.temperature = m->temperature;
    req->in.u.decode.top_p = m->top_p > 0.0f ? m->top_p : 1.0f; /* 0 and 1 both mean off. */
    req->in.u.decode.top_k = m->top_k;
    req->in.u.decode.seed = m->seed;
    return true;
}

static bool take_stop_tokens(struct decoder *d, const pb_decode *m)
{
    struct request *req = d->req;
    if (!check_max(req, KV_REASON_STOP_TOKENS_INVALID, "stop_tokens", m->n_stop_tokens,
                   KV_STOP_TOKENS_MAX))
        return false;
    for (uint32_t i = 0; i < m->n_stop_tokens; i++) {
        if (m->stop_tokens[i] >= d->vocab_tokens) {
            request_fail(req, KV_REASON_STOP_TOKENS_INVALID, "stop_tokens",
                         request_u64(req, d->vocab_tokens), request_u64(req, m->stop_tokens[i]),
                         NULL);
            return false;
        }
        req->in.u.decode.stop_tokens[i] = m->stop_tokens[i];
    }
    req->in.u.decode.stop_count = (uint32_t)m->n_stop_tokens;
    return true;
}

static bool decode_decode(struct decoder *d)
{
    struct request *req = d->req;
    const pb_decode *m = unpack(d, &cached__session__v1__decode_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    if (m->max_tokens == 0 || m->max_tokens > KV_DECODE_TOKENS_MAX) {
        request_fail(req, KV_REASON_MAX_TOKENS_INVALID, "max_tokens", "1 to 65536",
                     request_u64(req, m->max_tokens), NULL);
        return false;
    }
    if (!take_sampling(req, m)) return false;
    if (!take_tokens(d, "forced_tokens", &req->in.u.decode.forced)) return false;
    if (!check_max(req, KV_REASON_MAX_TOKENS_INVALID, "forced_tokens",
                   req->in.u.decode.forced.count, m->max_tokens))
        return false;
    if (!take_stop_tokens(d, m) || !take_level(req, (int)m->level)) return false;
    if (!check_max(req, KV_REASON_FROM_POSITION_INVALID, "from_position", m->from_position,
                   d->context_tokens))
        return false;
    req->in.u.decode.max_tokens = m->max_tokens;
    req->in.u.decode.ignore_eos = m->ignore_eos;
    req->in.u.decode.no_checkpoint = m->no_checkpoint;
    req->in.u.decode.from_position = m->from_position;
    req->in.epoch = m->epoch;
    return true;
}

static bool decode_checkpoint(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__CheckpointRequest *m =
        unpack(d, &cached__session__v1__checkpoint_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    if (!check_max(req, KV_REASON_CHECKPOINT_KIND_INVALID, "kind", (uint32_t)m->kind, KIND_MANUAL))
        return false;
    req->in.u.checkpoint.kind = m->kind == 0 ? KIND_MANUAL : (enum request_kind)m->kind;
    req->in.epoch = m->epoch;
    return take_level(req, (int)m->level);
}

static bool decode_wait(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__WaitDurableRequest *m =
        unpack(d, &cached__session__v1__wait_durable_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    if (!take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.wait_durable.id))
        return false;
    if ((int)m->level != LEVEL_RAM && (int)m->level != LEVEL_SSD) {
        request_fail(req, KV_REASON_LEVEL_INVALID, "level", "2 to 3",
                     request_u64(req, (uint32_t)m->level), NULL);
        return false;
    }
    return take_level(req, (int)m->level);
}

/* Position and digest: both or none, and no checkpoint id beside them. */
static bool take_boundary(struct decoder *d, uint32_t position, const ProtobufCBinaryData *digest)
{
    struct request *req = d->req;
    const bool has_id = req->in.u.rollback.has_id;
    const size_t want = has_id ? 0 : sizeof(req->in.u.rollback.digest.bytes);
    if (!check_max(req, KV_REASON_CHECKPOINT_ID_INVALID, "position", position,
                   has_id ? 0 : d->context_tokens))
        return false;
    if (digest->len != want) {
        request_fail(req, KV_REASON_CHECKPOINT_ID_INVALID, "digest", has_id ? "empty" : "32 bytes",
                     request_u64(req, digest->len), NULL);
        return false;
    }
    req->in.u.rollback.position = position;
    if (!has_id) memcpy(req->in.u.rollback.digest.bytes, digest->data, want);
    return true;
}

static bool decode_rollback(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__RollbackRequest *m =
        unpack(d, &cached__session__v1__rollback_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    req->in.u.rollback.has_id = m->checkpoint_id.len > 0 || m->position == 0;
    if (req->in.u.rollback.has_id &&
        !take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.rollback.id))
        return false;
    if (!take_boundary(d, m->position, &m->digest)) return false;
    req->in.u.rollback.keep = m->keep;
    req->in.epoch = m->epoch;
    return true;
}

static bool decode_compact(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__CompactRequest *m =
        unpack(d, &cached__session__v1__compact_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    if (!check_max(req, KV_REASON_TTL_INVALID, "keep_old_for_ms", m->keep_old_for_ms,
                   KV_TTL_MS_MAX))
        return false;
    req->in.u.compact.keep_ms =
        m->keep_old_for_ms == 0 ? KV_OLD_BRANCH_KEEP_MS : m->keep_old_for_ms;
    req->in.epoch = m->epoch;
    return true;
}

static bool decode_pin(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__PinRequest *m =
        unpack(d, &cached__session__v1__pin_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    req->in.u.node.ttl_ms = m->ttl_ms;
    return take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.node.id) &&
           check_max(req, KV_REASON_PIN_INVALID, "ttl_ms", m->ttl_ms, KV_PIN_MS_MAX);
}

static bool decode_touch(struct decoder *d)
{
    const Cached__Session__V1__TouchRequest *m =
        unpack(d, &cached__session__v1__touch_request__descriptor);
    return m != NULL && take_session(d->req, m->session_id) &&
           take_checkpoint_id(d->req, "checkpoint_id", &m->checkpoint_id, &d->req->in.u.node.id);
}

static bool decode_own_usage(struct decoder *d)
{
    return unpack(d, &cached__session__v1__get_usage_request__descriptor) != NULL;
}

static bool decode_fork(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__ForkRequest *m =
        unpack(d, &cached__session__v1__fork_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    req->in.u.fork.has_id = m->checkpoint_id.len > 0;
    if (req->in.u.fork.has_id &&
        !take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.fork.id))
        return false;
    if (!check_name(req, "new_session_id", m->new_session_id)) return false;
    if (!check_max(req, KV_REASON_SESSION_KIND_INVALID, "kind", (uint32_t)m->kind,
                   CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_EPHEMERAL))
        return false;
    req->in.u.fork.session_name = m->new_session_id;
    req->in.u.fork.session = kv_session_id_of(&req->user, m->new_session_id);
    req->in.u.fork.kind = (uint32_t)m->kind;
    req->in.u.fork.ttl_ms = m->ttl_ms;
    req->in.epoch = m->epoch;
    return check_max(req, KV_REASON_TTL_INVALID, "ttl_ms", m->ttl_ms, KV_TTL_MS_MAX);
}

static bool decode_close(struct decoder *d)
{
    const Cached__Session__V1__CloseSessionRequest *m =
        unpack(d, &cached__session__v1__close_session_request__descriptor);
    return m != NULL && take_session(d->req, m->session_id);
}

static bool decode_get(struct decoder *d)
{
    const Cached__Session__V1__GetSessionRequest *m =
        unpack(d, &cached__session__v1__get_session_request__descriptor);
    return m != NULL && take_session(d->req, m->session_id);
}

/* As rpc_encode writes it: 32 lower-case hex digits of a session id. */
static bool parse_page_token(const char *text, struct kv_session_id *ret_id)
{
    static const char digits[] = "0123456789abcdef";
    if (strlen(text) != 2 * sizeof(ret_id->bytes) || strspn(text, digits) != strlen(text))
        return false;
    for (size_t i = 0; i < sizeof(ret_id->bytes); i++) {
        const size_t high = (size_t)(strchr(digits, text[2 * i]) - digits);
        const size_t low = (size_t)(strchr(digits, text[2 * i + 1]) - digits);
        ret_id->bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool decode_list(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__ListSessionsRequest *m =
        unpack(d, &cached__session__v1__list_sessions_request__descriptor);
    if (m == NULL) return false;
    if (!check_max(req, KV_REASON_PAGE_SIZE_INVALID, "page_size", m->page_size, KV_LIST_PAGE_MAX))
        return false;
    req->in.u.list.page_size = m->page_size == 0 ? LIST_PAGE_DEFAULT : m->page_size;
    req->in.u.list.has_after = m->page_token[0] != '\0';
    if (!req->in.u.list.has_after || parse_page_token(m->page_token, &req->in.u.list.after))
        return true;
    request_fail(req, KV_REASON_PAGE_TOKEN_INVALID, "page_token", "32 hex digits",
                 request_u64(req, strlen(m->page_token)), NULL);
    return false;
}

static bool decode_stats(struct decoder *d)
{
    return unpack(d, &cached__admin__v1__get_stats_request__descriptor) != NULL;
}

static bool decode_clock(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__AdvanceClockRequest *m =
        unpack(d, &cached__admin__v1__advance_clock_request__descriptor);
    if (m == NULL) return false;
    if (m->ms == 0 || m->ms > KV_CLOCK_STEP_MS_MAX) {
        request_fail(req, KV_REASON_CLOCK_STEP_INVALID, "ms", "1 to 31536000000",
                     request_u64(req, m->ms), NULL);
        return false;
    }
    req->in.u.advance.ms = m->ms;
    return true;
}

static bool decode_scrub(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__ScrubRequest *m =
        unpack(d, &cached__admin__v1__scrub_request__descriptor);
    if (m == NULL) return false;
    if ((int)m->action < SCRUB_STATUS || (int)m->action > SCRUB_RELEASE) {
        request_fail(req, KV_REASON_SCRUB_INVALID, "action", "1 to 4",
                     request_u64(req, (uint32_t)m->action), NULL);
        return false;
    }
    const bool is_start = (int)m->action == SCRUB_START;
    const bool in_range = m->rate_bytes >= KV_SCRUB_RATE_MIN && m->rate_bytes <= KV_SCRUB_RATE_MAX;
    if (m->rate_bytes != 0 && !(is_start && in_range)) {
        request_fail(req, KV_REASON_SCRUB_INVALID, "rate_bytes",
                     is_start ? "1048576 to 68719476736" : "0", request_u64(req, m->rate_bytes),
                     NULL);
        return false;
    }
    req->in.u.scrub.action = (enum request_scrub_action)m->action;
    req->in.u.scrub.rate_bytes = m->rate_bytes;
    return true;
}

/* A name as the token file may have it. */
static bool take_user(struct request *req, const char *name)
{
    const size_t count = strlen(name);
    const size_t good =
        strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    if (count >= 1 && count <= KV_USER_NAME_MAX && good == count) return true;
    request_fail(req, KV_REASON_USER_INVALID, "user", "1 to 64 of [A-Za-z0-9._-]",
                 request_u64(req, count), NULL);
    return false;
}

static bool decode_usage(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__DiskUsageRequest *m =
        unpack(d, &cached__admin__v1__disk_usage_request__descriptor);
    if (m == NULL) return false;
    req->in.u.usage.has_user = m->user[0] != '\0';
    if (req->in.u.usage.has_user && !take_user(req, m->user)) return false;
    req->in.u.usage.user_name = m->user;
    if (req->in.u.usage.has_user) req->in.u.usage.user = kv_user_id_of(m->user);
    req->in.u.usage.has_after = m->page_token[0] != '\0';
    if (!req->in.u.usage.has_after || parse_page_token(m->page_token, &req->in.u.usage.after))
        return true;
    request_fail(req, KV_REASON_PAGE_TOKEN_INVALID, "page_token", "32 hex digits",
                 request_u64(req, strlen(m->page_token)), NULL);
    return false;
}

static bool decode_delete(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__DeleteSessionRequest *m =
        unpack(d, &cached__session__v1__delete_session_request__descriptor);
    if (m == NULL || !take_session(req, m->session_id)) return false;
    req->in.u.remove.dry_run = m->dry_run;
    return true;
}

static bool decode_erase(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__EraseUserRequest *m =
        unpack(d, &cached__admin__v1__erase_user_request__descriptor);
    if (m == NULL || !take_user(req, m->user)) return false;
    req->in.u.remove.user = kv_user_id_of(m->user);
    req->in.u.remove.user_name = m->user;
    req->in.u.remove.dry_run = m->dry_run;
    return true;
}

static bool decode_rotate(struct decoder *d)
{
    return unpack(d, &cached__admin__v1__rotate_key_request__descriptor) != NULL;
}

static bool decode_why(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__WhyRequest *m = unpack(d, &cached__admin__v1__why_request__descriptor);
    if (m == NULL || !take_user(req, m->user)) return false;
    if (!check_name(req, "session_id", m->session_id)) return false;
    req->in.u.why.user = kv_user_id_of(m->user);
    req->in.session_name = m->session_id;
    req->in.session = kv_session_id_of(&req->in.u.why.user, m->session_id);
    req->in.u.why.has_position = m->has_position;
    req->in.u.why.position = m->position;
    const uint32_t max = m->has_position ? KV_PROMPT_TOKENS_MAX - 1 : 0;
    return check_max(req, KV_REASON_POSITION_INVALID, "position", m->position, max);
}

static bool decode_purge(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__PurgeModelRequest *m =
        unpack(d, &cached__admin__v1__purge_model_request__descriptor);
    if (m == NULL) return false;
    const size_t count = strlen(m->model);
    const bool is_other = strcmp(m->model, "other") == 0;
    if (!is_other && (count < 8 || count > 64 || strspn(m->model, "0123456789abcdef") != count)) {
        request_fail(req, KV_REASON_MODEL_INVALID, "model", "8 to 64 of [0-9a-f], or other",
                     request_u64(req, count), NULL);
        return false;
    }
    req->in.u.purge.digits = is_other ? "" : m->model;
    req->in.u.purge.digit_count = is_other ? 0 : (uint32_t)count;
    req->in.u.purge.dry_run = m->dry_run;
    return true;
}

/* Each limit once, in its range, or none of it. */
static bool take_limits(struct request *req, Cached__Admin__V1__SetLimit **limits, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const Cached__Admin__V1__SetLimit *m = limits[i];
        enum kv_quota_kind kind;
        const bool known = kv_quota_find(m->name, &kind);
        const uint32_t bit = known ? 1u << kind : 0;
        if (!known || ((req->in.u.quota.set | req->in.u.quota.unset) & bit) != 0) {
            request_fail(req, KV_REASON_QUOTA_INVALID, "limits.name",
                         "sessions, turns, bytes_ssd, requests_per_s, tokens_per_s, saves, ttl_ms; "
                         "once",
                         m->name, NULL);
            return false;
        }
        const bool has_value = !m->unlimited && !m->remove;
        if ((m->unlimited && m->remove) || (!has_value && m->limit != 0) ||
            (has_value && (m->limit == KV_QUOTA_UNLIMITED || !kv_quota_is_valid(kind, m->limit)))) {
            char range[64];
            const int used = snprintf(range, sizeof(range), "%llu to %llu, or none",
                                      (unsigned long long)kv_quota_least(kind),
                                      (unsigned long long)kv_quota_most(kind));
            request_fail(req, KV_REASON_QUOTA_INVALID, m->name,
                         kv_arena_strdup(req->arena, range, (size_t)used),
                         request_u64(req, m->limit), NULL);
            return false;
        }
        if (m->remove)
            req->in.u.quota.unset |= bit;
        else
            req->in.u.quota.set |= bit;
        req->in.u.quota.limits[kind] = m->unlimited ? KV_QUOTA_UNLIMITED : m->limit;
    }
    return true;
}

static bool take_plan(struct request *req, const char *field, const char *name)
{
    const size_t count = strlen(name);
    const size_t good =
        strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    req->in.u.quota.plan = name;
    if (count >= 1 && count <= KV_PLAN_NAME_MAX && good == count) return true;
    request_fail(req, KV_REASON_PLAN_INVALID, field, "1 to 64 of [A-Za-z0-9._-]",
                 request_u64(req, count), NULL);
    return false;
}

static bool take_quota_user(struct request *req, const char *name)
{
    if (!take_user(req, name)) return false;
    req->in.u.quota.user = kv_user_id_of(name);
    req->in.u.quota.name = name;
    req->in.u.quota.plan = "";
    return true;
}

static bool decode_set_quota(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__SetQuotaRequest *m =
        unpack(d, &cached__admin__v1__set_quota_request__descriptor);
    if (m == NULL || !take_quota_user(req, m->user)) return false;
    if (m->plan[0] != '\0' && !take_plan(req, "plan", m->plan)) return false;
    req->in.u.quota.dry_run = m->dry_run;
    return take_limits(req, m->limits, m->n_limits);
}

static bool decode_get_quota(struct decoder *d)
{
    const Cached__Admin__V1__GetQuotaRequest *m =
        unpack(d, &cached__admin__v1__get_quota_request__descriptor);
    return m != NULL && take_quota_user(d->req, m->user);
}

static bool decode_delete_quota(struct decoder *d)
{
    const Cached__Admin__V1__DeleteQuotaRequest *m =
        unpack(d, &cached__admin__v1__delete_quota_request__descriptor);
    if (m == NULL || !take_quota_user(d->req, m->user)) return false;
    d->req->in.u.quota.dry_run = m->dry_run;
    return true;
}

static bool decode_set_plan(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__SetPlanRequest *m =
        unpack(d, &cached__admin__v1__set_plan_request__descriptor);
    if (m == NULL || !take_plan(req, "name", m->name)) return false;
    req->in.u.quota.dry_run = m->dry_run;
    req->in.u.quota.remove = m->remove;
    return take_limits(req, m->limits, m->n_limits);
}

static bool decode_list_plans(struct decoder *d)
{
    return unpack(d, &cached__admin__v1__list_plans_request__descriptor) != NULL;
}

static bool decode_list_users(struct decoder *d)
{
    struct request *req = d->req;
    const Cached__Admin__V1__ListUsersRequest *m =
        unpack(d, &cached__admin__v1__list_users_request__descriptor);
    if (m == NULL ||
        !check_max(req, KV_REASON_PAGE_SIZE_INVALID, "page_size", m->page_size, KV_USAGE_ROWS_MAX))
        return false;
    req->in.u.list.page_size = m->page_size == 0 ? LIST_PAGE_DEFAULT : m->page_size;
    req->in.u.list.has_after = m->page_token[0] != '\0';
    if (!req->in.u.list.has_after || parse_page_token(m->page_token, &req->in.u.list.after))
        return true;
    request_fail(req, KV_REASON_PAGE_TOKEN_INVALID, "page_token", "32 hex digits",
                 request_u64(req, strlen(m->page_token)), NULL);
    return false;
}

/* The token list of the message; it is not in what protobuf-c unpacked. */
static struct request_tokens tokens_of(const struct request *req)
{
    switch (req->method) {
    case REQUEST_PREFILL:
        return req->in.u.prefill.tokens;
    case REQUEST_DECODE:
        return req->in.u.decode.forced;
    default:
        return (struct request_tokens){0};
    }
}

bool rpc_decode(struct request *req, struct rpc_pieces pieces, const struct rpc_about *about)
{
    static bool (*const decoders[REQUEST_METHOD_COUNT])(struct decoder *) = {
        [REQUEST_OPEN_SESSION] = decode_open,
        [REQUEST_LOOKUP] = decode_lookup,
        [REQUEST_PREFILL] = decode_prefill,
        [REQUEST_DECODE] = decode_decode,
        [REQUEST_CHECKPOINT] = decode_checkpoint,
        [REQUEST_WAIT_DURABLE] = decode_wait,
        [REQUEST_ROLLBACK] = decode_rollback,
        [REQUEST_CLOSE_SESSION] = decode_close,
        [REQUEST_LIST_SESSIONS] = decode_list,
        [REQUEST_GET_SESSION] = decode_get,
        [REQUEST_GET_STATS] = decode_stats,
        [REQUEST_ADVANCE_CLOCK] = decode_clock,
        [REQUEST_SCRUB] = decode_scrub,
        [REQUEST_DISK_USAGE] = decode_usage,
        [REQUEST_DELETE_SESSION] = decode_delete,
        [REQUEST_ERASE_USER] = decode_erase,
        [REQUEST_FORK] = decode_fork,
        [REQUEST_COMPACT] = decode_compact,
        [REQUEST_PIN] = decode_pin,
        [REQUEST_TOUCH] = decode_touch,
        [REQUEST_GET_USAGE] = decode_own_usage,
        [REQUEST_ROTATE_KEY] = decode_rotate,
        [REQUEST_WHY] = decode_why,
        [REQUEST_PURGE_MODEL] = decode_purge,
        [REQUEST_SET_QUOTA] = decode_set_quota,
        [REQUEST_GET_QUOTA] = decode_get_quota,
        [REQUEST_DELETE_QUOTA] = decode_delete_quota,
        [REQUEST_SET_PLAN] = decode_set_plan,
        [REQUEST_LIST_PLANS] = decode_list_plans,
        [REQUEST_LIST_USERS] = decode_list_users,
    };
    /* Numbers of the fields that hold token lists. */
    static const uint32_t token_fields[REQUEST_METHOD_COUNT] = {
        [REQUEST_LOOKUP] = 2,
        [REQUEST_PREFILL] = 2,
        [REQUEST_DECODE] = 7,
    };
    struct decoder d = {
        .req = req,
        .vocab_tokens = about->vocab_tokens,
        .context_tokens = about->context_tokens,
        .allocator = {alloc_in_arena, free_with_arena, req->arena},
    };

    assert(req->method < REQUEST_METHOD_COUNT);
    assert(req->arena != NULL);
    const uint32_t field = token_fields[req->method];
    if (!split(&d, pieces, field) || !decoders[req->method](&d)) return false;
    return rpc_request_id_take(req, d.message, field, tokens_of(req));
}
