/*
 * The server, its loop, and the stop.
 *
 * gRPC does not listen here, rpc_accept.c does, and hands over connected sockets.
 *
 * The loop handles one event at a time and looks around once a second: health, calls past their
 * deadline, and, while stopping, the grace time.  A stop is complete when gRPC says that it is
 * down, every call is freed and every request for a call has come back.
 */

#include "cached/rpc/rpc_internal.h"

#include "kvstore/base/clock.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define TICK_MS 1000
#define TICK_STOPPING_MS 50

/* gRPC's own messages are about connections of clients: not ours to print. */
static void drop_grpc_log(gpr_log_func_args *args)
{
    (void)args;
}

static grpc_server *create_grpc_server(void)
{
    grpc_resource_quota *quota = grpc_resource_quota_create("cached");
#define INT_ARG(name, number)                                                                      \
    {.type = GRPC_ARG_INTEGER, .key = (char *)(name), .value.integer = (int)(number)}
    grpc_arg args[] = {
        /* A little above ours, so that a message just too large gets our reason. */
        INT_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, KV_MESSAGE_BYTES_MAX + (1u << 20)),
        INT_ARG(GRPC_ARG_MAX_METADATA_SIZE, KV_METADATA_BYTES_MAX),
        INT_ARG(GRPC_ARG_MAX_CONCURRENT_STREAMS, KV_STREAMS_MAX),
        INT_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, 60000),
        INT_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000),
        INT_ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        INT_ARG(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 30000),
        INT_ARG(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 300000),
        INT_ARG(GRPC_ARG_MAX_CONNECTION_AGE_MS, 3600000),
        INT_ARG(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, 300000),
        /* Identity only: a small message must not become a large one. */
        INT_ARG(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
        {
            .type = GRPC_ARG_POINTER,
            .key = (char *)GRPC_ARG_RESOURCE_QUOTA,
            .value.pointer = {quota, grpc_resource_quota_arg_vtable()},
        },
    };
#undef INT_ARG
    const grpc_channel_args channel_args = {KV_ARRAY_COUNT(args), args};
    grpc_resource_quota_resize(quota, KV_RECEIVE_BYTES_MAX); /* Over all connections. */
    grpc_server *server = grpc_server_create(&channel_args, NULL);
    grpc_resource_quota_unref(quota); /* The server holds it now. */
    return server;
}

/* On the accept thread.  A connection that gRPC cannot take is closed by it, in silence.  TLS would
 * have its own port here, which gRPC listens on: credentials other than these take no descriptor.
 */
static void on_connected(void *context, int fd)
{
    struct rpc_server *server = context;
    grpc_server_add_channel_from_fd(server->grpc, fd, server->plain);
}

static kv_status create_accept(struct rpc_server *server, struct kv_error *err)
{
    const struct rpc_accept_options options = {
        .socket = server->options.socket,
        .listen = server->options.listen,
        .log = server->options.log,
        .reserved_files = server->options.reserved_files,
        .connected = on_connected,
        .context = server,
    };
    return rpc_accept_create(&options, &server->accept, err);
}

static void on_shutdown(struct rpc_tag *tag, bool ok)
{
    struct rpc_server *server = KV_CONTAINER_OF(tag, struct rpc_server, shutdown);
    (void)ok;
    server->is_down = true;
}

kv_status rpc_server_create(const struct rpc_options *options, struct rpc_server **ret_server,
                            struct kv_error *err)
{
    kv_status status;
    struct rpc_server *server = calloc(1, sizeof(*server));
    if (server == NULL) return KV_FAIL(err, KV_NOMEM, "create the server");
    server->options = *options;
    atomic_store(&server->phase, "starting");
    server->shutdown.run = on_shutdown;

    gpr_set_log_function(drop_grpc_log);
    grpc_init();
    server->plain = grpc_insecure_server_credentials_create();
    server->queue = grpc_completion_queue_create_for_next(NULL);
    server->grpc = create_grpc_server();
    server->done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (server->done_fd < 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "create the server's eventfd");
        goto fail;
    }
    grpc_server_register_completion_queue(server->grpc, server->queue, NULL);
    for (unsigned i = 0; i < RPC_METHOD_REGISTERED; i++) {
        server->handles[i] =
            grpc_server_register_method(server->grpc, rpc_method_at(i)->path, NULL,
                                        GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
        assert(server->handles[i] != NULL);
    }
    status = create_accept(server, err);
    if (status != KV_OK) goto fail;
    grpc_server_start(server->grpc);
    server->started = true;
    status = rpc_accept_start(server->accept, err);
    if (status != KV_OK) goto fail;
    *ret_server = server;
    return KV_OK;

fail:
    rpc_server_destroy(server);
    return status;
}

void rpc_server_progress(struct rpc_server *server, const char *phase, uint32_t percent)
{
    atomic_store(&server->percent, percent);
    atomic_store(&server->phase, phase);
}

