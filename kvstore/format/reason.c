/*
 * What every reason means and what to do about it: the one table behind error details, log lines
 * and `cachectl explain`.
 *
 * A reason is part of the API: it may be added, never renamed and never given another gRPC status.
 * The status says how a client should react (retry the same call, redo the operation, give up); the
 * reason says which of the causes with that reaction it was.  The codes are written as numbers of
 * the gRPC specification because this folder knows no gRPC header.
 */

#include "kvstore/format/reason.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

enum {
    OUTCOME = 0,
    CANCELLED = 1,
    INVALID_ARGUMENT = 3,
    DEADLINE_EXCEEDED = 4,
    NOT_FOUND = 5,
    ALREADY_EXISTS = 6,
    PERMISSION_DENIED = 7,
    RESOURCE_EXHAUSTED = 8,
    FAILED_PRECONDITION = 9,
    ABORTED = 10,
    OUT_OF_RANGE = 11,
    UNIMPLEMENTED = 12,
    INTERNAL = 13,
    UNAVAILABLE = 14,
    UNAUTHENTICATED = 16,
};

#define REASON(name, code, cause, remedy) [KV_REASON_##name] = {#name, code, cause, remedy}

static const struct kv_reason_info infos[KV_REASON_COUNT] = {
    REASON(NONE, OUTCOME, "Everything stored was used, or nothing needs a reason.",
           "Nothing to do."),
    REASON(
        NEVER_STORED, OUTCOME,
        "MISS: no checkpoint of this session holds a prefix of the prompt.  REPLAY: rows do, but "
        "no window was ever taken at the end of them or near it.",
        "Normal for a first turn; leave checkpoints on and set stable_tokens, so that a window is "
        "taken where the next turn leaves off."),
    REASON(TOO_SHORT, OUTCOME,
           "The stored prefix is no longer than one window, so computing it costs no more.",
           "Nothing to do: the answer is exact."),
    REASON(
        DIVERGED, OUTCOME,
        "The prompt leaves the stored history; the answer names the first position that differs.",
        "Expected after an edit or a rollback; otherwise send the history unchanged."),
    REASON(EXPIRED, OUTCOME, "The stored state passed its time to live.",
           "Resume sooner, or raise pool.ttl, the session's ttl_ms, the plan's or ssd.ttl."),
    REASON(QUOTA, OUTCOME, "The state was removed because its user is over a quota.",
           "Close old sessions, or ask the operator for a larger quota."),
    REASON(CAPACITY, OUTCOME, "The state was removed because a tier was full.",
           "Raise hbm.bytes, pool.bytes or ssd.bytes."),
    REASON(ROLLED_BACK, OUTCOME, "The state belongs to a branch the session has left.",
           "Nothing to do; roll back to a checkpoint of that branch to use it again."),
    REASON(DELETED, OUTCOME, "The state was deleted by its owner.", "Compute it again."),
    REASON(LOST_NODE, OUTCOME, "The node that held the state is gone.",
           "Nothing to do: the state is computed again."),
    REASON(CORRUPT, OUTCOME, "Stored bytes failed verification and were not used.",
           "Nothing to do for the answer; look at the device and the log."),
    REASON(READ_FAILED, OUTCOME,
           "Stored bytes could not be read this time and were not used; they stay stored.",
           "Nothing to do for the answer; the log has the error.  If it comes again, look at the "
           "device."),
    REASON(MODEL_CHANGED, OUTCOME, "The state was made by another model or another version of it.",
           "Nothing to do: state of another model never loads."),
    REASON(OTHER_KERNELS, OUTCOME,
           "The state was computed with other kernels, which round differently: it was used, and "
           "what follows is marked as approximate.",
           "Set engine.isa to what computed it, or send the prompt in a new session."),
    REASON(ONLY_APPROXIMATE, OUTCOME,
           "What is stored of the prompt lies behind a clipped replay or was computed with other "
           "kernels: a call with exact = true uses none of it.",
           "Nothing to do: the answer is exact; calls without exact = true use what is stored."),

    REASON(SESSION_NOT_FOUND, NOT_FOUND, "There is no session of that id for this user.",
           "Open it with OpenSession, or check the id and the token."),
    REASON(SESSION_EXISTS, ALREADY_EXISTS,
           "A session of that id exists with other parameters (kind, parent or ttl).",
           "Use the same parameters, or another id."),
    REASON(SESSION_ID_INVALID, INVALID_ARGUMENT,
           "A session id is 1 to 128 bytes of letters, digits and any of . _ : -.",
           "Choose an id of that form."),
    REASON(SESSION_BUSY, ABORTED, "Another call that changes this session is running.",
           "Wait for it, or cancel it, then try again."),
    REASON(SESSION_KIND_INVALID, INVALID_ARGUMENT,
           "The session kind is unknown, or does not go with the parent given: SUB needs a parent, "
           "other kinds have none.",
           "Use MAIN, SUB or EPHEMERAL; name a parent for SUB only."),
    REASON(REQUEST_ID_INVALID, INVALID_ARGUMENT,
           "A request id is empty or 1 to 64 printable ASCII characters without spaces.",
           "Choose an id of that form, or leave it empty."),
    REASON(REQUEST_ID_REUSED, ALREADY_EXISTS,
           "A call of this session had that request id and was another one: the answer names the "
           "first field that differs.",
           "Use a new id for each new call; repeat a call with the fields it had."),
    REASON(TTL_INVALID, INVALID_ARGUMENT, "The time to live is longer than 30 days.",
           "Ask for at most 2592000000 ms, or 0 for the server's default."),
    REASON(STALE_EPOCH, FAILED_PRECONDITION,
           "The session's epoch was raised since the one named in the call.",
           "Read the session again with GetSession and decide anew."),
    REASON(CHECKPOINT_NOT_FOUND, NOT_FOUND, "The session has no checkpoint of that id.",
           "List them with GetSession, or send the whole prompt."),
    REASON(CHECKPOINT_OTHER_BRANCH, FAILED_PRECONDITION,
           "The checkpoint is not on the branch the session stands on.",
           "Roll back to it first, or send the whole prompt."),
    REASON(CHECKPOINT_ID_INVALID, INVALID_ARGUMENT, "A checkpoint id is exactly 16 bytes.",
           "Send the id as the daemon returned it."),
    REASON(CHECKPOINT_KIND_INVALID, INVALID_ARGUMENT, "The checkpoint kind is unknown.",
           "Use PREFILL_END, DECODE_END, ANCHOR or MANUAL."),
    REASON(LEVEL_INVALID, INVALID_ARGUMENT, "That level cannot be asked for in this call.",
           "Use ACCEPTED, RAM or SSD; WaitDurable takes RAM or SSD."),
    REASON(PAGE_TOKEN_INVALID, INVALID_ARGUMENT, "The page token was not made by this daemon.",
           "Send next_page_token unchanged, or nothing to start again."),
    REASON(PAGE_SIZE_INVALID, INVALID_ARGUMENT, "A page has at most 1000 sessions.",
           "Ask for 1 to 1000, or 0 for 100."),

    REASON(TOKENS_EMPTY, INVALID_ARGUMENT, "The token list is empty.",
           "Send at least one token; to generate without new tokens call Decode."),
    REASON(TOKENS_MALFORMED, INVALID_ARGUMENT,
           "The token list is not a whole number of 4-byte little-endian ids.",
           "Pack each id as u32 little-endian."),
    REASON(TOKEN_OUT_OF_VOCAB, INVALID_ARGUMENT,
           "A token id is not below the model's vocabulary size.",
           "Use the tokenizer of this model; OpenSession names vocab_tokens."),
    REASON(PROMPT_TOO_LONG, OUT_OF_RANGE, "The whole prompt is longer than the model's context.",
           "Shorten or compact the conversation."),
    REASON(STABLE_TOKENS_INVALID, INVALID_ARGUMENT, "stable_tokens lies beyond the prompt.",
           "Name a position inside the prompt, or 0 for its end."),
    REASON(ANCHORS_INVALID, INVALID_ARGUMENT,
           "Anchors are at most 4 ascending positions inside the prompt.",
           "Send fewer, in ascending order, none of them 0."),
    REASON(MAX_TOKENS_INVALID, INVALID_ARGUMENT,
           "max_tokens is not 1 to 65536, or fewer than are forced.",
           "Ask for as many as are forced, and no more than the limit in the answer."),
    REASON(SAMPLING_INVALID, INVALID_ARGUMENT,
           "A sampling parameter is out of range: temperature 0 to 10, top_p 0 to 1.",
           "Correct the parameter; temperature 0 is greedy."),
    REASON(STOP_TOKENS_INVALID, INVALID_ARGUMENT,
           "There are more than 16 stop tokens, or one is outside the vocabulary.",
           "Send at most 16 ids below vocab_tokens."),
    REASON(FROM_POSITION_INVALID, OUT_OF_RANGE,
           "from_position lies beyond what the session has generated.",
           "Ask GetSession for the head position, or leave it 0."),
    REASON(HEAD_EMPTY, FAILED_PRECONDITION, "The session stands at position 0: it has no tokens.",
           "Send a prompt with Prefill first."),
    REASON(HEAD_MOVED, FAILED_PRECONDITION,
           "The session's head was lost before it was saved, or another model made it.",
           "Send the prompt with Prefill; what is stored of it is not computed again."),
    REASON(CONTEXT_FULL, OUT_OF_RANGE,
           "The session's tokens and max_tokens together go beyond the model's context.",
           "Ask for no more than the limit in the answer; where it is 0, compact the "
           "conversation."),

    REASON(HBM_FULL, RESOURCE_EXHAUSTED, "The HBM tier has no room for this session's pages.",
           "Try again when others have finished, or raise hbm.bytes."),
    REASON(SSD_FULL, RESOURCE_EXHAUSTED,
           "The SSD tier or its file system is full, and nothing in it may go.",
           "Free space, or raise ssd.bytes; the session goes on in memory, saves begin again by "
           "themselves."),
    REASON(SSD_READ_ONLY, FAILED_PRECONDITION,
           "The SSD tier takes no writes: a write or flush failed, or a file of it is gone.",
           "See status and the log: repair the device, or copy back what it names, then restart."),
    REASON(
        RESULT_UNKNOWN, UNAVAILABLE,
        "The write of this call's records failed in the middle: it happened or it did not, which "
        "the next start of the daemon finds out.",
        "Call again after a restart, with the same ids: what happened is not done twice."),
    REASON(SSD_SLOW, UNAVAILABLE,
           "The device of the SSD tier does not answer; the save may still get there.",
           "Nothing to do for the answer; WaitDurable tells when it is stored.  Look at the "
           "device."),
    REASON(SESSION_UNREADABLE, FAILED_PRECONDITION,
           "The records of this session's checkpoints cannot be read, so nothing of it is used and "
           "nothing is saved to it.",
           "Go on in a new session; the operator finds the cause in the log (tree_unreadable)."),
    REASON(INDEX_FULL, RESOURCE_EXHAUSTED, "The index holds no more checkpoints or sessions.",
           "Raise index.ram, or let old sessions expire."),
    REASON(QUEUE_FULL, RESOURCE_EXHAUSTED,
           "Too much at once: requests in flight, calls that wait for a live session, or memory.",
           "Wait at least the retry time in the answer, then try again."),
    REASON(SESSIONS_FULL, RESOURCE_EXHAUSTED, "The daemon knows 1048576 sessions, its limit.",
           "A session goes 30 days after its rows: use fewer ids, or start a second daemon."),
    REASON(SUB_SESSIONS_FULL, RESOURCE_EXHAUSTED,
           "A user has at most 64 sub and ephemeral sessions for each of its main ones, and 64 "
           "without one.",
           "Delete those that are not needed any more."),
    REASON(PIN_LIMIT, RESOURCE_EXHAUSTED,
           "Pins may hold a quarter of what a user may have in a tier, 64 checkpoints of a user "
           "and 1,024 in all.",
           "Let pins end, or end one with ttl_ms 0; pin checkpoints of shorter histories."),
    REASON(PIN_INVALID, INVALID_ARGUMENT, "A pin lasts at most 10 minutes.",
           "Ask for 1 to 600000 ms and pin again in time, or 0 to end it."),

    REASON(MESSAGE_MALFORMED, INVALID_ARGUMENT, "The message is not a valid protobuf of its type.",
           "Build the client from the .proto files of this version."),
    REASON(MESSAGE_TOO_LARGE, RESOURCE_EXHAUSTED, "The message is larger than 8 MiB.",
           "Send only the tokens after a parent checkpoint."),
    REASON(TOKEN_MISSING, UNAUTHENTICATED, "The call has no bearer token, or more than one.",
           "Send metadata `authorization: Bearer TOKEN`."),
    REASON(TOKEN_UNKNOWN, UNAUTHENTICATED, "The bearer token is not in the token file.",
           "Check the token; an operator adds its SHA-256 to server.token_file."),
    REASON(ROLE_DENIED, PERMISSION_DENIED, "The token's role may not make this call.",
           "Use a token of role harness for sessions, of role ops or stats for the daemon."),
    REASON(DEADLINE, DEADLINE_EXCEEDED, "The deadline passed first; the result is unknown.",
           "Call again, every call may be repeated; or allow more time."),
    REASON(CANCELLED, CANCELLED, "The caller went away or the session was closed meanwhile.",
           "Call again if the answer is still wanted."),
    REASON(STARTING, UNAVAILABLE,
           "The daemon is still reading what its state directory holds; nothing can be asked of it "
           "yet but its health, its statistics and its configuration.",
           "Try again when the health service says SERVING; cachectl status shows how far it is."),
    REASON(SHUTTING_DOWN, UNAVAILABLE, "The daemon is stopping.",
           "Call again when it is back; stored checkpoints stay."),
    REASON(NOT_IMPLEMENTED, UNIMPLEMENTED, "This version of the daemon does not have that yet.",
           "Leave the call or the field out."),
    REASON(UNKNOWN_METHOD, UNIMPLEMENTED, "No service of this daemon has a method of that name.",
           "Check service and method name against the .proto files."),
    REASON(UNKNOWN_SERVICE, NOT_FOUND,
           "Health was asked about a service this daemon does not have.",
           "Ask with an empty service name, or the full name of a service."),
    REASON(CLOCK_NOT_VIRTUAL, FAILED_PRECONDITION, "The daemon runs on the real clock.",
           "Start it with clock.mode = virtual to move its time."),
    REASON(CLOCK_STEP_INVALID, INVALID_ARGUMENT,
           "A step of the clock is 1 ms to 365 days, and its time ends with the year 2099.",
           "Move the clock in several steps."),
    REASON(SCRUB_INVALID, INVALID_ARGUMENT,
           "The action of a Scrub call is unknown, or its rate is not 1 MiB to 64 GiB a second; "
           "only a start takes a rate.",
           "Use STATUS, START, STOP or RELEASE; name a rate with START only, or 0 for scrub.rate."),
    REASON(USER_INVALID, INVALID_ARGUMENT,
           "A user name is 1 to 64 bytes of letters, digits and any of . _ -.",
           "Name a user of the token file."),
    REASON(USER_NOT_FOUND, NOT_FOUND, "No user of that name has opened a session.",
           "`cachectl du` lists those that have."),
    REASON(ENCRYPTION_OFF, FAILED_PRECONDITION,
           "Nothing in the state directory is encrypted: there is no key to rotate.",
           "Set ssd.encryption = on and a master key, and restart the daemon."),
    REASON(MASTER_KEY_INVALID, FAILED_PRECONDITION,
           "The new master key cannot be read from where the configuration says it is; the one in "
           "use stays.",
           "The sentence says what is wrong with it; put 32 bytes or 64 hex digits there, for its "
           "owner only."),
    REASON(POSITION_INVALID, INVALID_ARGUMENT,
           "A position is below 1,048,576, and is said only with has_position.",
           "Name a token of the session, the first one is 0."),
    REASON(MODEL_INVALID, INVALID_ARGUMENT,
           "A model is named by 8 to 64 lower-case hex digits of its fingerprint, or by `other`.",
           "`cachectl purge --model other --dry-run` lists the models that have checkpoints."),
    REASON(MODEL_IN_USE, FAILED_PRECONDITION, "The model that is served is not purged.",
           "Name another one, with more digits if they begin alike."),
    REASON(QUOTA_SESSIONS, RESOURCE_EXHAUSTED,
           "The user has as many sessions as the quota allows, and all of them are in use.",
           "Delete a session that is not needed, or ask the operator for more (`cachectl quota "
           "set`)."),
    REASON(
        QUOTA_BYTES_SSD, RESOURCE_EXHAUSTED,
        "The user has as many bytes on SSD as the quota allows, and no session of the user's own "
        "could make room.",
        "Delete sessions, or ask the operator for more: `cachectl quota set`; until then turns go "
        "on in memory and are not stored."),
    REASON(QUOTA_REQUESTS, RESOURCE_EXHAUSTED,
           "The user makes more calls a second than the quota allows.",
           "Wait as long as RetryInfo says."),
    REASON(QUOTA_TOKENS, RESOURCE_EXHAUSTED,
           "The user has more tokens a second computed than the quota allows.",
           "Wait as long as RetryInfo says; tokens that are a hit do not count."),
    REASON(QUOTA_SAVES, RESOURCE_EXHAUSTED,
           "As many saves of the user are in flight as the quota allows.",
           "Wait for one with WaitDurable, or as long as RetryInfo says."),
    REASON(QUOTA_INVALID, INVALID_ARGUMENT,
           "There is no such limit, it is named twice, or its value is out of range.",
           "`cachectl quota set --help` lists the limits and their ranges."),
    REASON(QUOTAS_FULL, RESOURCE_EXHAUSTED,
           "There are as many plans, or users with limits of their own, as there can be.",
           "Delete those that are not needed."),
    REASON(PLAN_INVALID, INVALID_ARGUMENT,
           "A plan's name is 1 to 64 bytes of letters, digits and any of . _ -.",
           "Name a plan that `cachectl quota plan` lists, or a new one."),
    REASON(PLAN_NOT_FOUND, NOT_FOUND, "There is no plan of that name.",
           "`cachectl quota plan` lists those there are."),
    REASON(PLAN_IN_USE, FAILED_PRECONDITION, "Users have that plan.",
           "Give them another one first: `cachectl quota list` shows whose it is."),
    REASON(MODEL_LOST, UNAVAILABLE,
           "A file of the model was changed, cut or unreadable while the daemon used it: nothing "
           "can be computed.",
           "The log names the file: put a whole model in place and restart the daemon."),
    REASON(INTERNAL, INTERNAL, "The daemon met a state it should never reach.",
           "Report it with the log around that time."),
};

const struct kv_reason_info *kv_reason_info(enum kv_reason reason)
{
    assert(reason < KV_REASON_COUNT);
    assert(infos[reason].name != NULL);
    return &infos[reason];
}

bool kv_reason_find(const char *name, enum kv_reason *ret_reason)
{
    for (unsigned i = 0; i < KV_REASON_COUNT; i++) {
        if (strcmp(infos[i].name, name) != 0) continue;
        *ret_reason = (enum kv_reason)i;
        return true;
    }
    return false;
}

const char *kv_reason_code_name(int grpc_code)
{
    static const char *const names[] = {
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    };
    if (grpc_code < 0 || (size_t)grpc_code >= KV_ARRAY_COUNT(names)) return "UNKNOWN";
    return names[grpc_code];
}
