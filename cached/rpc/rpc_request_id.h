#pragma once

/*
 * request_id: the name that a client gives a call, so that it can repeat it.
 * Runs on the rpc thread, as part of decoding.
 */

#include "cached/request.h"

#include <protobuf-c/protobuf-c.h>

/* Checks the request_id of a message, if its type has one, and notes what tells this call from
 * another: a number or a digest for each field, in req->in.fields (arena).  `tokens` are the bytes
 * of field `token_field` (0: none), which `message` does not hold.  false: req->out.failure says
 * why. */
bool rpc_request_id_take(struct request *req, const ProtobufCMessage *message, uint32_t token_field,
                         struct request_tokens tokens) KV_MUST_CHECK;
