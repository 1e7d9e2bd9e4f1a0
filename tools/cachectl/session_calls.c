/*
 * Calls of a session by hand: `cachectl session checkpoint|compact|pin|touch|usage`.
 *
 * A checkpoint is named as `session show` prints it: by the beginning of its id, if only one begins
 * so, or by "head".
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define SECOND_MS 1000u
#define KEEP_SECONDS_MAX (30u * 24 * 3600)
#define PIN_SECONDS_MAX 600u
#define ID_BYTES 16u

typedef Cached__Session__V1__CheckpointInfo checkpoint_info;
typedef Cached__Session__V1__GetSessionResponse session_answer;

/* The exit code of a failed call; what was wrong with a name is wrong usage. */
static int failed(const struct client_failure *failure)
{
    const int code = ctl_failure(failure);
    return failure->code == CLIENT_INVALID_ARGUMENT ? CLIENT_EXIT_USAGE : code;
}

static bool begins_with(const ProtobufCBinaryData *id, const char *digits)
{
    char text[2 * ID_BYTES + 1] = "";
    for (size_t i = 0; i < id->len && i < ID_BYTES; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", id->data[i]);
    return strncmp(text, digits, strlen(digits)) == 0;
}

/* 0: *ret_id is the one that `name` means. */
static int find_checkpoint(const session_answer *answer, const char *name, uint8_t ret_id[ID_BYTES])
{
    const bool is_head = strcmp(name, "head") == 0;
    const ProtobufCBinaryData *found = NULL;
    if (!is_head && strspn(name, "0123456789abcdef") != strlen(name)) {
        ctl_error("a checkpoint is \"head\" or the hex digits that its id begins with, not \"%s\"",
                  name);
        return CLIENT_EXIT_USAGE;
    }
    for (size_t i = 0; i < answer->n_checkpoints; i++) {
        const ProtobufCBinaryData *id = &answer->checkpoints[i]->id;
        if (is_head ? answer->head_checkpoint_id.len != id->len ||
                          memcmp(answer->head_checkpoint_id.data, id->data, id->len) != 0
                    : !begins_with(id, name))
            continue;
        if (found != NULL) {
            ctl_error("more than one checkpoint begins with %s: name more digits", name);
            return CLIENT_EXIT_USAGE;
        }
        found = id;
    }
    if (found == NULL || found->len != ID_BYTES) {
        ctl_error("the session has no checkpoint %s; `cachectl session show` lists them", name);
        return CLIENT_EXIT_NOT_FOUND;
    }
    memcpy(ret_id, found->data, ID_BYTES);
    return 0;
}

static int resolve(struct client *client, char *session, const char *name, uint8_t ret_id[ID_BYTES])
{
    Cached__Session__V1__GetSessionRequest request = CACHED__SESSION__V1__GET_SESSION_REQUEST__INIT;
    session_answer *answer = NULL;
    struct client_failure failure;
    request.session_id = session;
    if (!client_call(client, CLIENT_GET_SESSION, &request.base, &answer, &failure))
        return failed(&failure);
    const int code = find_checkpoint(answer, name, ret_id);
    client_free(answer);
    return code;
}

/* ---- checkpoint ---- */

static int print_checkpoint(const struct ctl *ctl, const checkpoint_info *c)
{
    char id[OUT_TEXT_BYTES];
    const bool has_window = c->window_level == CACHED__SESSION__V1__LEVEL__LEVEL_RAM;
    const bool is_durable = c->rows_level == CACHED__SESSION__V1__LEVEL__LEVEL_SSD;
    if (ctl->json)
        return out_json_take(json_pack("{s:s, s:I, s:s, s:b}", "id",
                                       out_hex(id, c->id.data, KV_MIN(c->id.len, 8)), "position",
                                       (json_int_t)c->position, "rows_level",
                                       is_durable ? "SSD" : "RAM", "window", has_window));
    (void)printf("checkpoint %s at %u tokens, rows on %s, %s window\n",
                 out_hex(id, c->id.data, KV_MIN(c->id.len, 4)), c->position,
                 is_durable ? "SSD" : "RAM", has_window ? "with" : "without");
    return CLIENT_EXIT_OK;
}

static int run_checkpoint(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Session__V1__CheckpointRequest request = CACHED__SESSION__V1__CHECKPOINT_REQUEST__INIT;
    Cached__Session__V1__CheckpointResponse *answer = NULL;
    struct client_failure failure;
    struct client *client = NULL;
    bool anchor = false;
    int code = 0;
    const struct arg args[] = {
        {"--anchor", ARG_FLAG, NULL, "where a later `session compact` goes back to", &anchor},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    request.session_id = argv[0];
    if (anchor) request.kind = CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_ANCHOR;
    if (!client_call(client, CLIENT_CHECKPOINT, &request.base, &answer, &failure)) {
        code = failed(&failure);
    } else if (!answer->checkpoint) {
        ctl_error("the daemon's answer holds no checkpoint");
        code = CLIENT_EXIT_FAILED;
    } else {
        code = print_checkpoint(ctl, answer->checkpoint);
    }
    client_free(answer);
    client_destroy(client);
    return code;
}

/* ---- compact ---- */

static int run_compact(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Session__V1__CompactRequest request = CACHED__SESSION__V1__COMPACT_REQUEST__INIT;
    Cached__Session__V1__CompactResponse *answer = NULL;
    struct client_failure failure;
    struct client *client = NULL;
    const char *keep = "600";
    uint64_t seconds = 0;
    int code = 0;
    const struct arg args[] = {
        {"--keep", ARG_TEXT, "SECONDS", "how long the old branch stays; 600", &keep},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    if (!ctl_parse_count(keep, 1, KEEP_SECONDS_MAX, &seconds)) {
        ctl_error("--keep takes 1 to %u seconds, not \"%s\"", KEEP_SECONDS_MAX, keep);
        return CLIENT_EXIT_USAGE;
    }
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    request.session_id = argv[0];
    request.keep_old_for_ms = seconds * SECOND_MS;
    if (!client_call(client, CLIENT_COMPACT, &request.base, &answer, &failure))
        code = failed(&failure);
    else if (ctl->json)
        code = out_json_take(json_pack("{s:I, s:I}", "head_position",
                                       (json_int_t)answer->head_position, "epoch",
                                       (json_int_t)answer->epoch));
    else
        (void)printf("head at %u tokens, epoch %" PRIu64 "\n", answer->head_position,
                     answer->epoch);
    client_free(answer);
    client_destroy(client);
    return code;
}

/* ---- pin, touch ---- */

static int call_pin(const struct ctl *ctl, struct client *client, char *session, uint8_t *id,
                    uint64_t seconds)
{
    Cached__Session__V1__PinRequest request = CACHED__SESSION__V1__PIN_REQUEST__INIT;
    Cached__Session__V1__PinResponse *answer = NULL;
    struct client_failure failure;
    char text[OUT_TEXT_BYTES];
    int code = CLIENT_EXIT_OK;
    request.session_id = session;
    request.checkpoint_id = (ProtobufCBinaryData){ID_BYTES, id};
    request.ttl_ms = seconds * SECOND_MS;
    if (!client_call(client, CLIENT_PIN, &request.base, &answer, &failure)) return failed(&failure);
    const bool has_window = answer->window_expire_ms > 0;
    if (ctl->json)
        code = out_json_take(json_pack("{s:I, s:I}", "expire_ms", (json_int_t)answer->expire_ms,
                                       "window_expire_ms", (json_int_t)answer->window_expire_ms));
    else if (answer->expire_ms == 0)
        (void)printf("not pinned any more\n");
    else
        (void)printf("pinned for %s, %s\n", out_duration(text, answer->expire_ms),
                     has_window ? "rows and window" : "rows only: it has no window");
    client_free(answer);
    return code;
}

static int run_pin(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct client *client = NULL;
    uint8_t id[ID_BYTES];
    const char *lasts = "600";
    uint64_t seconds = 0;
    int code = 0;
    const struct arg args[] = {
        {"--for", ARG_TEXT, "SECONDS", "how long from now; 600, at most 600; 0 ends it", &lasts},
    };
    const int count = ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code);
    if (count < 0) return code;
    if (!ctl_parse_count(lasts, 0, PIN_SECONDS_MAX, &seconds)) {
        ctl_error("--for takes 0 to %u seconds, not \"%s\"", PIN_SECONDS_MAX, lasts);
        return CLIENT_EXIT_USAGE;
    }
    code = ctl_connect(ctl, &client);
    if (code == 0) code = resolve(client, argv[0], count > 1 ? argv[1] : "head", id);
    if (code == 0) code = call_pin(ctl, client, argv[0], id, seconds);
    client_destroy(client);
    return code;
}

static int call_touch(const struct ctl *ctl, struct client *client, char *session, uint8_t *id)
{
    Cached__Session__V1__TouchRequest request = CACHED__SESSION__V1__TOUCH_REQUEST__INIT;
    Cached__Session__V1__TouchResponse *answer = NULL;
    struct client_failure failure;
    char rows[OUT_TEXT_BYTES], window[OUT_TEXT_BYTES];
    int code = CLIENT_EXIT_OK;
    request.session_id = session;
    request.checkpoint_id = (ProtobufCBinaryData){ID_BYTES, id};
    if (!client_call(client, CLIENT_TOUCH, &request.base, &answer, &failure))
        return failed(&failure);
    if (ctl->json)
        code = out_json_take(json_pack("{s:I, s:I}", "rows_expire_ms",
                                       (json_int_t)answer->rows_expire_ms, "window_expire_ms",
                                       (json_int_t)answer->window_expire_ms));
    else
        (void)printf("rows live %s, %s%s\n", out_duration(rows, answer->rows_expire_ms),
                     answer->window_expire_ms > 0 ? "the window " : "there is no window",
                     answer->window_expire_ms > 0 ? out_duration(window, answer->window_expire_ms)
                                                  : "");
    client_free(answer);
    return code;
}

static int run_touch(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct client *client = NULL;
    uint8_t id[ID_BYTES];
    int code = 0;
    const int count = ctl_parse(ctl, command, NULL, 0, argc, argv, &code);
    if (count < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code == 0) code = resolve(client, argv[0], count > 1 ? argv[1] : "head", id);
    if (code == 0) code = call_touch(ctl, client, argv[0], id);
    client_destroy(client);
    return code;
}

/* ---- usage ---- */

static int print_usage(const struct ctl *ctl, const Cached__Session__V1__GetUsageResponse *u)
{
    char ssd[OUT_TEXT_BYTES], pool[OUT_TEXT_BYTES], hbm[OUT_TEXT_BYTES];
    if (ctl->json)
        return out_json_take(json_pack(
            "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "sessions", (json_int_t)u->sessions,
            "checkpoints", (json_int_t)u->checkpoints, "bytes_ssd", (json_int_t)u->bytes_ssd,
            "bytes_pool", (json_int_t)u->bytes_pool, "bytes_hbm", (json_int_t)u->bytes_hbm, "pins",
            (json_int_t)u->pins, "pinned_bytes_ssd", (json_int_t)u->pinned_bytes_ssd,
            "pinned_bytes_pool", (json_int_t)u->pinned_bytes_pool));
    (void)printf("sessions     %" PRIu64 "\ncheckpoints  %" PRIu64 "\n", u->sessions,
                 u->checkpoints);
    (void)printf("bytes        %s on SSD, %s of windows, %s of rows in memory\n",
                 out_bytes(ssd, u->bytes_ssd), out_bytes(pool, u->bytes_pool),
                 out_bytes(hbm, u->bytes_hbm));
    (void)printf("pins         %" PRIu64 ": %s on SSD, %s of windows\n", u->pins,
                 out_bytes(ssd, u->pinned_bytes_ssd), out_bytes(pool, u->pinned_bytes_pool));
    return CLIENT_EXIT_OK;
}

static int run_usage(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Session__V1__GetUsageRequest request = CACHED__SESSION__V1__GET_USAGE_REQUEST__INIT;
    Cached__Session__V1__GetUsageResponse *answer = NULL;
    struct client_failure failure;
    struct client *client = NULL;
    int code = 0;
    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    if (client_call(client, CLIENT_GET_USAGE, &request.base, &answer, &failure))
        code = print_usage(ctl, answer);
    else
        code = ctl_failure(&failure);
    client_free(answer);
    client_destroy(client);
    return code;
}

const struct command command_session_checkpoint = {
    .name = "session checkpoint",
    .arguments = "SESSION",
    .summary = "store the head now, also while it decodes",
    .details = "Taken at the next step of a Decode; behind a Prefill it waits for its end, up to\n"
               "--timeout.  Needs a token with role harness.",
    .example = "cachectl session checkpoint chat-1",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_checkpoint,
};

const struct command command_session_compact = {
    .name = "session compact",
    .arguments = "SESSION",
    .summary = "move the head to the deepest anchor, or to 0",
    .details =
        "The branch it leaves stays for a while and goes then; a rollback comes back to it.\n"
        "What was not stored of the head is given up.  Needs a token with role harness.",
    .example = "cachectl session compact chat-1 --keep 3600",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_compact,
};

const struct command command_session_pin = {
    .name = "session pin",
    .arguments = "SESSION [CHECKPOINT]",
    .summary = "keep a checkpoint from expiry and eviction for a while",
    .details = "CHECKPOINT is the beginning of its id as `session show` prints it; the head's\n"
               "without one.  A restart forgets pins.  Needs a token with role harness.",
    .example = "cachectl session pin chat-1 --for 300",
    .arguments_min = 1,
    .arguments_max = 2,
    .run = run_pin,
};

const struct command command_session_touch = {
    .name = "session touch",
    .arguments = "SESSION [CHECKPOINT]",
    .summary = "renew rows and window of a checkpoint, as a use would",
    .details = "CHECKPOINT as for `session pin`.  Needs a token with role harness.",
    .example = "cachectl session touch chat-1",
    .arguments_min = 1,
    .arguments_max = 2,
    .run = run_touch,
};

const struct command command_session_usage = {
    .name = "session usage",
    .arguments = "",
    .summary = "what the sessions of the token's user hold",
    .details = "Needs a token with role harness.",
    .example = "cachectl session usage",
    .run = run_usage,
};
