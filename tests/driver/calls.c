/*
 * Between plain structs and the messages of the API.
 *
 * Answers are copied out at once, so the rest of the test knows nothing of protobuf.  Nothing is
 * judged here but what cannot be stored: a decode stream whose messages do not follow each other is
 * remembered as torn.
 */

#include "tests/driver/calls.h"

#include "kvstore/base/bytes.h"

#include <stdio.h>
#include <string.h>

const char *ex_outcome_name(enum ex_outcome outcome)
{
    static const char *const names[] = {"no outcome", "EXACT", "REPLAY", "MISS"};
    return (unsigned)outcome < 4 ? names[outcome] : "unknown outcome";
}

static char *text_of(const char *text)
{
    return (char *)(uintptr_t)text; /* protobuf-c wants char *, and only reads. */
}

static ProtobufCBinaryData bytes_of(const void *bytes, size_t count)
{
    return (ProtobufCBinaryData){.len = count, .data = (uint8_t *)(uintptr_t)bytes};
}

static bool failed(const char *method, const struct client_failure *failure, char *why)
{
    char text[512];
    client_failure_print(failure, text, sizeof(text));
    (void)snprintf(why, EX_WHY_BYTES, "%s: %s", method, text);
    return false;
}

static void copy_text(char to[32], const char *from)
{
    (void)snprintf(to, 32, "%s", from == NULL ? "" : from);
}

static bool copy_id(struct ex_id *to, ProtobufCBinaryData from)
{
    if (from.len != sizeof(to->bytes)) return false;
    memcpy(to->bytes, from.data, sizeof(to->bytes));
    return true;
}

static void copy_checkpoint(struct ex_checkpoint *to,
                            const Cached__Session__V1__CheckpointInfo *from)
{
    *to = (struct ex_checkpoint){
        .position = from->position,
        .window = from->window_level == CACHED__SESSION__V1__LEVEL__LEVEL_RAM,
        .durable = from->rows_level == CACHED__SESSION__V1__LEVEL__LEVEL_SSD,
        .expired = from->rows_expire_ms == 1,
        .branch = from->kind == CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_BRANCH,
        .approximate = from->approximate,
        .approx_from = from->approx_from,
    };
    (void)copy_id(&to->id, from->id);
    to->has_parent = copy_id(&to->parent, from->parent_id);
    if (from->digest.len == 32) memcpy(to->digest, from->digest.data, 32);
}

static uint32_t copy_checkpoints(struct ex_checkpoint *to, uint32_t most,
                                 Cached__Session__V1__CheckpointInfo **from, size_t count)
{
    const uint32_t copied = count < most ? (uint32_t)count : most;
    for (uint32_t i = 0; i < copied; i++)
        copy_checkpoint(&to[i], from[i]);
    return copied;
}

bool ex_call_open(struct client *client, const char *session, char *why)
{
    return ex_call_open_ttl(client, session, 0, why);
}

bool ex_call_open_ttl(struct client *client, const char *session, uint64_t ttl_ms, char *why)
{
    Cached__Session__V1__OpenSessionRequest request =
        CACHED__SESSION__V1__OPEN_SESSION_REQUEST__INIT;
    Cached__Session__V1__OpenSessionResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    request.ttl_ms = ttl_ms;
    if (!client_call(client, CLIENT_OPEN_SESSION, &request.base, &answer, &failure))
        return failed("OpenSession", &failure, why);
    client_free(answer);
    return true;
}

bool ex_call_view(struct client *client, const char *session, struct ex_view *ret_view, char *why)
{
    Cached__Session__V1__GetSessionRequest request = CACHED__SESSION__V1__GET_SESSION_REQUEST__INIT;
    Cached__Session__V1__GetSessionResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    if (!client_call(client, CLIENT_GET_SESSION, &request.base, &answer, &failure))
        return failed("GetSession", &failure, why);
    *ret_view = (struct ex_view){
        .live = answer->session->live,
        .idle_ms = answer->session->idle_ms,
        .head_position = answer->session->head_position,
        .epoch = answer->epoch,
    };
    ret_view->has_head = copy_id(&ret_view->head, answer->head_checkpoint_id);
    const bool fits = answer->n_checkpoints <= EX_POINTS_MAX;
    ret_view->point_count = copy_checkpoints(ret_view->points, EX_POINTS_MAX, answer->checkpoints,
                                             answer->n_checkpoints);
    client_free(answer);
    if (!fits) (void)snprintf(why, EX_WHY_BYTES, "GetSession: more checkpoints than were made");
    return fits;
}

