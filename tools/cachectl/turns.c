/*
 * From plain arguments to the messages of the session API and back.
 *
 * Token lists travel as u32 little-endian, which is how they lie in memory here, so a prompt is
 * sent from where it is.
 */

#include "tools/cachectl/turns.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token lists are sent as they lie");

#define CLOCK_STEP_MS_MAX (365ull * 86400000)

static ProtobufCBinaryData token_bytes(const uint32_t *tokens, uint32_t count)
{
    return (ProtobufCBinaryData){
        .len = (size_t)count * 4,
        .data = (uint8_t *)(uintptr_t)tokens,
    };
}

static char *name_of(const char *session)
{
    return (char *)(uintptr_t)session; /* protobuf-c has no const; it does not write. */
}

const char *turn_outcome_name(enum turn_outcome outcome)
{
    static const char *const names[TURN_OUTCOME_COUNT] = {"NONE", "EXACT", "REPLAY", "MISS"};
    return names[outcome];
}

static enum turn_outcome outcome_of(Cached__Session__V1__Outcome outcome)
{
    switch (outcome) {
    case CACHED__SESSION__V1__OUTCOME__OUTCOME_EXACT:
        return TURN_EXACT;
    case CACHED__SESSION__V1__OUTCOME__OUTCOME_REPLAY:
        return TURN_REPLAY;
    case CACHED__SESSION__V1__OUTCOME__OUTCOME_MISS:
        return TURN_MISS;
    default:
        return TURN_NONE;
    }
}

bool turn_open(struct client *client, const char *session, bool *ret_created,
               uint32_t *ret_vocab_tokens, struct client_failure *failure)
{
    Cached__Session__V1__OpenSessionRequest request =
        CACHED__SESSION__V1__OPEN_SESSION_REQUEST__INIT;
    Cached__Session__V1__OpenSessionResponse *answer = NULL;

    request.session_id = name_of(session);
    if (!client_call(client, CLIENT_OPEN_SESSION, &request.base, &answer, failure)) return false;
    *ret_created = answer->created;
    *ret_vocab_tokens = answer->vocab_tokens;
    client_free(answer);
    return true;
}

static bool run_prefill(struct client *client, const Cached__Session__V1__PrefillRequest *request,
                        struct turn_prefill *ret, struct client_failure *failure)
{
    Cached__Session__V1__PrefillResponse *answer = NULL;

    if (!client_call(client, CLIENT_PREFILL, &request->base, &answer, failure)) return false;
    *ret = (struct turn_prefill){
        .outcome = outcome_of(answer->outcome),
        .prompt_tokens = answer->prompt_tokens,
        .hit_tokens = answer->hit_tokens,
        .replayed_tokens = answer->replayed_tokens,
        .computed_tokens = answer->computed_tokens,
        .stored_tokens = answer->stored_tokens,
        .hbm_tokens = answer->hbm_tokens,
        .ssd_tokens = answer->ssd_tokens,
        .diverged = answer->diverged,
        .diverged_at = answer->diverged_at,
    };
    (void)snprintf(ret->reason, sizeof(ret->reason), "%s", answer->reason);
    (void)snprintf(ret->save_reason, sizeof(ret->save_reason), "%s", answer->save_reason);
    if (answer->times) {
        ret->queue_ms = answer->times->queue_ms;
        ret->lookup_ms = answer->times->lookup_ms;
        ret->read_ms = answer->times->read_ms;
        ret->run_ms = answer->times->run_ms;
        ret->commit_ms = answer->times->commit_ms;
        ret->total_ms = answer->times->total_ms;
    }
    client_free(answer);
    return true;
}

bool turn_run_prefill(struct client *client, const char *session, const uint32_t *tokens,
                      uint32_t count, struct turn_prefill *ret, struct client_failure *failure)
{
    Cached__Session__V1__PrefillRequest request = CACHED__SESSION__V1__PREFILL_REQUEST__INIT;
    request.session_id = name_of(session);
    request.tokens = token_bytes(tokens, count);
    return run_prefill(client, &request, ret, failure);
}

bool turn_run_prefill_early(struct client *client, const char *session, const uint32_t *tokens,
                            uint32_t count, struct turn_prefill *ret,
                            struct client_failure *failure)
{
    Cached__Session__V1__PrefillRequest request = CACHED__SESSION__V1__PREFILL_REQUEST__INIT;
    request.session_id = name_of(session);
    request.tokens = token_bytes(tokens, count);
    request.level = CACHED__SESSION__V1__LEVEL__LEVEL_ACCEPTED;
    return run_prefill(client, &request, ret, failure);
}

/* What arrives of one decode.  tokens may be NULL: they are counted only. */
struct arriving {
    uint32_t *tokens;
    uint32_t count, count_max;
    bool (*go_on)(void *context); /* NULL: always. */
    void *context;
    struct turn_decode *ret;
};

