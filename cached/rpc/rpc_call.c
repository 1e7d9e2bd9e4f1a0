/*
 * One call: accept, identify, decode, hand to the shard, answer, free.
 *
 * Two threads start batches on a call: the rpc thread until shard_post(), then the shard thread,
 * whose request_reply() starts the last batch, so the caller waits for one hop only.   All tags
 * return on the rpc thread, which frees the call once the last one is back; after the line that
 * starts the last batch the call may be gone.
 *
 * A stream message must have left before the last batch is started (gRPC allows one send at a time,
 * and stream_msg would be in the shard's mailbox when the request is freed).  So a reply that comes
 * while one is under way waits for it; a client that does not read is cut off after its deadline.
 */

#include "cached/rpc/rpc_internal.h"

#include "cached/auth.h"
#include "cached/rpc/rpc_decode.h"
#include "cached/shard/shard.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/time.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static struct rpc_call *call_of(struct request *req)
{
    return KV_CONTAINER_OF(req, struct rpc_call, req);
}

/* gRPC's queue orders what one thread wrote before a batch and another reads after its tag; these
 * two say so to whoever reads the code, and to a sanitizer that cannot see into the library. */
static void hand_over(struct rpc_call *call)
{
    atomic_fetch_add_explicit(&call->batches, 1, memory_order_release);
}

static void take_over(const struct rpc_call *call)
{
    const unsigned batches = atomic_load_explicit(&call->batches, memory_order_acquire);
    assert(batches > 0);
}

static void start_batch(struct rpc_call *call, const grpc_op *ops, size_t count,
                        struct rpc_tag *tag)
{
    grpc_call *const batch_of = call->call; /* The tag's thread may free ours from here on. */
    hand_over(call);
    const grpc_call_error error = grpc_call_start_batch(batch_of, ops, count, tag, NULL);
    assert(error == GRPC_CALL_OK); /* Anything else is our misuse; a dead peer is no error here. */
}

static void call_free(struct rpc_call *call)
{
    if (call->payload != NULL) grpc_byte_buffer_destroy(call->payload);
    if (call->reply != NULL) grpc_byte_buffer_destroy(call->reply);
    if (call->has_trailing) grpc_slice_unref(call->trailing.value);
    grpc_slice_unref(call->status_text);
    grpc_metadata_array_destroy(&call->metadata);
    if (call->has_details) grpc_call_details_destroy(&call->details);
    if (call->call != NULL) grpc_call_unref(call->call);
    kv_arena_destroy(call->req.arena); /* The call itself is in it. */
}

static void drop(struct rpc_call *call)
{
    assert(call->holds > 0);
    if (--call->holds > 0) return;
    struct rpc_server *server = call->server;
    if (call->prev != NULL) {
        call->prev->next = call->next;
    } else {
        server->calls = call->next;
    }
    if (call->next != NULL) call->next->prev = call->prev;
    server->call_count--;
    call_free(call);
}

/* One line a request, without tokens and without names. */
static void log_finished(const struct rpc_call *call)
{
    const struct request *req = &call->req;
    const struct request_out *out = &req->out;
    const struct request_times *t = &out->times;
    static const char *const plans[] = {"none", "exact", "replay", "miss"};
    const bool is_run = req->method == REQUEST_PREFILL || req->method == REQUEST_DECODE;
    char session[17] = "-";

    if (call->method->answer != RPC_BY_SHARD) return;
    if (!is_run && !kv_log_wants(call->server->options.log, KV_LOG_DEBUG)) return;
    if (req->in.session_name != NULL) {
        for (unsigned i = 0; i < 8; i++)
            (void)snprintf(session + 2 * i, 3, "%02x", req->in.session.bytes[i]);
    }
    kv_log(call->server->options.log, is_run ? KV_LOG_INFO : KV_LOG_DEBUG, call->method->event,
           "session=%s plan=%s reason=%s hit=%" PRIu32 " replay=%" PRIu32 " computed=%" PRIu32
           " sent=%" PRIu32 " queue_us=%" PRIu64 " lookup_us=%" PRIu64 " read_us=%" PRIu64
           " run_us=%" PRIu64 " commit_us=%" PRIu64 " status=%s%s",
           session, plans[out->outcome & 3], kv_reason_info(out->reason)->name, out->hit_tokens,
           out->replayed_tokens, out->computed_tokens, out->tokens_sent, t->queue_ns / 1000,
           t->lookup_ns / 1000, t->read_ns / 1000, t->run_ns / 1000, t->commit_ns / 1000,
           out->failure.failed ? kv_reason_info(out->failure.reason)->name : "ok",
           out->repeated ? " repeated=1" : "");
}

