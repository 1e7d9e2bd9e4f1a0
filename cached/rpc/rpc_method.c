/*
 * The methods.
 *
 * Those of later versions are listed by name, so that a client can tell "not yet" from "no such
 * method", and so that a test can check that every method of the .proto files is in one of the two
 * tables.  A path is checked before any token: which methods exist is public.
 */

#include "cached/rpc/rpc_method.h"

#include "cached/auth.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define SESSION "/cached.session.v1.SessionService/"
#define ADMIN "/cached.admin.v1.AdminService/"
#define TRANSFER "/cached.transfer.v1.TransferService/"
#define HEALTH "/grpc.health.v1.Health/"

#define HARNESS AUTH_ROLE_HARNESS
#define OPS AUTH_ROLE_OPS
#define READERS (AUTH_ROLE_OPS | AUTH_ROLE_STATS)

#define BY_SHARD(service, name, event, request, roles)                                             \
    [request] = {service name, name, event, RPC_BY_SHARD, request, roles}

static const struct rpc_method methods[RPC_METHOD_COUNT] = {
    BY_SHARD(SESSION, "OpenSession", "open_session", REQUEST_OPEN_SESSION, HARNESS),
    BY_SHARD(SESSION, "Lookup", "lookup", REQUEST_LOOKUP, HARNESS),
    BY_SHARD(SESSION, "Prefill", "prefill", REQUEST_PREFILL, HARNESS),
    BY_SHARD(SESSION, "Decode", "decode", REQUEST_DECODE, HARNESS),
    BY_SHARD(SESSION, "Checkpoint", "checkpoint", REQUEST_CHECKPOINT, HARNESS),
    BY_SHARD(SESSION, "WaitDurable", "wait_durable", REQUEST_WAIT_DURABLE, HARNESS),
    BY_SHARD(SESSION, "Rollback", "rollback", REQUEST_ROLLBACK, HARNESS),
    BY_SHARD(SESSION, "Compact", "compact", REQUEST_COMPACT, HARNESS),
    BY_SHARD(SESSION, "Pin", "pin", REQUEST_PIN, HARNESS),
    BY_SHARD(SESSION, "Touch", "touch", REQUEST_TOUCH, HARNESS),
    BY_SHARD(SESSION, "GetUsage", "get_usage", REQUEST_GET_USAGE, HARNESS),
    BY_SHARD(SESSION, "Fork", "fork", REQUEST_FORK, HARNESS),
    BY_SHARD(SESSION, "CloseSession", "close_session", REQUEST_CLOSE_SESSION, HARNESS),
    BY_SHARD(SESSION, "ListSessions", "list_sessions", REQUEST_LIST_SESSIONS, HARNESS),
    BY_SHARD(SESSION, "GetSession", "get_session", REQUEST_GET_SESSION, HARNESS),
    BY_SHARD(ADMIN, "GetStats", "get_stats", REQUEST_GET_STATS, READERS),
    BY_SHARD(ADMIN, "AdvanceClock", "advance_clock", REQUEST_ADVANCE_CLOCK, OPS),
    BY_SHARD(ADMIN, "Scrub", "scrub", REQUEST_SCRUB, OPS),
    BY_SHARD(ADMIN, "DiskUsage", "disk_usage", REQUEST_DISK_USAGE, OPS | HARNESS),
    BY_SHARD(SESSION, "DeleteSession", "delete_session", REQUEST_DELETE_SESSION, HARNESS),
    BY_SHARD(ADMIN, "EraseUser", "erase_user", REQUEST_ERASE_USER, OPS),
    BY_SHARD(ADMIN, "RotateKey", "rotate_key", REQUEST_ROTATE_KEY, OPS),
    BY_SHARD(ADMIN, "Why", "why", REQUEST_WHY, OPS | HARNESS),
    BY_SHARD(ADMIN, "PurgeModel", "purge_model", REQUEST_PURGE_MODEL, OPS),
    BY_SHARD(ADMIN, "SetQuota", "set_quota", REQUEST_SET_QUOTA, OPS),
    BY_SHARD(ADMIN, "GetQuota", "get_quota", REQUEST_GET_QUOTA, OPS | HARNESS),
    BY_SHARD(ADMIN, "DeleteQuota", "delete_quota", REQUEST_DELETE_QUOTA, OPS),
    BY_SHARD(ADMIN, "SetPlan", "set_plan", REQUEST_SET_PLAN, OPS),
    BY_SHARD(ADMIN, "ListPlans", "list_plans", REQUEST_LIST_PLANS, OPS),
    BY_SHARD(ADMIN, "ListUsers", "list_users", REQUEST_LIST_USERS, OPS),
    [RPC_METHOD_CONFIG] = {ADMIN "GetConfig", "GetConfig", "get_config", RPC_BY_CONFIG, 0, READERS},
    [RPC_METHOD_CHECK] = {HEALTH "Check", "Check", "check", RPC_BY_CHECK, 0, 0},
    [RPC_METHOD_WATCH] = {HEALTH "Watch", "Watch", "watch", RPC_BY_WATCH, 0, 0},
    [RPC_METHOD_OTHER] = {"", "other", "other", RPC_BY_UNKNOWN, 0, 0},
};

#define LATER(service, name)                                                                       \
    {                                                                                              \
        service name, name, "later", RPC_BY_LATER, 0, 0                                            \
    }

static const struct rpc_method later[] = {
    LATER(ADMIN, "WatchStats"),
    LATER(ADMIN, "Evict"),
    LATER(ADMIN, "PublishPrefix"),
    LATER(ADMIN, "Drain"),
    LATER(ADMIN, "ListNodes"),
    LATER(ADMIN, "Advise"),
    LATER(TRANSFER, "Put"),
    LATER(TRANSFER, "Get"),
    LATER(TRANSFER, "BlockExists"),
    LATER(TRANSFER, "BlockGet"),
    LATER(TRANSFER, "BlockSet"),
    LATER("/grpc.health.v1.Health/", "List"),
};

const struct rpc_method *rpc_method_at(unsigned index)
{
    assert(index < RPC_METHOD_COUNT);
    assert(methods[index].name != NULL);
    return &methods[index];
}

static bool is(const struct rpc_method *method, const char *path, size_t bytes)
{
    return strlen(method->path) == bytes && memcmp(method->path, path, bytes) == 0;
}

const struct rpc_method *rpc_method_find(const char *path, size_t bytes, unsigned *ret_index)
{
    for (unsigned i = RPC_METHOD_CHECK; i <= RPC_METHOD_WATCH; i++) {
        if (!is(&methods[i], path, bytes)) continue;
        *ret_index = i;
        return &methods[i];
    }
    *ret_index = RPC_METHOD_OTHER;
    for (size_t i = 0; i < KV_ARRAY_COUNT(later); i++) {
        if (is(&later[i], path, bytes)) return &later[i];
    }
    return &methods[RPC_METHOD_OTHER];
}