void rpc_server_serve(struct rpc_server *server, struct shard *shard)
{
    atomic_store(&server->shard, shard);
}

int rpc_server_port(const struct rpc_server *server)
{
    return rpc_accept_port(server->accept);
}

int rpc_server_done_fd(const struct rpc_server *server)
{
    return server->done_fd;
}

/* A call whose deadline passed long ago, or whose caller does not read: end it for the shard. */
static void cut_late_calls(struct rpc_server *server, uint64_t now_ns)
{
    for (struct rpc_call *call = server->calls; call != NULL; call = call->next) {
        if (!call->is_posted || call->is_replied || call->was_cut) continue;
        if (now_ns < call->req.deadline_ns + RPC_DEADLINE_GRACE_NS) continue;
        call->was_cut = true;
        (void)grpc_call_cancel_with_status(call->call, GRPC_STATUS_DEADLINE_EXCEEDED,
                                           "The deadline has passed.", NULL);
    }
}

static void tick(struct rpc_server *server)
{
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    const unsigned stops = atomic_load(&server->stops);

    if (stops > 0 && server->stop_ns == 0) server->stop_ns = now_ns;
    rpc_health_tick(server);
    cut_late_calls(server, now_ns);
    if (stops == 0) {
        for (unsigned i = 0; i < RPC_METHOD_COUNT; i++) {
            if (i == RPC_METHOD_CHECK || i == RPC_METHOD_WATCH) continue;
            for (uint32_t n = server->expected[i]; n < RPC_EXPECTED; n++)
                rpc_call_expect(server, i);
        }
        return;
    }
    /* Without calls only connections are left, and a client that is not polling would keep its own
     * until the grace time ends.  Two ticks, so that the last answers are on their way. */
    server->idle_ticks = server->call_count > 0 ? 0 : server->idle_ticks + 1;
    const bool is_due =
        stops > 1 || server->idle_ticks >= 2 || now_ns - server->stop_ns >= RPC_STOP_GRACE_NS;
    if (!is_due || server->is_cancelled) return;
    server->is_cancelled = true;
    grpc_server_cancel_all_calls(server->grpc);
}

static bool is_over(const struct rpc_server *server)
{
    if (!server->is_down || server->call_count > 0) return false;
    for (unsigned i = 0; i < RPC_METHOD_COUNT; i++) {
        if (server->expected[i] > 0) return false;
    }
    return true;
}

void rpc_server_run(void *context)
{
    struct rpc_server *server = context;
    uint64_t tick_ns = 0;
    kv_thread_assert(KV_THREAD_RPC);

    while (!is_over(server)) {
        const bool stopping = atomic_load(&server->stops) > 0;
        const int64_t wait_ms = stopping ? TICK_STOPPING_MS : TICK_MS;
        const uint64_t now_ns = kv_clock_stopwatch_ns();
        if (now_ns - tick_ns >= (uint64_t)wait_ms * 1000000u) {
            tick(server);
            tick_ns = now_ns;
        }
        const gpr_timespec until =
            gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(wait_ms, GPR_TIMESPAN));
        const grpc_event event = grpc_completion_queue_next(server->queue, until, NULL);
        if (event.type != GRPC_OP_COMPLETE) continue;
        struct rpc_tag *tag = event.tag;
        tag->run(tag, event.success != 0);
    }
    const int rc = eventfd_write(server->done_fd, 1);
    assert(rc == 0);
}

void rpc_server_stop(struct rpc_server *server)
{
    if (atomic_fetch_add(&server->stops, 1) > 0) return;
    /* Before gRPC's shutdown, so that it sees no connection afterwards; some milliseconds. */
    rpc_accept_stop(server->accept);
    /* Its tag, and those of the calls that were expected, wake the loop. */
    grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->shutdown);
}

/* A server whose loop never ran has nothing but its own shutdown to wait for. */
static void shut_down_alone(struct rpc_server *server)
{
    grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->shutdown);
    grpc_server_cancel_all_calls(server->grpc);
    while (!server->is_down) {
        const grpc_event event =
            grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        struct rpc_tag *tag = event.tag;
        tag->run(tag, event.success != 0);
    }
}

void rpc_server_destroy(struct rpc_server *server)
{
    if (server == NULL) return;
    rpc_accept_destroy(server->accept);
    if (!server->is_down) shut_down_alone(server);
    grpc_completion_queue_shutdown(server->queue);
    while (
        grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
        GRPC_QUEUE_SHUTDOWN)
        continue;
    grpc_server_destroy(server->grpc);
    grpc_completion_queue_destroy(server->queue);
    grpc_server_credentials_release(server->plain);
    grpc_shutdown_blocking();
    if (server->done_fd >= 0) (void)close(server->done_fd);
    free(server);
}
