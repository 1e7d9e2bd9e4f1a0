/*
 * One call over gRPC C core, from packed request to decoded answer, and the table of methods.
 *
 * Unary calls and server streams are the same code: a unary answer is a stream of one message.
 * Three things in flight, each with its own tag: what we send together with the initial metadata,
 * one message at a time, and the status.  The initial metadata must be asked for: without it C core
 * never completes a receive of a message.  Every call has a deadline, so plucking without one ends.
 */

#include "tools/client/client_failure.h"

#include "proto/health.pb-c.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The longest answer is a page of sessions; the longest request, a prompt, is 4 MiB. */
#define MESSAGE_BYTES_MAX (8 << 20)

struct client {
    grpc_channel *channel;
    grpc_completion_queue *queue;
    char *authorization; /* NULL: none is sent. */
    char *endpoint;
    uint32_t timeout_ms;
};

struct method {
    const char *path;
    const ProtobufCMessageDescriptor *request;
    const ProtobufCMessageDescriptor *answer;
};

#define SESSION "/cached.session.v1.SessionService/"
#define ADMIN "/cached.admin.v1.AdminService/"

#define SESSION_METHOD(name, prefix)                                                               \
    {                                                                                              \
        SESSION name, &cached__session__v1__##prefix##_request__descriptor,                        \
            &cached__session__v1__##prefix##_response__descriptor                                  \
    }
#define ADMIN_METHOD(name, prefix)                                                                 \
    {                                                                                              \
        ADMIN name, &cached__admin__v1__##prefix##_request__descriptor,                            \
            &cached__admin__v1__##prefix##_response__descriptor                                    \
    }

static const struct method methods[CLIENT_METHOD_COUNT] = {
    [CLIENT_OPEN_SESSION] = SESSION_METHOD("OpenSession", open_session),
    [CLIENT_LOOKUP] = SESSION_METHOD("Lookup", lookup),
    [CLIENT_PREFILL] = SESSION_METHOD("Prefill", prefill),
    [CLIENT_DECODE] = SESSION_METHOD("Decode", decode),
    [CLIENT_CHECKPOINT] = SESSION_METHOD("Checkpoint", checkpoint),
    [CLIENT_WAIT_DURABLE] = SESSION_METHOD("WaitDurable", wait_durable),
    [CLIENT_ROLLBACK] = SESSION_METHOD("Rollback", rollback),
    [CLIENT_FORK] = SESSION_METHOD("Fork", fork),
    [CLIENT_COMPACT] = SESSION_METHOD("Compact", compact),
    [CLIENT_PIN] = SESSION_METHOD("Pin", pin),
    [CLIENT_TOUCH] = SESSION_METHOD("Touch", touch),
    [CLIENT_GET_USAGE] = SESSION_METHOD("GetUsage", get_usage),
    [CLIENT_CLOSE_SESSION] = SESSION_METHOD("CloseSession", close_session),
    [CLIENT_LIST_SESSIONS] = SESSION_METHOD("ListSessions", list_sessions),
    [CLIENT_GET_SESSION] = SESSION_METHOD("GetSession", get_session),
    [CLIENT_GET_STATS] = ADMIN_METHOD("GetStats", get_stats),
    [CLIENT_GET_CONFIG] = ADMIN_METHOD("GetConfig", get_config),
    [CLIENT_ADVANCE_CLOCK] = ADMIN_METHOD("AdvanceClock", advance_clock),
    [CLIENT_SCRUB] = ADMIN_METHOD("Scrub", scrub),
    [CLIENT_DISK_USAGE] = ADMIN_METHOD("DiskUsage", disk_usage),
    [CLIENT_DELETE_SESSION] = SESSION_METHOD("DeleteSession", delete_session),
    [CLIENT_ERASE_USER] = ADMIN_METHOD("EraseUser", erase_user),
    [CLIENT_ROTATE_KEY] = ADMIN_METHOD("RotateKey", rotate_key),
    [CLIENT_WHY] = ADMIN_METHOD("Why", why),
    [CLIENT_PURGE_MODEL] = ADMIN_METHOD("PurgeModel", purge_model),
    [CLIENT_SET_QUOTA] = ADMIN_METHOD("SetQuota", set_quota),
    [CLIENT_GET_QUOTA] = ADMIN_METHOD("GetQuota", get_quota),
    [CLIENT_DELETE_QUOTA] = ADMIN_METHOD("DeleteQuota", delete_quota),
    [CLIENT_SET_PLAN] = ADMIN_METHOD("SetPlan", set_plan),
    [CLIENT_LIST_PLANS] = ADMIN_METHOD("ListPlans", list_plans),
    [CLIENT_LIST_USERS] = ADMIN_METHOD("ListUsers", list_users),
};

