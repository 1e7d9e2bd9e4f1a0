/*
 * `cachectl session fork`: a second session on a checkpoint.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define ID_BYTES 16u
#define ID_DIGITS_MIN 8u /* What tables and trees show. */

/* An id by its first hex digits: as `session show` prints it.  Exit code; 0: found. */
static int find_checkpoint(struct client *client, const char *session, const char *digits,
                           uint8_t id[ID_BYTES])
{
    Cached__Session__V1__GetSessionRequest request = CACHED__SESSION__V1__GET_SESSION_REQUEST__INIT;
    Cached__Session__V1__GetSessionResponse *answer = NULL;
    struct client_failure failure;
    const size_t count = strlen(digits);
    size_t found = 0;
    if (count < ID_DIGITS_MIN || count > 2u * ID_BYTES ||
        strspn(digits, "0123456789abcdef") != count) {
        ctl_error("--checkpoint needs %u to %u hex digits of an id, as `session show` prints them",
                  ID_DIGITS_MIN, 2u * ID_BYTES);
        return CLIENT_EXIT_USAGE;
    }
    request.session_id = (char *)(uintptr_t)session;
    if (!client_call(client, CLIENT_GET_SESSION, &request.base, &answer, &failure))
        return ctl_failure(&failure);
    for (size_t i = 0; i < answer->n_checkpoints; i++) {
        const ProtobufCBinaryData *at = &answer->checkpoints[i]->id;
        char first[OUT_TEXT_BYTES], last[OUT_TEXT_BYTES], text[2 * OUT_TEXT_BYTES];
        if (at->len != ID_BYTES) continue;
        (void)snprintf(text, sizeof(text), "%s%s", out_hex(first, at->data, 8),
                       out_hex(last, at->data + 8, 8));
        if (strncmp(text, digits, count) != 0) continue;
        memcpy(id, at->data, ID_BYTES);
        found++;
    }
    client_free(answer);
    if (found == 1) return 0;
    ctl_error("%s of session %s has an id that begins with %s",
              found == 0 ? "no checkpoint" : "more than one checkpoint", session, digits);
    return found == 0 ? CLIENT_EXIT_NOT_FOUND : CLIENT_EXIT_USAGE;
}

static int call_fork(const struct ctl *ctl, struct client *client,
                     Cached__Session__V1__ForkRequest *request)
{
    Cached__Session__V1__ForkResponse *answer = NULL;
    struct client_failure failure;
    if (!client_call(client, CLIENT_FORK, &request->base, &answer, &failure)) {
        const int code = ctl_failure(&failure);
        return failure.code == CLIENT_INVALID_ARGUMENT ? CLIENT_EXIT_USAGE : code;
    }
    char id[OUT_TEXT_BYTES];
    (void)out_hex(id, answer->checkpoint_id.data, KV_MIN(answer->checkpoint_id.len, 8));
    const uint32_t position = answer->head_position;
    const bool created = answer->created;
    const uint64_t epoch = answer->epoch;
    client_free(answer);
    if (ctl->json)
        return out_json_take(json_pack("{s:s, s:s, s:I, s:s, s:b, s:I}", "session_id",
                                       request->new_session_id, "forked_from", request->session_id,
                                       "head_position", (json_int_t)position, "checkpoint_id", id,
                                       "created", created, "epoch", (json_int_t)epoch));
    (void)printf("%s %s: shares %u tokens with %s, no bytes copied\n",
                 created ? "forked" : "there already:", request->new_session_id, position,
                 request->session_id);
    return CLIENT_EXIT_OK;
}

static int run_fork(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Session__V1__ForkRequest request = CACHED__SESSION__V1__FORK_REQUEST__INIT;
    const char *checkpoint = NULL;
    struct client *client = NULL;
    uint8_t id[ID_BYTES];
    uint64_t ttl_ms = 0;
    int code = 0;
    const struct arg args[] = {
        {"--checkpoint", ARG_TEXT, "ID", "where; default: the head, which is stored first",
         &checkpoint},
        {"--ttl-ms", ARG_COUNT, "N", "how long its checkpoints live unused; default: as SESSION's",
         &ttl_ms},
    };

    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    request.session_id = argv[0];
    request.new_session_id = argv[1];
    request.ttl_ms = ttl_ms;
    if (checkpoint != NULL) {
        code = find_checkpoint(client, argv[0], checkpoint, id);
        request.checkpoint_id = (ProtobufCBinaryData){sizeof(id), id};
    }
    if (code == 0) code = call_fork(ctl, client, &request);
    client_destroy(client);
    return code;
}

const struct command command_session_fork = {
    .name = "session fork",
    .arguments = "SESSION NEW",
    .summary = "a second session on a checkpoint of this one; nothing is copied",
    .details = "Both go on from there and share what either stores.  Deleting one leaves what the\n"
               "other needs.  Again with the same arguments it answers the same.  Needs a token\n"
               "with role harness.",
    .example = "cachectl session fork chat-1 chat-2 --checkpoint 5f2b9c01",
    .arguments_min = 2,
    .arguments_max = 2,
    .run = run_fork,
};
