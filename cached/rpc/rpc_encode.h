#pragma once

/*
 * struct request_out -> protobuf.  Everything built here lives in the request's arena.  Called by
 * whoever answers: the shard thread, or the rpc thread for what it refuses itself.
 */

#include "cached/request.h"
#include "cached/rpc/rpc_stats.h"
#include "kvstore/base/bytes.h"

#include <protobuf-c/protobuf-c.h>

/* What the daemon says about itself; immutable, texts outlive the server. */
struct rpc_about {
    const char *version, *commit;
    uint64_t pid, started_ns;
    uint32_t vocab_tokens, context_tokens;
    struct kv_digest model_fingerprint;
};

struct rpc_setting {
    const char *key, *value, *origin, *doc;
};

/* The answer of a call that did not fail (for Decode its last message).  `snapshot` is for
 * GetStats, else NULL.  NULL: the arena is exhausted. */
const ProtobufCMessage *rpc_encode(struct request *req, const struct rpc_about *about,
                                   const struct rpc_snapshot *snapshot);
const ProtobufCMessage *rpc_encode_stats(struct request *req, const struct rpc_about *about,
                                         const struct rpc_snapshot *snapshot);
const ProtobufCMessage *rpc_encode_config(struct kv_arena *arena,
                                          const struct rpc_setting *settings, uint32_t count);

/* rpc_encode_ops.c */
const ProtobufCMessage *rpc_encode_scrub(struct request *req);
const ProtobufCMessage *rpc_encode_usage(struct request *req);
const ProtobufCMessage *rpc_encode_erase(struct request *req);
const ProtobufCMessage *rpc_encode_rotate(struct request *req);
const ProtobufCMessage *rpc_encode_why(struct request *req);
const ProtobufCMessage *rpc_encode_purge(struct request *req);

/* rpc_encode_quota.c: every call of quotas. */
const ProtobufCMessage *rpc_encode_quota(struct request *req);

/* Where a list goes on: behind this session. NULL: the arena is exhausted. */
char *rpc_page_token(struct kv_arena *arena, const struct kv_session_id *id);

/* google.rpc.Status of a failed request, packed.  data NULL: the arena is exhausted. */
struct kv_bytes rpc_encode_failure(struct request *req);

/* One DecodeResponse without an end. */
size_t rpc_stream_bytes(uint32_t position, uint32_t count);
void rpc_stream_encode(uint32_t position, const uint32_t *tokens, const uint32_t *logits_crc,
                       uint32_t count, uint8_t *to);