static void on_replied(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = KV_CONTAINER_OF(tag, struct rpc_call, replied);
    struct rpc_server *server = call->server;
    take_over(call);
    (void)ok; /* false: the caller has gone; there is nobody to tell. */
    call->is_replied = true;
    if (call->is_posted) server->stats.requests_inflight--;
    rpc_stats_add(&server->stats, call->method_index, call->code,
                  kv_clock_stopwatch_ns() - call->req.out.times.arrived_ns);
    log_finished(call);
    drop(call);
}

static void on_closed(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = KV_CONTAINER_OF(tag, struct rpc_call, closed);
    take_over(call);
    (void)ok;
    if (call->close_cancelled != 0 && !call->is_replied) {
        atomic_store(&call->req.cancelled, true);
        if (call->is_posted) shard_poke(atomic_load(&call->server->shard));
    }
    drop(call);
}

static void on_streamed(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = KV_CONTAINER_OF(tag, struct rpc_call, streamed);
    take_over(call);
    grpc_byte_buffer_destroy(call->stream);
    call->stream = NULL;
    if (call->method->answer == RPC_BY_WATCH) {
        rpc_health_streamed(call, ok);
        return;
    }
    if (!ok) atomic_store(&call->req.cancelled, true);
    kv_mailbox_post(call->server->options.shard_mailbox, &call->req.stream_msg);
}

static void on_received(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = KV_CONTAINER_OF(tag, struct rpc_call, received);
    take_over(call);
    (void)ok; /* false: the payload is NULL. */
    rpc_health_received(call);
}

void rpc_call_receive(struct rpc_call *call)
{
    const grpc_op op = {
        .op = GRPC_OP_RECV_MESSAGE,
        .data.recv_message.recv_message = &call->payload,
    };
    start_batch(call, &op, 1, &call->received);
}

static grpc_op initial_metadata(void)
{
    return (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA};
}

void rpc_call_send(struct rpc_call *call, grpc_byte_buffer *message)
{
    grpc_op ops[2];
    size_t count = 0;
    assert(call->stream == NULL);
    call->stream = message;
    if (!call->initial_sent) ops[count++] = initial_metadata();
    call->initial_sent = true;
    ops[count++] = (grpc_op){
        .op = GRPC_OP_SEND_MESSAGE,
        .data.send_message.send_message = message,
    };
    start_batch(call, ops, count, &call->streamed);
}