bool ex_call_lookup(struct client *client, const char *session, const uint32_t *ids, uint32_t count,
                    struct ex_lookup_answer *ret_answer, char *why)
{
    Cached__Session__V1__LookupRequest request = CACHED__SESSION__V1__LOOKUP_REQUEST__INIT;
    Cached__Session__V1__LookupResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    request.tokens = bytes_of(ids, sizeof(*ids) * count);
    if (!client_call(client, CLIENT_LOOKUP, &request.base, &answer, &failure))
        return failed("Lookup", &failure, why);
    *ret_answer = (struct ex_lookup_answer){.outcome = (enum ex_outcome)answer->outcome,
                                            .hit_tokens = answer->hit_tokens,
                                            .stored_tokens = answer->stored_tokens};
    ret_answer->has_resumed = copy_id(&ret_answer->resumed, answer->checkpoint_id);
    client_free(answer);
    return true;
}

static void copy_prefill(struct ex_prefill_answer *to,
                         const Cached__Session__V1__PrefillResponse *from)
{
    *to = (struct ex_prefill_answer){
        .outcome = (enum ex_outcome)from->outcome,
        .prompt_tokens = from->prompt_tokens,
        .hit_tokens = from->hit_tokens,
        .replayed_tokens = from->replayed_tokens,
        .computed_tokens = from->computed_tokens,
        .stored_tokens = from->stored_tokens,
        .approximate = from->approximate,
        .approx_from = from->approx_from,
        .weakened = from->weakened,
        .hbm_tokens = from->hbm_tokens,
        .ssd_tokens = from->ssd_tokens,
    };
    copy_text(to->reason, from->reason);
    copy_text(to->save_reason, from->save_reason);
    to->has_resumed = copy_id(&to->resumed, from->resumed_checkpoint_id);
    to->point_count =
        copy_checkpoints(to->points, EX_CALL_POINTS_MAX, from->checkpoints, from->n_checkpoints);
}

bool ex_call_prefill(struct client *client, const struct ex_prefill *call,
                     struct ex_prefill_answer *ret_answer, char *why)
{
    Cached__Session__V1__PrefillRequest request = CACHED__SESSION__V1__PREFILL_REQUEST__INIT;
    Cached__Session__V1__PrefillResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(call->session);
    request.tokens = bytes_of(call->ids, sizeof(*call->ids) * call->count);
    if (call->has_parent)
        request.parent_checkpoint_id = bytes_of(call->parent.bytes, sizeof(call->parent.bytes));
    request.stable_tokens = call->stable_tokens;
    request.n_anchors = call->anchor_count;
    request.anchors = (uint32_t *)(uintptr_t)call->anchors;
    request.no_checkpoint = call->no_checkpoint;
    request.level = (Cached__Session__V1__Level)call->level;
    if (!client_call(client, CLIENT_PREFILL, &request.base, &answer, &failure))
        return failed("Prefill", &failure, why);
    copy_prefill(ret_answer, answer);
    client_free(answer);
    return true;
}

/* ---- Decode ---- */

static void take_end(struct ex_decode_answer *answer, const Cached__Session__V1__DecodeEnd *end)
{
    answer->ended = true;
    answer->stopped = end->finish == CACHED__SESSION__V1__DECODE_END__FINISH__FINISH_STOP;
    answer->end_tokens = end->tokens;
    answer->head_position = end->head_position;
    answer->outcome = (enum ex_outcome)end->outcome;
    copy_text(answer->reason, end->reason);
    copy_text(answer->save_reason, end->save_reason);
    answer->point_count = copy_checkpoints(answer->points, 1, end->checkpoints, end->n_checkpoints);
}

