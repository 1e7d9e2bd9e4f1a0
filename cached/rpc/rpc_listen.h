#pragma once

/* Listening sockets of our own: a unix socket, and the addresses of one host:port.  Owned by: main;
 * the accept thread closes them when a stop begins. */

#include "kvstore/base/status.h"

#include <stdbool.h>
#include <sys/types.h>

#define RPC_LISTEN_MAX 4u /* The unix socket, and what one name stands for. */

struct rpc_listen {
    int fds[RPC_LISTEN_MAX]; /* Non-blocking, listening. */
    unsigned count;
    int port;           /* Of host:port; 0 without one. */
    const char *socket; /* Borrowed; NULL: no file to take away. */
    dev_t socket_dev;   /* The file that this process made. */
    ino_t socket_ino;
};

/* Empty texts: none of that kind.  KV_INVALID: in use, no address of this machine, no right to it;
 * nothing listens then.  `socket` outlives the struct. */
kv_status rpc_listen_open(struct rpc_listen *listen, const char *socket, const char *address,
                          struct kv_error *err) KV_MUST_CHECK;

/* Takes the socket's file away if it is still the one that was made.  Twice is fine. */
void rpc_listen_close(struct rpc_listen *listen);
