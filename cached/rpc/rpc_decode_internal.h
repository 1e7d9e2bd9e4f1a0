#pragma once

/*
 * What the files that decode requests share.  Everything runs on the rpc thread and allocates in
 * the request's arena.  false, or NULL: req->out.failure says why.
 */

#include "cached/request.h"
#include "cached/rpc/rpc_wire.h"

#include <protobuf-c/protobuf-c.h>

#define LIST_PAGE_DEFAULT 100u /* Of a list, where the caller names no page size. */

struct rpc_decoder {
    struct request *req;
    uint32_t vocab_tokens, context_tokens;
    ProtobufCAllocator allocator;
    const uint8_t *rest;
    struct rpc_split split;
    const ProtobufCMessage *message;
};

/* Fills req->in from the message. */
typedef bool rpc_decode_fn(struct rpc_decoder *decoder);
/* NULL: it is a method of the other one. */
rpc_decode_fn *rpc_decode_session(enum request_method method);
rpc_decode_fn *rpc_decode_admin(enum request_method method);

/* The message without its token list; no text in it holds a NUL. */
void *rpc_unpack(struct rpc_decoder *d, const ProtobufCMessageDescriptor *type);
/* A session's name: 1 to 128 bytes of [A-Za-z0-9._:-]. */
bool rpc_check_name(struct request *req, const char *field, const char *name);
/* The session that the call is about. */
bool rpc_take_session(struct request *req, const char *name);
bool rpc_check_max(struct request *req, enum kv_reason reason, const char *field, uint64_t value,
                   uint64_t max);
/* As rpc_encode writes it: 32 lower-case hex digits of a session id; empty: from the start. */
bool rpc_take_page_token(struct request *req, const char *text, bool *ret_has_after,
                         struct kv_session_id *ret_after);
