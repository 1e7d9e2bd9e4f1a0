/*
 * The wire format, as far as splitting needs it: tags, four kinds of value, lengths.
 *
 * Groups (wire types 3 and 4) do not exist in proto3 and are refused, so nothing here nests and one
 * pass over the message ends.  Lengths are checked against what is left before anything is copied.
 */

#include "cached/rpc/rpc_wire.h"

#include <assert.h>

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

#define VARINT_BYTES_MAX 10u

struct out {
    uint8_t *data;
    size_t used;
    size_t room;
};

/* The rest of the current piece; count 0: the end. */
static struct kv_bytes window(struct rpc_cursor *cursor)
{
    while (cursor->index < cursor->pieces.count) {
        const struct kv_bytes *piece = &cursor->pieces.items[cursor->index];
        if (cursor->offset < piece->count)
            return (struct kv_bytes){piece->data + cursor->offset, piece->count - cursor->offset};
        cursor->index++;
        cursor->offset = 0;
    }
    return (struct kv_bytes){NULL, 0};
}

/* `to` NULL: skips. */
static bool take(struct rpc_cursor *cursor, uint8_t *to, uint64_t bytes)
{
    if (bytes > cursor->left_bytes) return false;
    cursor->left_bytes -= bytes;
    while (bytes > 0) {
        const struct kv_bytes here = window(cursor);
        assert(here.count > 0);
        const size_t count = bytes < here.count ? (size_t)bytes : here.count;
        if (to != NULL) {
            memcpy(to, here.data, count);
            to += count;
        }
        cursor->offset += count;
        bytes -= count;
    }
    return true;
}

bool rpc_cursor_read(struct rpc_cursor *cursor, void *to, uint64_t bytes)
{
    assert(to != NULL);
    return take(cursor, to, bytes);
}

/* Reads a varint and keeps its bytes, because it may have to be passed on as it came. */
static bool varint(struct rpc_cursor *cursor, uint8_t raw[VARINT_BYTES_MAX], uint32_t *ret_bytes,
                   uint64_t *ret_value)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < VARINT_BYTES_MAX; i++) {
        if (!take(cursor, &raw[i], 1)) return false;
        value |= (uint64_t)(raw[i] & 0x7f) << (7 * i);
        if ((raw[i] & 0x80) != 0) continue;
        *ret_bytes = i + 1;
        *ret_value = value;
        return true;
    }
    return false;
}

static kv_status pass_raw(struct out *out, const uint8_t *raw, uint32_t bytes)
{
    if (bytes > out->room - out->used) return KV_BUSY;
    memcpy(out->data + out->used, raw, bytes);
    out->used += bytes;
    return KV_OK;
}

static kv_status pass(struct rpc_cursor *cursor, struct out *out, uint64_t bytes)
{
    if (bytes > cursor->left_bytes) return KV_INVALID;
    if (bytes > out->room - out->used) return KV_BUSY;
    const bool took = take(cursor, out->data + out->used, bytes);
    assert(took);
    out->used += (size_t)bytes;
    return KV_OK;
}

/* A length-delimited value whose tag has been read but not passed on. */
static kv_status split_bytes(struct rpc_cursor *cursor, bool is_big, const uint8_t *tag,
                             uint32_t tag_bytes, struct out *out, struct rpc_split *split)
{
    uint8_t raw[VARINT_BYTES_MAX];
    uint32_t raw_bytes;
    uint64_t length;
    if (!varint(cursor, raw, &raw_bytes, &length)) return KV_INVALID;
    if (is_big) {
        if (length > cursor->left_bytes) return KV_INVALID;
        split->big = *cursor;
        split->big_bytes = length;
        split->has_big = true;
        const bool skipped = take(cursor, NULL, length);
        assert(skipped);
        return KV_OK;
    }
    kv_status status = pass_raw(out, tag, tag_bytes);
    if (status == KV_OK) status = pass_raw(out, raw, raw_bytes);
    return status == KV_OK ? pass(cursor, out, length) : status;
}

static kv_status split_one(struct rpc_cursor *cursor, uint32_t field, struct out *out,
                           struct rpc_split *split)
{
    uint8_t tag[VARINT_BYTES_MAX];
    uint8_t raw[VARINT_BYTES_MAX];
    uint32_t tag_bytes;
    uint32_t raw_bytes;
    uint64_t key;
    uint64_t value;

    if (!varint(cursor, tag, &tag_bytes, &key) || key > UINT32_MAX || key >> 3 == 0)
        return KV_INVALID;
    const unsigned type = key & 7;
    if (type == WIRE_BYTES)
        return split_bytes(cursor, field != 0 && key >> 3 == field, tag, tag_bytes, out, split);
    if (key >> 3 == field) return KV_INVALID; /* The big field is bytes. */

    const kv_status status = pass_raw(out, tag, tag_bytes);
    if (status != KV_OK) return status;
    switch (type) {
    case WIRE_VARINT:
        if (!varint(cursor, raw, &raw_bytes, &value)) return KV_INVALID;
        return pass_raw(out, raw, raw_bytes);
    case WIRE_64:
        return pass(cursor, out, 8);
    case WIRE_32:
        return pass(cursor, out, 4);
    default:
        return KV_INVALID;
    }
}

kv_status rpc_wire_split(struct rpc_pieces pieces, uint32_t field, uint8_t *rest, size_t rest_max,
                         struct rpc_split *ret_split)
{
    struct rpc_cursor cursor = {.pieces = pieces};
    for (uint32_t i = 0; i < pieces.count; i++)
        cursor.left_bytes += pieces.items[i].count;
    struct rpc_split split = {.has_big = false};
    struct out out = {.data = rest, .room = rest_max};

    while (cursor.left_bytes > 0) {
        const kv_status status = split_one(&cursor, field, &out, &split);
        if (status != KV_OK) return status;
    }
    split.rest_bytes = out.used;
    *ret_split = split;
    return KV_OK;
}
