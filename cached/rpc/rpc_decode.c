/*
 * The door: nothing gets past these files unchecked (calls of sessions in rpc_decode_session.c, of
 * operators in rpc_decode_admin.c).
 *
 * Each method has one function that unpacks its message and checks its fields in the order of the
 * .proto file.  The first field that is wrong ends the call with that field's own reason, its limit
 * and the value found; nothing is corrected silently.  What only the session's state can tell
 * (a position beyond a parent checkpoint, an epoch) is left to the shard.
 */

#include "cached/rpc/rpc_decode.h"

#include "cached/rpc/rpc_decode_internal.h"
#include "cached/rpc/rpc_request_id.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

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

static bool split(struct rpc_decoder *d, struct rpc_pieces pieces, uint32_t field)
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
static const char *string_with_nul(const struct rpc_decoder *d,
                                   const ProtobufCMessageDescriptor *type)
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

void *rpc_unpack(struct rpc_decoder *d, const ProtobufCMessageDescriptor *type)
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

bool rpc_check_name(struct request *req, const char *field, const char *name)
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

bool rpc_take_session(struct request *req, const char *name)
{
    if (!rpc_check_name(req, "session_id", name)) return false;
    req->in.session_name = name;
    req->in.session = kv_session_id_of(&req->user, name);
    return true;
}

/* Numbers beyond what a field may hold, all alike. */
bool rpc_check_max(struct request *req, enum kv_reason reason, const char *field, uint64_t value,
                   uint64_t max)
{
    if (value <= max) return true;
    request_fail(req, reason, field, request_u64(req, max), request_u64(req, value), NULL);
    return false;
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

bool rpc_take_page_token(struct request *req, const char *text, bool *ret_has_after,
                         struct kv_session_id *ret_after)
{
    *ret_has_after = text[0] != '\0';
    if (!*ret_has_after || parse_page_token(text, ret_after)) return true;
    request_fail(req, KV_REASON_PAGE_TOKEN_INVALID, "page_token", "32 hex digits",
                 request_u64(req, strlen(text)), NULL);
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
    /* Numbers of the fields that hold token lists. */
    static const uint32_t token_fields[REQUEST_METHOD_COUNT] = {
        [REQUEST_LOOKUP] = 2,
        [REQUEST_PREFILL] = 2,
        [REQUEST_DECODE] = 7,
    };
    struct rpc_decoder d = {
        .req = req,
        .vocab_tokens = about->vocab_tokens,
        .context_tokens = about->context_tokens,
        .allocator = {alloc_in_arena, free_with_arena, req->arena},
    };

    assert(req->method < REQUEST_METHOD_COUNT);
    assert(req->arena != NULL);
    rpc_decode_fn *decode = rpc_decode_session(req->method);
    if (decode == NULL) decode = rpc_decode_admin(req->method);
    assert(decode != NULL);
    const uint32_t field = token_fields[req->method];
    if (!split(&d, pieces, field) || !decode(&d)) return false;
    return rpc_request_id_take(req, d.message, field, tokens_of(req));
}