static bool take_message(void *context, const ProtobufCMessage *base)
{
    struct ex_decode_answer *answer = context;
    const Cached__Session__V1__DecodeResponse *message = (const void *)base;
    const uint32_t count = (uint32_t)(message->tokens.len / 4);

    if (answer->ended) answer->torn = true;
    if (count != message->n_logits_crc || answer->count + count > EX_ANSWER_MAX) {
        answer->torn = true;
        return true;
    }
    if (count > 0 && answer->count == 0) answer->first_position = message->position;
    if (count > 0 && message->position != answer->first_position + answer->count)
        answer->torn = true;
    for (uint32_t i = 0; i < count; i++) {
        answer->tokens[answer->count] = kv_load32(message->tokens.data + 4 * (size_t)i);
        answer->crcs[answer->count++] = message->logits_crc[i];
    }
    if (message->end != NULL) take_end(answer, message->end);
    return true;
}

bool ex_call_decode(struct client *client, const struct ex_decode *call,
                    struct ex_decode_answer *ret_answer, char *why)
{
    Cached__Session__V1__DecodeRequest request = CACHED__SESSION__V1__DECODE_REQUEST__INIT;
    struct client_failure failure;
    request.session_id = text_of(call->session);
    request.max_tokens = call->max_tokens;
    request.temperature = call->temperature;
    request.top_p = call->top_p;
    request.top_k = call->top_k;
    request.seed = call->seed;
    request.forced_tokens = bytes_of(call->forced, sizeof(*call->forced) * call->forced_count);
    request.n_stop_tokens = call->stop_count;
    request.stop_tokens = (uint32_t *)(uintptr_t)call->stops;
    request.ignore_eos = call->ignore_eos;
    request.no_checkpoint = call->no_checkpoint;
    request.level = (Cached__Session__V1__Level)call->level;
    *ret_answer = (struct ex_decode_answer){0};
    if (!client_stream(client, CLIENT_DECODE, &request.base, take_message, ret_answer, &failure))
        return failed("Decode", &failure, why);
    return true;
}

/* ---- the others ---- */

bool ex_call_checkpoint(struct client *client, const char *session, enum ex_level level,
                        struct ex_checkpoint *ret_checkpoint, char *why)
{
    Cached__Session__V1__CheckpointRequest request = CACHED__SESSION__V1__CHECKPOINT_REQUEST__INIT;
    Cached__Session__V1__CheckpointResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    request.level = (Cached__Session__V1__Level)level;
    if (!client_call(client, CLIENT_CHECKPOINT, &request.base, &answer, &failure))
        return failed("Checkpoint", &failure, why);
    const bool there = answer->checkpoint != NULL;
    if (there) copy_checkpoint(ret_checkpoint, answer->checkpoint);
    client_free(answer);
    if (!there) (void)snprintf(why, EX_WHY_BYTES, "Checkpoint: the answer names none");
    return there;
}

bool ex_call_wait(struct client *client, const char *session, const struct ex_id *id, char *why)
{
    Cached__Session__V1__WaitDurableRequest request =
        CACHED__SESSION__V1__WAIT_DURABLE_REQUEST__INIT;
    Cached__Session__V1__WaitDurableResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    request.checkpoint_id = bytes_of(id->bytes, sizeof(id->bytes));
    request.level = CACHED__SESSION__V1__LEVEL__LEVEL_SSD;
    if (!client_call(client, CLIENT_WAIT_DURABLE, &request.base, &answer, &failure))
        return failed("WaitDurable", &failure, why);
    const bool reached = answer->rows_level == CACHED__SESSION__V1__LEVEL__LEVEL_SSD;
    client_free(answer);
    if (!reached) (void)snprintf(why, EX_WHY_BYTES, "WaitDurable: OK, but the level is below SSD");
    return reached;
}

