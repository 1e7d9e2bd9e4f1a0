#pragma once

/*
 * Message bytes -> struct request_in, every field checked against limits.h and the vocabulary.
 * Runs on the rpc thread; the shard trusts what stands in `in`.
 */

#include "cached/request.h"
#include "cached/rpc/rpc_wire.h"

/* Fills req->in for req->method (user and arena are set).  false: req->out.failure says why. */
bool rpc_decode(struct request *req, struct rpc_pieces pieces, uint32_t vocab_tokens) KV_MUST_CHECK;
