#pragma once

/*
 * The gRPC server: one thread, one completion queue.  Owned by: main (create, stop, destroy); the
 * loop and all calls belong to the rpc thread.
 */

#include "cached/rpc/rpc_encode.h"
#include "kvstore/base/log.h"

struct auth;
struct shard;
struct rpc_server;

struct rpc_options {
    const char *socket;      /* Path of a unix socket; empty: none. */
    const char *listen;      /* host:port; empty: none. */
    uint64_t reserved_files; /* That connections may not take: rpc_accept.h. */
    const struct auth *auth;
    struct kv_log *log;
    struct kv_mailbox *shard_mailbox; /* For stream_msg. */
    struct rpc_about about;
    const struct rpc_setting *settings; /* GetConfig's answer. */
    uint32_t setting_count;
};

/* Listens when it returns, answers once rpc_server_run() runs.  KV_INVALID: an address is in use or
 * no address of this machine.  Everything options points to outlives the server. */
kv_status rpc_server_create(const struct rpc_options *options, struct rpc_server **ret_server,
                            struct kv_error *err) KV_MUST_CHECK;

/* Any thread, until rpc_server_serve(): what the daemon does before it serves.  phase is static.
 * Health says NOT_SERVING and GetStats how far it is; other calls are refused (STARTING). */
void rpc_server_progress(struct rpc_server *server, const char *phase, uint32_t percent);
/* Any thread, once: calls go to the shard from now on, which outlives the server's run. */
void rpc_server_serve(struct rpc_server *server, struct shard *shard);

/* Port of `listen`; 0 without one. */
int rpc_server_port(const struct rpc_server *server);

/* The thread's body; returns when a stop is complete: every call is answered and gone. */
void rpc_server_run(void *server);

/* Main thread: no connection is taken any more, health says NOT_SERVING, new calls are refused,
 * what runs may finish for 5 s and is cancelled then.  A second call cancels at once. */
void rpc_server_stop(struct rpc_server *server);

/* Readable once rpc_server_run() has returned. */
int rpc_server_done_fd(const struct rpc_server *server);

/* After the rpc and shard threads are joined, or when they never ran. */
void rpc_server_destroy(struct rpc_server *server);
