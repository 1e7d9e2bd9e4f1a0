/*
 * The anchor of the rpc benchmark: the least a server over gRPC C core can do.
 *
 * One thread, one queue, registered calls, no hop, no decoding: it answers the first bytes of what
 * it got.  It is this program again, started as a process of its own, so client and server do not
 * share C core's threads.
 */

#include "tools/cachectl/bench_call.h"

#include "tools/client/client.h"

#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

/* Calls that may be waiting; more than the benchmark ever has. */
#define CALLS 16

enum phase { PHASE_WAITING, PHASE_ANSWERING };

struct echo {
    grpc_server *server;
    grpc_completion_queue *queue;
    void *method;
    size_t reply_bytes;
};

/* One slot of a call; waits for the next when its call has ended. */
struct slot {
    enum phase phase;
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_byte_buffer *request, *reply;
    int cancelled;
};

static void wait_for_call(const struct echo *echo, struct slot *slot)
{
    memset(slot, 0, sizeof(*slot));
    grpc_metadata_array_init(&slot->metadata);
    const grpc_call_error error = grpc_server_request_registered_call(
        echo->server, echo->method, &slot->call, &slot->deadline, &slot->metadata, &slot->request,
        echo->queue, echo->queue, slot);
    assert(error == GRPC_CALL_OK);
}

static void answer(const struct echo *echo, struct slot *slot)
{
    grpc_byte_buffer_reader reader;
    grpc_op ops[4];

    slot->phase = PHASE_ANSWERING;
    grpc_slice reply = grpc_slice_malloc(echo->reply_bytes);
    memset(GRPC_SLICE_START_PTR(reply), 0, echo->reply_bytes);
    if (slot->request && grpc_byte_buffer_reader_init(&reader, slot->request)) {
        grpc_slice body = grpc_byte_buffer_reader_readall(&reader);
        const size_t have = GRPC_SLICE_LENGTH(body);
        memcpy(GRPC_SLICE_START_PTR(reply), GRPC_SLICE_START_PTR(body),
               have < echo->reply_bytes ? have : echo->reply_bytes);
        grpc_slice_unref(body);
        grpc_byte_buffer_reader_destroy(&reader);
    }
    slot->reply = grpc_raw_byte_buffer_create(&reply, 1);
    grpc_slice_unref(reply);

    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    ops[0].data.recv_close_on_server.cancelled = &slot->cancelled;
    ops[1].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[2].op = GRPC_OP_SEND_MESSAGE;
    ops[2].data.send_message.send_message = slot->reply;
    ops[3].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[3].data.send_status_from_server.status = GRPC_STATUS_OK;
    const grpc_call_error error = grpc_call_start_batch(slot->call, ops, 4, slot, NULL);
    assert(error == GRPC_CALL_OK);
}

static void finish(struct slot *slot)
{
    grpc_metadata_array_destroy(&slot->metadata);
    if (slot->request) grpc_byte_buffer_destroy(slot->request);
    if (slot->reply) grpc_byte_buffer_destroy(slot->reply);
    if (slot->call) grpc_call_unref(slot->call);
}

int bench_echo_serve(const char *endpoint, size_t reply_bytes)
{
    struct echo echo = {.reply_bytes = reply_bytes};
    struct slot *slots = calloc(CALLS, sizeof(*slots));

    if (!slots) return CLIENT_EXIT_FAILED;
    /* The benchmark stops this process; if it died, nobody else would. */
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    grpc_init();
    echo.queue = grpc_completion_queue_create_for_next(NULL);
    echo.server = grpc_server_create(NULL, NULL);
    grpc_server_register_completion_queue(echo.server, echo.queue, NULL);
    echo.method = grpc_server_register_method(echo.server, BENCH_ECHO_PATH, NULL,
                                              GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
    grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
    const int port = grpc_server_add_http2_port(echo.server, endpoint, credentials);
    grpc_server_credentials_release(credentials);
    if (port == 0) {
        free(slots);
        return CLIENT_EXIT_FAILED;
    }
    grpc_server_start(echo.server);
    for (int i = 0; i < CALLS; i++)
        wait_for_call(&echo, &slots[i]);
    for (;;) {
        const grpc_event event =
            grpc_completion_queue_next(echo.queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        struct slot *slot = event.tag;
        assert(event.type == GRPC_OP_COMPLETE);
        if (slot->phase == PHASE_WAITING && event.success) {
            answer(&echo, slot);
            continue;
        }
        finish(slot);
        wait_for_call(&echo, slot);
    }
}