static const struct method health_method = {
    "/grpc.health.v1.Health/Check",
    &grpc__health__v1__health_check_request__descriptor,
    &grpc__health__v1__health_check_response__descriptor,
};

/* One call while it runs.  Owned by: the caller's stack. */
struct call {
    struct client *client;
    const struct method *method;
    grpc_call *call;
    grpc_byte_buffer *request;
    grpc_metadata authorization;
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice text;
    const char *error_text; /* C core's own story; freed with gpr_free. */
    bool bad_answer;        /* A message did not decode. */
};

enum { TAG_SEND = 1, TAG_STATUS, TAG_MESSAGE };

static void *tag_of(int tag)
{
    return (void *)(uintptr_t)tag;
}

bool client_endpoint_valid(const char *endpoint)
{
    if (strncmp(endpoint, "unix:", 5) == 0) return endpoint[5] != '\0';
    const char *colon = strrchr(endpoint, ':');
    if (!colon || colon == endpoint || strstr(endpoint, "//")) return false;
    const size_t digits = strspn(colon + 1, "0123456789");
    if (digits == 0 || digits > 5 || colon[1 + digits] != '\0') return false;
    return strtol(colon + 1, NULL, 10) <= 65535;
}

static void log_nothing(gpr_log_func_args *args)
{
    (void)args;
}

struct client *client_create(const struct client_options *options)
{
    assert(client_endpoint_valid(options->endpoint));
    assert(options->timeout_ms > 0);

    struct client *client = calloc(1, sizeof(*client));
    if (!client) return NULL;
    /* A failed call is told once, by us; C core's own lines would stand beside it. */
    gpr_set_log_function(log_nothing);
    grpc_init();

    const size_t token_bytes = options->token ? strlen(options->token) : 0;
    client->timeout_ms = options->timeout_ms;
    client->endpoint = strdup(options->endpoint);
    if (!client->endpoint) goto fail;
    if (token_bytes > 0) {
        client->authorization = malloc(token_bytes + sizeof("Bearer "));
        if (!client->authorization) goto fail;
        (void)snprintf(client->authorization, token_bytes + sizeof("Bearer "), "Bearer %s",
                       options->token);
    }

    grpc_arg args[] = {
        {GRPC_ARG_INTEGER,
         (char *)(uintptr_t)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         {.integer = MESSAGE_BYTES_MAX}},
        {GRPC_ARG_INTEGER,
         (char *)(uintptr_t)GRPC_ARG_MAX_SEND_MESSAGE_LENGTH,
         {.integer = MESSAGE_BYTES_MAX}},
        /* A retry of a lost answer is the caller's decision. */
        {GRPC_ARG_INTEGER, (char *)(uintptr_t)GRPC_ARG_ENABLE_RETRIES, {.integer = 0}},
    };
    const grpc_channel_args channel_args = {sizeof(args) / sizeof(args[0]), args};
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    client->channel = grpc_channel_create(client->endpoint, credentials, &channel_args);
    grpc_channel_credentials_release(credentials);
    client->queue = grpc_completion_queue_create_for_pluck(NULL);
    if (!client->channel || !client->queue) goto fail;
    return client;

fail:
    client_destroy(client);
    return NULL;
}

void client_destroy(struct client *client)
{
    if (!client) return;
    if (client->channel) grpc_channel_destroy(client->channel);
    if (client->queue) {
        grpc_completion_queue_shutdown(client->queue);
        grpc_completion_queue_destroy(client->queue);
    }
    free(client->authorization);
    free(client->endpoint);
    free(client);
    grpc_shutdown_blocking();
}

static void start(struct call *call, const grpc_op *ops, size_t count, int tag)
{
    const grpc_call_error error = grpc_call_start_batch(call->call, ops, count, tag_of(tag), NULL);
    assert(error == GRPC_CALL_OK);
}

