#pragma once

/* Every method the daemon knows by name: who may call it, and who answers.  Pure; any thread. */

#include "cached/request.h"

enum rpc_answer {
    RPC_BY_SHARD,
    RPC_BY_CONFIG, /* GetConfig: answered on the rpc thread. */
    RPC_BY_CHECK,  /* Health. */
    RPC_BY_WATCH,
    RPC_BY_LATER, /* Known, not in this version. */
    RPC_BY_UNKNOWN,
};

struct rpc_method {
    const char *path;  /* "/package.Service/Method" */
    const char *name;  /* "Prefill" */
    const char *event; /* "prefill": its line in the log. */
    enum rpc_answer answer;
    enum request_method request; /* RPC_BY_SHARD. */
    unsigned roles;              /* Bits of enum auth_role; 0: no token needed. */
};

/* Methods with counters of their own: indices of rpc_method_at(). */
#define RPC_METHOD_CONFIG ((unsigned)REQUEST_METHOD_COUNT)
#define RPC_METHOD_REGISTERED (RPC_METHOD_CONFIG + 1) /* Those below are registered with gRPC. */
#define RPC_METHOD_CHECK (RPC_METHOD_CONFIG + 1)
#define RPC_METHOD_WATCH (RPC_METHOD_CONFIG + 2)
#define RPC_METHOD_OTHER (RPC_METHOD_CONFIG + 3) /* Later and unknown ones together. */
#define RPC_METHOD_COUNT (RPC_METHOD_CONFIG + 4)

/* The first REQUEST_METHOD_COUNT stand in the order of enum request_method. */
const struct rpc_method *rpc_method_at(unsigned index);

/* For a path that is not registered: health, later or unknown; *ret_index for its counters. */
const struct rpc_method *rpc_method_find(const char *path, size_t bytes, unsigned *ret_index);
