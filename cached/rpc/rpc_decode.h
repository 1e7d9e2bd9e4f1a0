#pragma once

/*
 * Message bytes -> struct request_in, every field checked against limits.h and what the model
 * allows (vocabulary and context, of `about`).
 * Runs on the rpc thread; the shard trusts what stands in `in`.
 */

#include "cached/request.h"
#include "cached/rpc/rpc_encode.h"
#include "cached/rpc/rpc_wire.h"

/* Fills req->in for req->method (user and arena are set).  false: req->out.failure says why. */
bool rpc_decode(struct request *req, struct rpc_pieces pieces,
                const struct rpc_about *about) KV_MUST_CHECK;