static bool wait_for(struct call *call, int tag)
{
    const grpc_event event = grpc_completion_queue_pluck(call->client->queue, tag_of(tag),
                                                         gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    assert(event.type == GRPC_OP_COMPLETE);
    return event.success != 0;
}

static grpc_byte_buffer *pack(const ProtobufCMessage *message)
{
    const size_t bytes = protobuf_c_message_get_packed_size(message);
    grpc_slice slice = grpc_slice_malloc(bytes);
    (void)protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

/* NULL: not a message of that type. */
static ProtobufCMessage *unpack(const ProtobufCMessageDescriptor *type, grpc_byte_buffer *buffer)
{
    grpc_byte_buffer_reader reader;

    if (!grpc_byte_buffer_reader_init(&reader, buffer)) return NULL;
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, GRPC_SLICE_LENGTH(slice),
                                                          GRPC_SLICE_START_PTR(slice));
    grpc_slice_unref(slice);
    grpc_byte_buffer_reader_destroy(&reader);
    return message;
}

static void call_start(struct call *call, const ProtobufCMessage *request)
{
    struct client *client = call->client;
    const gpr_timespec deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                     gpr_time_from_millis((int64_t)client->timeout_ms, GPR_TIMESPAN));

    call->call = grpc_channel_create_call(
        client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->queue,
        grpc_slice_from_static_string(call->method->path), NULL, deadline, NULL);
    assert(call->call);
    call->request = pack(request);
    grpc_metadata_array_init(&call->initial);
    grpc_metadata_array_init(&call->trailing);

    grpc_op send[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                       {.op = GRPC_OP_SEND_MESSAGE},
                       {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                       {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    if (client->authorization) {
        call->authorization.key = grpc_slice_from_static_string("authorization");
        call->authorization.value = grpc_slice_from_static_string(client->authorization);
        send[0].data.send_initial_metadata.count = 1;
        send[0].data.send_initial_metadata.metadata = &call->authorization;
    }
    send[1].data.send_message.send_message = call->request;
    send[3].data.recv_initial_metadata.recv_initial_metadata = &call->initial;
    start(call, send, 4, TAG_SEND);

    grpc_op status = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    status.data.recv_status_on_client.trailing_metadata = &call->trailing;
    status.data.recv_status_on_client.status = &call->code;
    status.data.recv_status_on_client.status_details = &call->text;
    status.data.recv_status_on_client.error_string = &call->error_text;
    start(call, &status, 1, TAG_STATUS);
}

/* Takes each message; false: no more are wanted. */
typedef bool take_fn(void *context, ProtobufCMessage *message);

/* Receives until the stream ends. */
static void call_receive(struct call *call, take_fn *take, void *context)
{
    bool wanted = true;

    for (;;) {
        grpc_byte_buffer *buffer = NULL;
        grpc_op receive = {.op = GRPC_OP_RECV_MESSAGE};
        receive.data.recv_message.recv_message = &buffer;
        start(call, &receive, 1, TAG_MESSAGE);
        (void)wait_for(call, TAG_MESSAGE);
        if (!buffer) return;

        ProtobufCMessage *message = wanted ? unpack(call->method->answer, buffer) : NULL;
        grpc_byte_buffer_destroy(buffer);
        if (!wanted) continue;
        if (!message) call->bad_answer = true;
        wanted = message && take(context, message);
        if (!wanted) (void)grpc_call_cancel(call->call, NULL);
    }
}

static void say_failure(const struct call *call, struct client_failure *failure)
{
    const uint8_t *details = NULL;
    size_t details_bytes = 0;
    char text[320];
    const int text_count = (int)KV_MIN(GRPC_SLICE_LENGTH(call->text), sizeof(text) - 1);

    for (size_t i = 0; i < call->trailing.count; i++) {
        const grpc_metadata *entry = &call->trailing.metadata[i];
        if (grpc_slice_str_cmp(entry->key, "grpc-status-details-bin") != 0) continue;
        details = GRPC_SLICE_START_PTR(entry->value);
        details_bytes = GRPC_SLICE_LENGTH(entry->value);
    }
    (void)snprintf(text, sizeof(text), "%.*s", text_count,
                   (const char *)GRPC_SLICE_START_PTR(call->text));
    client_failure_fill(failure, (int)call->code, text, details, details_bytes);

    if (call->bad_answer) {
        (void)snprintf(failure->text, sizeof(failure->text),
                       "the daemon at %s sent an answer that is not %s", call->client->endpoint,
                       call->method->answer->name);
        failure->code = CLIENT_INTERNAL;
    } else if (failure->reason[0] == '\0' && failure->code == CLIENT_UNAVAILABLE) {
        /* C core's sentence names sockets and errors three levels deep. */
        (void)snprintf(failure->text, sizeof(failure->text),
                       "no daemon answers at %s: is cached running, and is --endpoint right?",
                       call->client->endpoint);
    } else if (failure->reason[0] == '\0' && failure->code == CLIENT_DEADLINE_EXCEEDED) {
        (void)snprintf(failure->text, sizeof(failure->text),
                       "the daemon at %s gave no answer within %u ms", call->client->endpoint,
                       call->client->timeout_ms);
    }
}

static bool run_call(struct client *client, const struct method *method,
                     const ProtobufCMessage *request, take_fn *take, void *context,
                     struct client_failure *ret_failure)
{
    struct call call = {.client = client, .method = method};

    assert(request->descriptor == method->request);
    call_start(&call, request);
    call_receive(&call, take, context);
    (void)wait_for(&call, TAG_SEND);
    (void)wait_for(&call, TAG_STATUS);

    const bool ok = call.code == GRPC_STATUS_OK && !call.bad_answer;
    memset(ret_failure, 0, sizeof(*ret_failure));
    if (!ok) say_failure(&call, ret_failure);

    grpc_metadata_array_destroy(&call.initial);
    grpc_metadata_array_destroy(&call.trailing);
    grpc_slice_unref(call.text);
    gpr_free((void *)(uintptr_t)call.error_text);
    grpc_byte_buffer_destroy(call.request);
    grpc_call_unref(call.call);
    return ok;
}

/* A unary call: one message is the answer. */
static bool take_one(void *context, ProtobufCMessage *message)
{
    ProtobufCMessage **answer = context;

    if (*answer) client_free(*answer);
    *answer = message;
    return true;
}

static bool run_unary(struct client *client, const struct method *method,
                      const ProtobufCMessage *request, void *ret_answer,
                      struct client_failure *ret_failure)
{
    ProtobufCMessage *answer = NULL;

    if (run_call(client, method, request, take_one, &answer, ret_failure) && answer) {
        memcpy(ret_answer, &answer, sizeof(answer));
        return true;
    }
    if (answer) client_free(answer);
    if (ret_failure->code == CLIENT_OK) {
        client_failure_fill(ret_failure, CLIENT_INTERNAL, "the call ended without an answer", NULL,
                            0);
    }
    return false;
}

bool client_call(struct client *client, enum client_method method, const ProtobufCMessage *request,
                 void *ret_answer, struct client_failure *ret_failure)
{
    assert(method < CLIENT_METHOD_COUNT);
    assert(method != CLIENT_DECODE);
    return run_unary(client, &methods[method], request, ret_answer, ret_failure);
}

struct stream {
    client_message_fn *message_fn;
    void *context;
};

static bool take_each(void *context, ProtobufCMessage *message)
{
    const struct stream *stream = context;
    const bool wanted = stream->message_fn(stream->context, message);

    client_free(message);
    return wanted;
}

bool client_stream(struct client *client, enum client_method method,
                   const ProtobufCMessage *request, client_message_fn *message_fn, void *context,
                   struct client_failure *ret_failure)
{
    struct stream stream = {message_fn, context};

    assert(method == CLIENT_DECODE);
    return run_call(client, &methods[method], request, take_each, &stream, ret_failure);
}

void client_free(void *answer)
{
    if (answer) protobuf_c_message_free_unpacked(answer, NULL);
}

bool client_health(struct client *client, const char *service, bool *ret_serving,
                   struct client_failure *ret_failure)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    Grpc__Health__V1__HealthCheckResponse *answer = NULL;

    request.service = (char *)(uintptr_t)service;
    if (!run_unary(client, &health_method, &request.base, &answer, ret_failure)) return false;
    *ret_serving =
        answer->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    client_free(answer);
    return true;
}
