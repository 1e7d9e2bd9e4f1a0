/*
 * grpc.health.v1: Check and Watch.
 *
 * The daemon is one process, so all its services stand and fall together: serving, unless it has
 * not begun to, the shard says what is wrong, no connection can be taken, or a stop has begun.
 * Watch answers at once and then when that changes; the rpc thread compares once a second.  No
 * token is asked for: a probe has none, and learns one bit.
 */

#include "cached/rpc/rpc_internal.h"

#include "cached/shard/shard.h"
#include "health.pb-c.h"

#include <assert.h>
#include <grpc/byte_buffer.h>
#include <string.h>

enum { SERVICE_NONE = -1 };

static int service_find(const char *name)
{
    static const char *const services[] = {
        "",
        "cached.session.v1.SessionService",
        "cached.admin.v1.AdminService",
        "grpc.health.v1.Health",
    };
    for (int i = 0; i < (int)KV_ARRAY_COUNT(services); i++) {
        if (strcmp(services[i], name) == 0) return i;
    }
    return SERVICE_NONE;
}

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;

static int health_now(struct rpc_server *server, int service)
{
    if (service == SERVICE_NONE)
        return GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    struct shard *shard = atomic_load(&server->shard);
    if (atomic_load(&server->stops) > 0 || shard == NULL || shard_health(shard) != NULL ||
        rpc_accept_trouble(server->accept) != NULL)
        return GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
    return GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
}

/* The service asked for.  NULL: the call is answered as malformed. */
static const char *service_name(struct rpc_call *call)
{
    struct rpc_pieces pieces;
    struct rpc_split split;
    uint64_t bytes;
    uint8_t *rest = kv_arena_alloc(call->req.arena, KV_SESSION_NAME_MAX * 4);
    Grpc__Health__V1__HealthCheckRequest *message = NULL;

    if (rest != NULL && rpc_call_pieces(call, &pieces, &bytes) &&
        rpc_wire_split(pieces, 0, rest, KV_SESSION_NAME_MAX * 4, &split) == KV_OK)
        message = grpc__health__v1__health_check_request__unpack(NULL, split.rest_bytes, rest);
    if (message == NULL) {
        rpc_call_fail(call, KV_REASON_MESSAGE_MALFORMED,
                      "The message is no grpc.health.v1.HealthCheckRequest.");
        return NULL;
    }
    const char *name = kv_arena_strdup(call->req.arena, message->service, strlen(message->service));
    grpc__health__v1__health_check_request__free_unpacked(message, NULL);
    assert(name != NULL); /* A small message in a fresh arena. */
    return name;
}

static void answer_check(struct rpc_call *call, const char *name)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    const int service = service_find(name);
    if (service == SERVICE_NONE) {
        rpc_call_fail(call, KV_REASON_UNKNOWN_SERVICE, "There is no service \"%.128s\".", name);
        return;
    }
    response.status = (serving_status)health_now(call->server, service);
    rpc_call_reply(call, &response.base);
}

static void send(struct rpc_call *call, int health)
{
    Grpc__Health__V1__HealthCheckResponse message = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    message.status = (serving_status)health;
    grpc_slice slice =
        grpc_slice_malloc(grpc__health__v1__health_check_response__get_packed_size(&message));
    (void)grpc__health__v1__health_check_response__pack(&message, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);

    call->last_health = health;
    call->is_sending = true;
    rpc_call_send(call, buffer);
}

/* Brings a watcher up to date; ends it when its caller has gone, or the daemon goes. */
static void push(struct rpc_call *call)
{
    assert(call->is_watching);
    if (call->is_sending) return;
    const bool is_gone = atomic_load(&call->req.cancelled);
    const int health = health_now(call->server, call->service);
    if (!is_gone && health != call->last_health) {
        send(call, health);
        return;
    }
    if (!is_gone && call->server->stop_ns == 0) return;
    call->is_watching = false;
    call->server->watchers--;
    rpc_call_fail(call, is_gone ? KV_REASON_CANCELLED : KV_REASON_SHUTTING_DOWN,
                  "The watch has ended.");
}

void rpc_health_received(struct rpc_call *call)
{
    const char *name = service_name(call);
    if (name == NULL) return;
    if (call->method->answer == RPC_BY_CHECK) {
        answer_check(call, name);
        return;
    }
    if (call->server->watchers == KV_WATCHERS_MAX) {
        rpc_call_fail(call, KV_REASON_QUEUE_FULL, "There are %u watchers already.",
                      KV_WATCHERS_MAX);
        return;
    }
    call->service = service_find(name);
    call->last_health = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__UNKNOWN;
    call->is_watching = true;
    call->server->watchers++;
    push(call);
}

void rpc_health_streamed(struct rpc_call *call, bool ok)
{
    call->is_sending = false;
    if (!ok) atomic_store(&call->req.cancelled, true);
    push(call);
}

void rpc_health_tick(struct rpc_server *server)
{
    for (struct rpc_call *call = server->calls; call != NULL;) {
        struct rpc_call *next = call->next;
        if (call->is_watching) push(call);
        call = next;
    }
}