static grpc_byte_buffer *pack(const ProtobufCMessage *message)
{
    grpc_slice slice = grpc_slice_malloc(protobuf_c_message_get_packed_size(message));
    (void)protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

/* The status of a failed request: code, sentence, and google.rpc.Status as trailing metadata. */
static void fill_failure(struct rpc_call *call)
{
    struct request *req = &call->req;
    const struct kv_bytes details = rpc_encode_failure(req);
    call->code = (unsigned)kv_reason_info(req->out.failure.reason)->grpc_code;
    call->status_text = grpc_slice_from_copied_string(req->out.failure.text);
    if (details.data == NULL) return;
    call->trailing = (grpc_metadata){
        .key = grpc_slice_from_static_string("grpc-status-details-bin"),
        .value = grpc_slice_from_copied_buffer((const char *)details.data, details.count),
    };
    call->has_trailing = true;
}

static grpc_op watch_close(struct rpc_call *call)
{
    return (grpc_op){
        .op = GRPC_OP_RECV_CLOSE_ON_SERVER,
        .data.recv_close_on_server.cancelled = &call->close_cancelled,
    };
}

/* Calls that may run long are watched from the start, so that a caller who left stops the work. The
 * others are over before that could help; their close is received with the answer, which saves the
 * shard from meeting the rpc thread on the connection. */
static bool runs_long(const struct rpc_call *call)
{
    if (call->has_details) return true;
    if (call->method->answer != RPC_BY_SHARD) return false;
    return call->req.method == REQUEST_PREFILL || call->req.method == REQUEST_DECODE ||
           call->req.method == REQUEST_CHECKPOINT || call->req.method == REQUEST_WAIT_DURABLE;
}

void rpc_call_reply(struct rpc_call *call, const ProtobufCMessage *response)
{
    grpc_op ops[4];
    size_t count = 0;

    if (!call->initial_sent) ops[count++] = initial_metadata();
    if (response == NULL) {
        fill_failure(call);
    } else {
        call->reply = pack(response);
        ops[count++] = (grpc_op){
            .op = GRPC_OP_SEND_MESSAGE,
            .data.send_message.send_message = call->reply,
        };
    }
    ops[count++] = (grpc_op){
        .op = GRPC_OP_SEND_STATUS_FROM_SERVER,
        .data.send_status_from_server =
            {
                .status = (grpc_status_code)call->code,
                .status_details = call->code == 0 ? NULL : &call->status_text,
                .trailing_metadata = &call->trailing,
                .trailing_metadata_count = call->has_trailing ? 1 : 0,
            },
    };
    if (!call->watched) ops[count++] = watch_close(call);
    start_batch(call, ops, count, &call->replied);
}

void rpc_call_fail(struct rpc_call *call, enum kv_reason reason, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    request_fail(&call->req, reason, NULL, NULL, NULL, "%s", text);
    rpc_call_reply(call, NULL);
}

static void reply_now(struct rpc_call *call)
{
    struct request *req = &call->req;
    const ProtobufCMessage *response = NULL;
    /* gRPC cancels a call at its deadline, as if the caller had gone. */
    if (req->out.failure.failed && req->out.failure.reason == KV_REASON_CANCELLED &&
        kv_clock_stopwatch_ns() >= req->deadline_ns)
        request_fail(req, KV_REASON_DEADLINE, NULL, NULL, NULL, NULL);
    if (!req->out.failure.failed) {
        response = rpc_encode(req, &call->server->options.about, call->snapshot);
        if (response == NULL)
            request_fail(req, KV_REASON_QUEUE_FULL, NULL, NULL, NULL,
                         "The answer does not fit the memory of one request.");
    }
    rpc_call_reply(call, response);
}

void request_reply(struct request *req)
{
    struct rpc_call *call = call_of(req);
    kv_thread_assert(KV_THREAD_SHARD);
    assert(!call->reply_wanted);
    if (req->stream_busy) {
        call->reply_wanted = true;
        return;
    }
    reply_now(call);
}

/* On the shard thread, between rpc and the shard's own function. */
static void stream_returned(struct kv_msg *msg)
{
    struct request *req = KV_CONTAINER_OF(msg, struct request, stream_msg);
    struct rpc_call *call = call_of(req);
    kv_thread_assert(KV_THREAD_SHARD);
    req->stream_busy = false;
    req->stream_msg.run = call->shard_run;
    if (call->reply_wanted) {
        reply_now(call);
        return;
    }
    req->stream_msg.run(msg);
}

void request_stream(struct request *req, uint32_t position, const uint32_t *tokens,
                    const uint32_t *logits_crc, uint32_t count)
{
    struct rpc_call *call = call_of(req);
    kv_thread_assert(KV_THREAD_SHARD);
    assert(req->method == REQUEST_DECODE);
    assert(!req->stream_busy);
    assert(req->stream_msg.run != NULL);

    grpc_slice slice = grpc_slice_malloc(rpc_stream_bytes(position, count));
    rpc_stream_encode(position, tokens, logits_crc, count, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *message = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);

    call->shard_run = req->stream_msg.run;
    req->stream_msg.run = stream_returned;
    req->stream_busy = true;
    rpc_call_send(call, message);
}

/* The bearer token: exactly one "authorization", and its user's role allows the method. */
static bool identify(struct rpc_call *call)
{
    struct request *req = &call->req;
    const struct auth_identity *identity = NULL;
    const grpc_metadata *found = NULL;
    size_t found_count = 0;

    for (size_t i = 0; i < call->metadata.count; i++) {
        if (grpc_slice_str_cmp(call->metadata.metadata[i].key, "authorization") != 0) continue;
        found = &call->metadata.metadata[i];
        found_count++;
    }
    kv_status status = KV_MISS;
    if (found_count == 1)
        status = auth_check(call->server->options.auth, GRPC_SLICE_START_PTR(found->value),
                            GRPC_SLICE_LENGTH(found->value), &identity);
    if (status != KV_OK) {
        request_fail(req, status == KV_MISS ? KV_REASON_TOKEN_MISSING : KV_REASON_TOKEN_UNKNOWN,
                     "authorization", "Bearer TOKEN", NULL, NULL);
        return false;
    }
    if ((call->method->roles & identity->roles) == 0) {
        char has[AUTH_ROLES_TEXT_MAX], needs[AUTH_ROLES_TEXT_MAX];
        auth_roles_text(identity->roles, has);
        auth_roles_text(call->method->roles, needs);
        request_fail(
            req, KV_REASON_ROLE_DENIED, "role", kv_arena_strdup(req->arena, needs, strlen(needs)),
            kv_arena_strdup(req->arena, has, strlen(has)),
            "A token of role %s may not call %s; it needs %s.", has, call->method->name, needs);
        return false;
    }
    req->user = identity->user;
    req->user_name = identity->user_name;
    req->is_ops = (identity->roles & AUTH_ROLE_OPS) != 0;
    return true;
}

bool rpc_call_pieces(struct rpc_call *call, struct rpc_pieces *ret_pieces, uint64_t *ret_bytes)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *slice;
    uint32_t count = 0;
    if (call->payload == NULL || !grpc_byte_buffer_reader_init(&reader, call->payload))
        return false;
    while (grpc_byte_buffer_reader_peek(&reader, &slice) != 0)
        count++;
    grpc_byte_buffer_reader_destroy(&reader);

    struct kv_bytes *items = kv_arena_alloc(call->req.arena, count * sizeof(*items));
    if (items == NULL || !grpc_byte_buffer_reader_init(&reader, call->payload)) return false;
    *ret_bytes = 0;
    for (uint32_t i = 0; i < count && grpc_byte_buffer_reader_peek(&reader, &slice) != 0; i++) {
        items[i] = (struct kv_bytes){GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice)};
        *ret_bytes += items[i].count;
    }
    grpc_byte_buffer_reader_destroy(&reader);
    *ret_pieces = (struct rpc_pieces){items, count};
    return true;
}

