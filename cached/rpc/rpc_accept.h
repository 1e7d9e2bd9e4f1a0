#pragma once

/*
 * Takes connections.  A thread of its own (`kv-accept`) waits for them, keeps each until its first
 * byte is there, and hands it on; it counts those that are open and refuses what is above the
 * limit.  Knows nothing of gRPC.  Owned by: main; the table of connections is the thread's.
 */

#include "kvstore/base/log.h"

#include <stdint.h>

struct rpc_accept;

struct rpc_accept_options {
    const char *socket; /* As rpc_listen_open(). */
    const char *listen;
    struct kv_log *log;
    /* Open files that connections may not take: RLIMIT_NOFILE less these bounds them, too. */
    uint64_t reserved_files;
    /* On the accept thread: `fd` is a connected socket, non-blocking, and the callee's to close. */
    void (*connected)(void *context, int fd);
    void *context;
};

struct rpc_accept_counts {
    uint64_t open, accepted;
    uint64_t refused_limit; /* Closed at once: as many as may be were open. */
    uint64_t refused_files; /* Closed at once, or left waiting: no descriptor. */
    uint64_t closed_silent; /* Said nothing for KV_CONNECTION_SILENT_MS. */
};

/* Listens when it returns, accepts once started.  Failures as rpc_listen_open(). */
kv_status rpc_accept_create(const struct rpc_accept_options *options,
                            struct rpc_accept **ret_accept, struct kv_error *err) KV_MUST_CHECK;
kv_status rpc_accept_start(struct rpc_accept *accept, struct kv_error *err) KV_MUST_CHECK;

/* Port of `listen`; 0 without one. */
int rpc_accept_port(const struct rpc_accept *accept);

/* Any thread. */
void rpc_accept_counts(struct rpc_accept *accept, struct rpc_accept_counts *ret_counts);
/* Any thread: why new connections are not taken now; NULL: they are. */
const char *rpc_accept_trouble(struct rpc_accept *accept);

/* Main thread: no connection is handed on after it; the socket file is gone.  Twice is fine. */
void rpc_accept_stop(struct rpc_accept *accept);

/* Stops it first. */
void rpc_accept_destroy(struct rpc_accept *accept);
