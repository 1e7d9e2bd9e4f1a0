/*
 * The client loop of the rpc benchmark.
 *
 * Deliberately bare, and the same for both servers: a registered method, one batch a call with all
 * six operations, a pluck queue, nothing packed or unpacked inside the measured stretch.  So the
 * ratio of two results is a ratio of servers.
 */

#include "tools/cachectl/bench_call.h"

#include "kvstore/base/clock.h"

#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GO_ON_CALLS 64u /* How often it is asked whether to go on. */
#define CALL_SECONDS 10

struct bench_call {
    grpc_channel *channel;
    grpc_completion_queue *queue;
    void *method;
    grpc_slice request;
    grpc_metadata authorization;
    char header[320];
};

struct bench_call *bench_call_create(const char *endpoint, const char *path, const char *token,
                                     const uint8_t *request, size_t request_bytes)
{
    struct bench_call *call = calloc(1, sizeof(*call));

    if (!call) return NULL;
    grpc_init();
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    call->channel = grpc_channel_create(endpoint, credentials, NULL);
    grpc_channel_credentials_release(credentials);
    call->queue = grpc_completion_queue_create_for_pluck(NULL);
    call->method = grpc_channel_register_call(call->channel, path, NULL, NULL);
    call->request = grpc_slice_from_copied_buffer((const char *)request, request_bytes);
    (void)snprintf(call->header, sizeof(call->header), "Bearer %s", token);
    call->authorization.key = grpc_slice_from_static_string("authorization");
    call->authorization.value = grpc_slice_from_static_string(call->header);
    return call;
}

void bench_call_destroy(struct bench_call *call)
{
    if (!call) return;
    grpc_slice_unref(call->request);
    grpc_channel_destroy(call->channel);
    grpc_completion_queue_shutdown(call->queue);
    grpc_completion_queue_destroy(call->queue);
    free(call);
    grpc_shutdown_blocking();
}

static bool call_once(struct bench_call *call)
{
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *answer = NULL;
    grpc_status_code code = GRPC_STATUS_UNKNOWN;
    grpc_slice text = grpc_empty_slice();
    grpc_op ops[6];

    /* Sending empties a byte buffer, so each call has its own; the bytes are shared. */
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&call->request, 1);
    const gpr_timespec deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                               gpr_time_from_seconds(CALL_SECONDS, GPR_TIMESPAN));
    grpc_call *handle = grpc_channel_create_registered_call(
        call->channel, NULL, GRPC_PROPAGATE_DEFAULTS, call->queue, call->method, deadline, NULL);
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    /* A server whose socket is there may not listen yet. */
    ops[0].flags =
        GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    ops[0].data.send_initial_metadata.count = 1;
    ops[0].data.send_initial_metadata.metadata = &call->authorization;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = request;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &answer;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &trailing;
    ops[5].data.recv_status_on_client.status = &code;
    ops[5].data.recv_status_on_client.status_details = &text;

    const grpc_call_error error = grpc_call_start_batch(handle, ops, 6, handle, NULL);
    assert(error == GRPC_CALL_OK);
    (void)grpc_completion_queue_pluck(call->queue, handle, gpr_inf_future(GPR_CLOCK_REALTIME),
                                      NULL);
    const bool ok = code == GRPC_STATUS_OK && answer != NULL;
    if (answer) grpc_byte_buffer_destroy(answer);
    grpc_byte_buffer_destroy(request);
    grpc_slice_unref(text);
    grpc_metadata_array_destroy(&initial);
    grpc_metadata_array_destroy(&trailing);
    grpc_call_unref(handle);
    return ok;
}

bool bench_call_run(struct bench_call *call, struct bench_progress *progress, uint64_t *ret_ns,
                    uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (i % GO_ON_CALLS == 0 && !bench_go_on(progress)) return false;
        const uint64_t began = kv_clock_stopwatch_ns();
        if (!call_once(call)) return false;
        ret_ns[i] = kv_clock_stopwatch_ns() - began;
    }
    return true;
}