static bool decode(struct rpc_call *call)
{
    struct request *req = &call->req;
    struct rpc_pieces pieces;
    uint64_t bytes;
    if (!rpc_call_pieces(call, &pieces, &bytes)) {
        request_fail(req, KV_REASON_MESSAGE_MALFORMED, "message", NULL, NULL,
                     "The call has no message.");
        return false;
    }
    if (bytes > KV_MESSAGE_BYTES_MAX) {
        request_fail(req, KV_REASON_MESSAGE_TOO_LARGE, "message",
                     request_u64(req, KV_MESSAGE_BYTES_MAX), request_u64(req, bytes), NULL);
        return false;
    }
    if (call->method->answer == RPC_BY_CONFIG) return true; /* Its message has no fields. */
    return rpc_decode(req, pieces, &call->server->options.about);
}

/* gRPC's deadline on our clock; the server's own where the client names none or a later one. */
static uint64_t deadline_ns(const struct rpc_call *call, uint64_t now_ns)
{
    const uint64_t longest = (uint64_t)KV_DEADLINE_MAX_MS * 1000000u;
    const gpr_timespec mono = gpr_convert_clock_type(call->deadline, GPR_CLOCK_MONOTONIC);
    if (gpr_time_cmp(mono, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) return now_ns + longest;
    const gpr_timespec rest = gpr_time_sub(mono, gpr_now(GPR_CLOCK_MONOTONIC));
    if (rest.tv_sec < 0) return now_ns;
    if ((uint64_t)rest.tv_sec > KV_DEADLINE_MAX_MS / 1000) return now_ns + longest;
    const uint64_t left = (uint64_t)rest.tv_sec * 1000000000u + (uint64_t)rest.tv_nsec;
    return now_ns + KV_MIN(left, longest);
}

/* Before there is a shard: how far the start has come is all that can be told. */
static void answer_starting(struct rpc_call *call)
{
    struct request *req = &call->req;
    const struct rpc_server *server = call->server;
    req->out.stats =
        rpc_stats_starting(req->arena, atomic_load(&server->phase), atomic_load(&server->percent));
    assert(req->out.stats != NULL); /* An empty arena has room for it. */
    if (req->method != REQUEST_GET_STATS) {
        request_fail(req, KV_REASON_STARTING, NULL, NULL, NULL, "The daemon is %s.",
                     req->out.stats->health);
        req->out.failure.retry_ms = RPC_RETRY_MS;
    }
    reply_now(call);
}

static void post(struct rpc_call *call)
{
    struct request *req = &call->req;
    struct rpc_server *server = call->server;
    struct shard *shard = atomic_load(&server->shard);

    if (req->method == REQUEST_GET_STATS) {
        struct rpc_accept_counts connections;
        rpc_accept_counts(server->accept, &connections);
        call->snapshot = rpc_stats_snapshot(&server->stats, &connections, req->arena);
        assert(call->snapshot != NULL); /* An empty arena has room for it. */
        call->snapshot->trouble = rpc_accept_trouble(server->accept);
    }
    if (shard == NULL) {
        answer_starting(call);
        return;
    }
    call->is_posted = true;
    server->stats.requests_inflight++;
    const kv_status status = shard_post(shard, req);
    if (status == KV_OK) return; /* The shard's now. */

    call->is_posted = false;
    server->stats.requests_inflight--;
    if (status == KV_SHUTDOWN) {
        rpc_call_fail(call, KV_REASON_SHUTTING_DOWN, "The daemon is stopping.");
        return;
    }
    request_fail(req, KV_REASON_QUEUE_FULL, "requests", request_u64(req, KV_REQUESTS_INFLIGHT_MAX),
                 request_u64(req, KV_REQUESTS_INFLIGHT_MAX), NULL);
    req->out.failure.retry_ms = RPC_RETRY_MS;
    rpc_call_reply(call, NULL);
}

static void handle(struct rpc_call *call)
{
    struct rpc_server *server = call->server;
    struct request *req = &call->req;

    if (!identify(call) || !decode(call)) {
        rpc_call_reply(call, NULL);
        return;
    }
    if (call->method->answer == RPC_BY_CONFIG) {
        const ProtobufCMessage *response =
            rpc_encode_config(req->arena, server->options.settings, server->options.setting_count);
        assert(response != NULL); /* The table is small. */
        rpc_call_reply(call, response);
        return;
    }
    /* Everything needed is in the arena: 4 MiB less while the request runs. */
    grpc_byte_buffer_destroy(call->payload);
    call->payload = NULL;
    post(call);
}

static void handle_unregistered(struct rpc_call *call)
{
    const char *path = (const char *)GRPC_SLICE_START_PTR(call->details.method);
    const size_t bytes = GRPC_SLICE_LENGTH(call->details.method);

    call->method = rpc_method_find(path, bytes, &call->method_index);
    switch (call->method->answer) {
    case RPC_BY_CHECK:
    case RPC_BY_WATCH:
        rpc_call_receive(call);
        return;
    case RPC_BY_LATER:
        rpc_call_fail(call, KV_REASON_NOT_IMPLEMENTED, "%s is not in this version.",
                      call->method->path + 1);
        return;
    case RPC_BY_SHARD:
    case RPC_BY_CONFIG:
    case RPC_BY_UNKNOWN:
        break;
    }
    rpc_call_fail(call, KV_REASON_UNKNOWN_METHOD, "There is no method \"%.*s\".",
                  (int)KV_MIN(bytes, 128u), path);
}

static void on_accepted(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = KV_CONTAINER_OF(tag, struct rpc_call, accepted);
    struct rpc_server *server = call->server;
    server->expected[call->method_index]--;
    if (!ok) { /* The server stops: there is no call. */
        call_free(call);
        return;
    }
    const uint32_t method_index = call->method_index;
    call->next = server->calls;
    if (call->next != NULL) call->next->prev = call;
    server->calls = call;
    server->call_count++;
    call->watched = runs_long(call);
    call->holds = call->watched ? 2 : 1; /* closed, replied. */
    call->req.out.times.arrived_ns = kv_clock_stopwatch_ns();
    if (call->has_details) call->deadline = call->details.deadline;
    call->req.deadline_ns = deadline_ns(call, call->req.out.times.arrived_ns);

    if (call->watched) {
        const grpc_op op = watch_close(call);
        start_batch(call, &op, 1, &call->closed);
    }
    if (call->has_details) {
        handle_unregistered(call);
    } else {
        handle(call);
    }
    rpc_call_expect(server, method_index);
}

static struct rpc_call *call_create(struct rpc_server *server, unsigned method_index)
{
    struct kv_arena *arena = kv_arena_create(KV_REQUEST_BYTES_MAX);
    struct rpc_call *call = arena == NULL ? NULL : kv_arena_alloc(arena, sizeof(*call));
    if (call == NULL) {
        kv_arena_destroy(arena);
        return NULL;
    }
    call->server = server;
    call->method_index = method_index;
    call->method = rpc_method_at(method_index);
    call->req.arena = arena;
    call->req.method = call->method->request;
    call->status_text = grpc_empty_slice();
    grpc_metadata_array_init(&call->metadata);
    call->accepted.run = on_accepted;
    call->closed.run = on_closed;
    call->received.run = on_received;
    call->streamed.run = on_streamed;
    call->replied.run = on_replied;
    return call;
}

void rpc_call_expect(struct rpc_server *server, unsigned method_index)
{
    struct rpc_call *call = call_create(server, method_index);
    if (call == NULL) return; /* Out of memory: the tick asks again. */

    grpc_call_error error;
    if (method_index == RPC_METHOD_OTHER) {
        call->has_details = true;
        grpc_call_details_init(&call->details);
        error = grpc_server_request_call(server->grpc, &call->call, &call->details, &call->metadata,
                                         server->queue, server->queue, &call->accepted);
    } else {
        error = grpc_server_request_registered_call(
            server->grpc, server->handles[method_index], &call->call, &call->deadline,
            &call->metadata, &call->payload, server->queue, server->queue, &call->accepted);
    }
    assert(error == GRPC_CALL_OK);
    server->expected[method_index]++;
}
