#pragma once

/*
 * Shared by the files that touch gRPC: rpc_server.c, rpc_call.c, rpc_health.c.
 *
 * Life of a call.  rpc_call_expect() asks gRPC for the next call; its `accepted` tag starts it.
 * From then on two things hold it: `closed`, the tag of RECV_CLOSE_ON_SERVER, and the answer that
 * is due, given back by the tag `replied`.  All other tags return before the answer is started.
 * When both are back the call is freed; that, like all fields but those marked, is the rpc thread's
 * alone.
 */

#include "cached/request.h"
#include "cached/rpc/rpc_accept.h"
#include "cached/rpc/rpc_method.h"
#include "cached/rpc/rpc_wire.h"
#include "cached/rpc/rpc_server.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <stdatomic.h>

#define RPC_RETRY_MS 100u
/* Beyond its deadline a call is given this long to be answered by the shard. */
#define RPC_DEADLINE_GRACE_NS 2000000000u
#define RPC_STOP_GRACE_NS 5000000000u
/* Calls of one method gRPC may hand over before the thread asks for more. */
#define RPC_EXPECTED 4u

struct rpc_tag {
    void (*run)(struct rpc_tag *tag, bool ok);
};

struct rpc_call {
    struct request req;
    struct rpc_server *server;
    unsigned method_index;
    const struct rpc_method *method;
    struct rpc_call *next, *prev; /* Of server->calls. */

    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_call_details details; /* Unregistered methods. */
    bool has_details;
    grpc_byte_buffer *payload;

    atomic_uint batches; /* Started on it, by either thread. */
    struct rpc_tag accepted, closed, received, streamed, replied;
    uint32_t holds;
    int close_cancelled; /* Result of RECV_CLOSE_ON_SERVER. */
    bool watched;        /* RECV_CLOSE was started at once; else it comes with the answer. */
    bool is_posted;      /* With the shard, or was. */
    bool is_replied;
    bool was_cut; /* Cancelled by us, past its deadline. */
    struct rpc_snapshot *snapshot;

    /* The answer: by whoever calls rpc_call_reply(), read when `replied` returns. */
    grpc_byte_buffer *reply;
    grpc_metadata trailing;
    bool has_trailing;
    grpc_slice status_text;
    unsigned code;

    /* Decode's stream: the shard thread's, except that `streamed` frees the buffer. */
    grpc_byte_buffer *stream;
    bool initial_sent;
    bool reply_wanted;
    kv_msg_fn *shard_run;

    /* Health watch. */
    bool is_watching;
    bool is_sending;
    int last_health;
    int service;
};

struct rpc_server {
    struct rpc_options options;
    grpc_server *grpc;
    grpc_completion_queue *queue;
    grpc_server_credentials *plain; /* Of connections that are not encrypted. */
    struct rpc_accept *accept;
    void *handles[RPC_METHOD_REGISTERED]; /* Of registered methods. */
    int done_fd;
    bool started;
    struct rpc_tag shutdown;

    /* Written by other threads, read by the rpc thread. */
    _Atomic unsigned stops;
    struct shard *_Atomic shard; /* NULL: not serving yet, */
    const char *_Atomic phase;   /* but doing this, */
    _Atomic uint32_t percent;    /* so far. */

    /* The rpc thread's. */
    struct rpc_call *calls; /* Accepted, not freed. */
    uint32_t call_count;
    uint32_t expected[RPC_METHOD_COUNT]; /* `accepted` tags outstanding. */
    uint32_t watchers;
    uint64_t stop_ns;
    uint32_t idle_ticks; /* While stopping: without a call. */
    bool is_cancelled;
    bool is_down;
    struct rpc_stats stats;
};

/* rpc_call.c */
void rpc_call_expect(struct rpc_server *server, unsigned method_index);
/* Starts the last batch: `response`, or the status of req.out.failure when NULL.  Any thread that
 * owns the request; touch nothing afterwards. */
void rpc_call_reply(struct rpc_call *call, const ProtobufCMessage *response);
void rpc_call_fail(struct rpc_call *call, enum kv_reason reason, const char *fmt, ...)
    KV_PRINTF(3, 4);
void rpc_call_receive(struct rpc_call *call);
/* One more message of a stream; the `streamed` tag returns when it has left. */
void rpc_call_send(struct rpc_call *call, grpc_byte_buffer *message);
/* Collects the pieces of the payload in the arena.  false: there is none, or no memory. */
bool rpc_call_pieces(struct rpc_call *call, struct rpc_pieces *ret_pieces, uint64_t *ret_bytes);

/* rpc_health.c: `received` and `streamed` of the health service, and its tick. */
void rpc_health_received(struct rpc_call *call);
void rpc_health_streamed(struct rpc_call *call, bool ok);
void rpc_health_tick(struct rpc_server *server);