static bool take_message(void *context, const ProtobufCMessage *message)
{
    struct arriving *arriving = context;
    const Cached__Session__V1__DecodeResponse *part =
        (const Cached__Session__V1__DecodeResponse *)(const void *)message;
    const uint32_t count = (uint32_t)(part->tokens.len / 4);

    if (arriving->go_on && !arriving->go_on(arriving->context)) return false;
    if (count > arriving->count_max - arriving->count) return false; /* More than was asked for. */
    for (uint32_t i = 0; i < count && arriving->tokens; i++)
        arriving->tokens[arriving->count + i] = kv_load32(part->tokens.data + (size_t)i * 4);
    arriving->count += count;
    if (!part->end) return true;

    struct turn_decode *ret = arriving->ret;
    ret->tokens += part->end->tokens;
    ret->head_position = part->end->head_position;
    if (part->end->times) {
        ret->run_ms += part->end->times->run_ms;
        ret->total_ms += part->end->times->total_ms;
    }
    for (size_t i = 0; i < part->end->n_checkpoints; i++) {
        const Cached__Session__V1__CheckpointInfo *made = part->end->checkpoints[i];
        if (made->id.len != TURN_ID_BYTES) continue;
        memcpy(ret->checkpoint_id, made->id.data, TURN_ID_BYTES);
        ret->checkpoint_position = made->position;
        ret->has_checkpoint = true;
    }
    return true;
}

bool turn_run_forced(struct client *client, const char *session, const uint32_t *tokens,
                     uint32_t count, struct turn_decode *ret, struct client_failure *failure)
{
    *ret = (struct turn_decode){0};
    for (uint32_t sent = 0; sent < count;) {
        Cached__Session__V1__DecodeRequest request = CACHED__SESSION__V1__DECODE_REQUEST__INIT;
        const uint32_t part = KV_MIN(count - sent, KV_DECODE_TOKENS_MAX);
        struct arriving arriving = {.count_max = part, .ret = ret};
        request.session_id = name_of(session);
        request.max_tokens = part;
        request.forced_tokens = token_bytes(tokens + sent, part);
        request.ignore_eos = true;
        if (!client_stream(client, CLIENT_DECODE, &request.base, take_message, &arriving, failure))
            return false;
        sent += part;
    }
    return true;
}

bool turn_run_decode(struct client *client, const char *session, uint32_t count,
                     uint32_t *ret_tokens, bool (*go_on)(void *context), void *context,
                     struct turn_decode *ret, struct client_failure *failure)
{
    Cached__Session__V1__DecodeRequest request = CACHED__SESSION__V1__DECODE_REQUEST__INIT;
    struct arriving arriving = {
        .tokens = ret_tokens, .count_max = count, .go_on = go_on, .context = context, .ret = ret};

    *ret = (struct turn_decode){0};
    request.session_id = name_of(session);
    request.max_tokens = count;
    request.ignore_eos = true;
    return client_stream(client, CLIENT_DECODE, &request.base, take_message, &arriving, failure);
}

bool turn_checkpoint(struct client *client, const char *session, uint8_t ret_id[TURN_ID_BYTES],
                     uint32_t *ret_position, struct client_failure *failure)
{
    Cached__Session__V1__CheckpointRequest request = CACHED__SESSION__V1__CHECKPOINT_REQUEST__INIT;
    Cached__Session__V1__CheckpointResponse *answer = NULL;

    request.session_id = name_of(session);
    request.kind = CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_MANUAL;
    request.level = CACHED__SESSION__V1__LEVEL__LEVEL_SSD;
    if (!client_call(client, CLIENT_CHECKPOINT, &request.base, &answer, failure)) return false;
    const bool ok = answer->checkpoint && answer->checkpoint->id.len == TURN_ID_BYTES;
    if (ok) memcpy(ret_id, answer->checkpoint->id.data, TURN_ID_BYTES);
    if (ok) *ret_position = answer->checkpoint->position;
    if (!ok) {
        *failure = (struct client_failure){.code = CLIENT_INTERNAL,
                                           .text = "the answer names no checkpoint"};
    }
    client_free(answer);
    return ok;
}

bool turn_rollback(struct client *client, const char *session, const uint8_t id[TURN_ID_BYTES],
                   uint32_t *ret_head_position, struct client_failure *failure)
{
    Cached__Session__V1__RollbackRequest request = CACHED__SESSION__V1__ROLLBACK_REQUEST__INIT;
    Cached__Session__V1__RollbackResponse *answer = NULL;

    request.session_id = name_of(session);
    request.checkpoint_id.len = TURN_ID_BYTES;
    request.checkpoint_id.data = (uint8_t *)(uintptr_t)id;
    request.keep = true;
    if (!client_call(client, CLIENT_ROLLBACK, &request.base, &answer, failure)) return false;
    *ret_head_position = answer->head_position;
    client_free(answer);
    return true;
}

bool turn_close(struct client *client, const char *session, struct client_failure *failure)
{
    Cached__Session__V1__CloseSessionRequest request =
        CACHED__SESSION__V1__CLOSE_SESSION_REQUEST__INIT;
    Cached__Session__V1__CloseSessionResponse *answer = NULL;

    request.session_id = name_of(session);
    if (!client_call(client, CLIENT_CLOSE_SESSION, &request.base, &answer, failure)) return false;
    client_free(answer);
    return true;
}

bool turn_advance_clock(struct client *client, uint64_t ms, struct client_failure *failure)
{
    while (ms > 0) {
        Cached__Admin__V1__AdvanceClockRequest request =
            CACHED__ADMIN__V1__ADVANCE_CLOCK_REQUEST__INIT;
        Cached__Admin__V1__AdvanceClockResponse *answer = NULL;
        request.ms = KV_MIN(ms, CLOCK_STEP_MS_MAX);
        if (!client_call(client, CLIENT_ADVANCE_CLOCK, &request.base, &answer, failure))
            return false;
        ms -= request.ms;
        client_free(answer);
    }
    return true;
}