bool ex_call_list(struct client *client, struct ex_list *list, char *why)
{
    char token[256] = "";
    list->count = 0;
    do {
        Cached__Session__V1__ListSessionsRequest request =
            CACHED__SESSION__V1__LIST_SESSIONS_REQUEST__INIT;
        Cached__Session__V1__ListSessionsResponse *answer;
        struct client_failure failure;
        request.page_size = 1000;
        request.page_token = token;
        if (!client_call(client, CLIENT_LIST_SESSIONS, &request.base, &answer, &failure))
            return failed("ListSessions", &failure, why);
        for (size_t i = 0; i < answer->n_sessions; i++) {
            if (list->count < list->capacity)
                (void)snprintf(list->names[list->count], EX_NAME_BYTES, "%s",
                               answer->sessions[i]->session_id);
            list->count++;
        }
        (void)snprintf(token, sizeof(token), "%s", answer->next_page_token);
        client_free(answer);
    } while (token[0] != '\0');
    return true;
}

bool ex_call_stats(struct client *client, struct ex_stats *ret_stats, char *why)
{
    Cached__Admin__V1__GetStatsRequest request = CACHED__ADMIN__V1__GET_STATS_REQUEST__INIT;
    Cached__Admin__V1__GetStatsResponse *answer;
    struct client_failure failure;
    if (!client_call(client, CLIENT_GET_STATS, &request.base, &answer, &failure))
        return failed("GetStats", &failure, why);
    *ret_stats = (struct ex_stats){
        .wrong_bytes = answer->wrong_bytes,
        .recovered = answer->recovered_checkpoints,
        .dropped = answer->dropped_checkpoints,
        .checkpoints = answer->checkpoints,
        .page_bytes = (uint32_t)answer->page_bytes,
        .image_bytes = (uint32_t)answer->image_bytes,
    };
    for (size_t i = 0; i < answer->n_counters; i++)
        if (strcmp(answer->counters[i]->name, "cached_lost_batches") == 0)
            ret_stats->lost_batches = (uint64_t)answer->counters[i]->value;
    client_free(answer);
    return true;
}

bool ex_call_rollback(struct client *client, const char *session, const struct ex_id *id,
                      uint32_t *ret_position, char *why)
{
    Cached__Session__V1__RollbackRequest request = CACHED__SESSION__V1__ROLLBACK_REQUEST__INIT;
    Cached__Session__V1__RollbackResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    request.checkpoint_id = bytes_of(id->bytes, sizeof(id->bytes));
    request.keep = true;
    if (!client_call(client, CLIENT_ROLLBACK, &request.base, &answer, &failure))
        return failed("Rollback", &failure, why);
    *ret_position = answer->head_position;
    client_free(answer);
    return true;
}

bool ex_call_close(struct client *client, const char *session, char *why)
{
    Cached__Session__V1__CloseSessionRequest request =
        CACHED__SESSION__V1__CLOSE_SESSION_REQUEST__INIT;
    Cached__Session__V1__CloseSessionResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    if (!client_call(client, CLIENT_CLOSE_SESSION, &request.base, &answer, &failure))
        return failed("CloseSession", &failure, why);
    client_free(answer);
    return true;
}

bool ex_call_delete(struct client *client, const char *session, char *why)
{
    Cached__Session__V1__DeleteSessionRequest request =
        CACHED__SESSION__V1__DELETE_SESSION_REQUEST__INIT;
    Cached__Session__V1__DeleteSessionResponse *answer;
    struct client_failure failure;
    request.session_id = text_of(session);
    if (!client_call(client, CLIENT_DELETE_SESSION, &request.base, &answer, &failure))
        return failed("DeleteSession", &failure, why);
    client_free(answer);
    return true;
}

bool ex_call_advance(struct client *client, uint64_t ms, char *why)
{
    Cached__Admin__V1__AdvanceClockRequest request = CACHED__ADMIN__V1__ADVANCE_CLOCK_REQUEST__INIT;
    Cached__Admin__V1__AdvanceClockResponse *answer;
    struct client_failure failure;
    request.ms = ms;
    if (!client_call(client, CLIENT_ADVANCE_CLOCK, &request.base, &answer, &failure))
        return failed("AdvanceClock", &failure, why);
    client_free(answer);
    return true;
}
