#pragma once

/*
 * Reads one protobuf message from the pieces in which it arrived, and takes one bytes field out.
 *
 * Token lists are up to 4 MiB and arrive in dozens of pieces; they are copied once, straight into
 * place, while the rest of the message (small) is made contiguous for protobuf-c.  Pure.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/status.h"

#include <stdint.h>

/* Pieces of a message, borrowed. */
struct rpc_pieces {
    const struct kv_bytes *items;
    uint32_t count;
};

struct rpc_cursor {
    struct rpc_pieces pieces;
    uint32_t index; /* Of the piece. */
    size_t offset;  /* In it. */
    uint64_t left_bytes;
};

struct rpc_split {
    struct rpc_cursor big; /* Where the bytes of the field start. */
    uint64_t big_bytes;
    bool has_big;
    size_t rest_bytes;
};

/* Finds the last bytes field numbered `field` (0: none).  Everything else is written to `rest`,
 * which has room for rest_max.  KV_INVALID: not a protobuf message; KV_BUSY: the rest is larger. */
kv_status rpc_wire_split(struct rpc_pieces pieces, uint32_t field, uint8_t *rest, size_t rest_max,
                         struct rpc_split *ret_split) KV_MUST_CHECK;

/* Copies and advances.  false: not that many are left. */
bool rpc_cursor_read(struct rpc_cursor *cursor, void *to, uint64_t bytes);
