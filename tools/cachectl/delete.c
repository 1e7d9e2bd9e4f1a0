/*
 * `cachectl session delete` and `cachectl user erase`: what cannot be undone is asked for, or said
 * with --yes; --dry-run shows what would go.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct receipt {
    const char *what, *name; /* "session", "chat-1" */
    bool dry_run, done;      /* done: there was something. */
    uint64_t sessions, checkpoints, bytes;
};

static int print_receipt(const struct ctl *ctl, const struct receipt *r)
{
    char bytes[OUT_TEXT_BYTES];
    if (ctl->json)
        return out_json_take(json_pack("{s:s, s:b, s:b, s:I, s:I, s:I}", r->what, r->name,
                                       "dry_run", r->dry_run, "deleted", r->done && !r->dry_run,
                                       "sessions", (json_int_t)r->sessions, "checkpoints",
                                       (json_int_t)r->checkpoints, "bytes", (json_int_t)r->bytes));
    if (!r->done) {
        (void)printf("%s %s is gone already\n", r->what, r->name);
        return CLIENT_EXIT_OK;
    }
    (void)printf("%s %s: %" PRIu64 " sessions, %" PRIu64 " checkpoints, %s\n",
                 r->dry_run ? "would delete" : "deleted", r->name, r->sessions, r->checkpoints,
                 out_bytes(bytes, r->bytes));
    return CLIENT_EXIT_OK;
}

/* 0: go on. */
static int confirm(const struct receipt *r, bool yes)
{
    char line[16] = "";
    if (yes || r->dry_run) return 0;
    if (isatty(STDIN_FILENO) != 1 || isatty(STDERR_FILENO) != 1) {
        ctl_error("this cannot be undone: say --yes, or --dry-run to see what would go");
        return CLIENT_EXIT_USAGE;
    }
    (void)fprintf(stderr, "Delete %s %s and everything in it?  It cannot be undone.  [y/N] ",
                  r->what, r->name);
    if (fgets(line, sizeof(line), stdin) != NULL && (line[0] == 'y' || line[0] == 'Y')) return 0;
    ctl_error("nothing was deleted");
    return CLIENT_EXIT_FAILED;
}

static int call_delete(struct client *client, struct receipt *r)
{
    Cached__Session__V1__DeleteSessionRequest request =
        CACHED__SESSION__V1__DELETE_SESSION_REQUEST__INIT;
    Cached__Session__V1__DeleteSessionResponse *answer = NULL;
    struct client_failure failure;
    request.session_id = (char *)(uintptr_t)r->name;
    request.dry_run = r->dry_run;
    if (!client_call(client, CLIENT_DELETE_SESSION, &request.base, &answer, &failure)) {
        const int code = ctl_failure(&failure);
        /* The name is all that was said, so that is what was wrong. */
        return failure.code == CLIENT_INVALID_ARGUMENT ? CLIENT_EXIT_USAGE : code;
    }
    r->done = answer->deleted;
    r->sessions = answer->deleted ? 1 : 0;
    r->checkpoints = answer->checkpoints;
    r->bytes = answer->bytes;
    client_free(answer);
    return 0;
}

static int call_erase(struct client *client, struct receipt *r)
{
    Cached__Admin__V1__EraseUserRequest request = CACHED__ADMIN__V1__ERASE_USER_REQUEST__INIT;
    Cached__Admin__V1__EraseUserResponse *answer = NULL;
    struct client_failure failure;
    request.user = (char *)(uintptr_t)r->name;
    request.dry_run = r->dry_run;
    if (!client_call(client, CLIENT_ERASE_USER, &request.base, &answer, &failure)) {
        const int code = ctl_failure(&failure);
        return failure.code == CLIENT_INVALID_ARGUMENT ? CLIENT_EXIT_USAGE : code;
    }
    r->done = answer->found;
    r->sessions = answer->sessions;
    r->checkpoints = answer->checkpoints;
    r->bytes = answer->bytes;
    client_free(answer);
    return 0;
}

static int run_removal(struct ctl *ctl, const struct command *command, int argc, char **argv,
                       const char *what, int (*call)(struct client *client, struct receipt *r))
{
    struct receipt receipt = {.what = what};
    struct client *client = NULL;
    bool yes = false;
    int code = 0;
    const struct arg args[] = {
        {"--yes", ARG_FLAG, NULL, "do not ask", &yes},
        {"--dry-run", ARG_FLAG, NULL, "only say what would be deleted", &receipt.dry_run},
    };

    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    receipt.name = argv[0];
    code = confirm(&receipt, yes);
    if (code == 0) code = ctl_connect(ctl, &client);
    if (code == 0) code = call(client, &receipt);
    client_destroy(client);
    return code == 0 ? print_receipt(ctl, &receipt) : code;
}

static int run_delete(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    return run_removal(ctl, command, argc, argv, "session", call_delete);
}

static int run_erase(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    return run_removal(ctl, command, argc, argv, "user", call_erase);
}

const struct command command_session_delete = {
    .name = "session delete",
    .arguments = "SESSION",
    .summary = "remove a session for good; running calls are cancelled",
    .details =
        "Asks on a terminal; elsewhere it needs --yes.  Prints what was removed.  When it was\n"
        "gone already the exit code is 0, or 3 once the daemon has forgotten it.  Needs a token\n"
        "with role harness.",
    .example = "cachectl session delete chat-1 --dry-run",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_delete,
};

const struct command command_user_erase = {
    .name = "user erase",
    .arguments = "USER",
    .summary = "remove everything of a user for good",
    .details =
        "Asks on a terminal; elsewhere it needs --yes.  With very many sessions --timeout may\n"
        "pass first: call again, it goes on.  The user's tokens stay valid: take them out of the\n"
        "token file first.  Needs a token with role ops.",
    .example = "cachectl user erase alice --dry-run",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_erase,
};
