/*
 * `cachectl purge`: drops what another model left.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef Cached__Admin__V1__PurgeModelResponse purge_answer;

static int print_json(const purge_answer *a, bool dry_run)
{
    json_t *list = json_array();
    for (size_t i = 0; i < a->n_models; i++)
        (void)json_array_append_new(
            list, json_pack("{s:s, s:I, s:b, s:b}", "model", a->models[i]->model, "checkpoints",
                            (json_int_t)a->models[i]->checkpoints, "served", a->models[i]->served,
                            "purged", a->models[i]->asked && !dry_run));
    return out_json_take(json_pack("{s:b, s:I, s:I, s:o}", "dry_run", dry_run, "checkpoints",
                                   (json_int_t)a->checkpoints, "bytes", (json_int_t)a->bytes,
                                   "models", list));
}

static void print_text(const struct ctl *ctl, const purge_answer *a, bool dry_run)
{
    static const char *const names[] = {"MODEL", "CHECKPOINTS", "STATE"};
    char bytes[OUT_TEXT_BYTES];
    struct out_table table;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x02);
    for (size_t i = 0; i < a->n_models; i++) {
        out_table_cell(&table, "%s", a->models[i]->model);
        out_table_cell(&table, "%" PRIu64, a->models[i]->checkpoints);
        out_table_cell(&table, "%s",
                       a->models[i]->served             ? "served"
                       : a->models[i]->asked && dry_run ? "would go"
                       : a->models[i]->asked            ? "purged"
                                                        : "stays");
    }
    out_table_print(ctl, &table);
    (void)printf("%s %" PRIu64 " checkpoints, %s\n", dry_run ? "would purge" : "purged",
                 a->checkpoints, out_bytes(bytes, a->bytes));
}

static int confirm(const char *model, bool yes)
{
    char line[16] = "";
    if (yes) return 0;
    if (isatty(STDIN_FILENO) != 1 || isatty(STDERR_FILENO) != 1) {
        ctl_error("this cannot be undone: say --yes, or --dry-run to see what would go");
        return CLIENT_EXIT_USAGE;
    }
    (void)fprintf(stderr, "Drop every checkpoint of model %s?  It cannot be undone.  [y/N] ",
                  model);
    if (fgets(line, sizeof(line), stdin) != NULL && (line[0] == 'y' || line[0] == 'Y')) return 0;
    ctl_error("nothing was purged");
    return CLIENT_EXIT_FAILED;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__PurgeModelRequest request = CACHED__ADMIN__V1__PURGE_MODEL_REQUEST__INIT;
    purge_answer *answer = NULL;
    struct client *client = NULL;
    struct client_failure failure;
    const char *model = NULL;
    bool yes = false, dry_run = false;
    int code = 0;
    const struct arg args[] = {
        {"--model", ARG_TEXT, "OLD", "first digits of its fingerprint, or `other`", &model},
        {"--yes", ARG_FLAG, NULL, "do not ask", &yes},
        {"--dry-run", ARG_FLAG, NULL, "only say what would go", &dry_run},
    };

    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    if (model == NULL) {
        ctl_error("say which with --model OLD; --model other --dry-run lists those there are");
        return CLIENT_EXIT_USAGE;
    }
    code = confirm(model, yes || dry_run);
    if (code == 0) code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    request.model = (char *)(uintptr_t)model;
    request.dry_run = dry_run;
    if (!client_call(client, CLIENT_PURGE_MODEL, &request.base, &answer, &failure)) {
        code = ctl_failure(&failure);
        if (failure.code == CLIENT_INVALID_ARGUMENT) code = CLIENT_EXIT_USAGE;
    } else if (ctl->json) {
        code = print_json(answer, dry_run);
    } else {
        print_text(ctl, answer, dry_run);
    }
    client_free(answer);
    client_destroy(client);
    return code;
}

const struct command command_purge = {
    .name = "purge",
    .arguments = "",
    .summary = "drop what a model left that is not served any more",
    .details =
        "A checkpoint of another model is never used; it only keeps its place until it expires.\n"
        "OLD is the fingerprint as `cachectl status` shows it, at least 8 digits, or `other` for\n"
        "all but the served one, which is never purged.  Asks on a terminal; elsewhere it needs\n"
        "--yes.  Repeat it when --timeout passed first: it goes on.  Needs a token with role ops.",
    .example = "cachectl purge --model other --dry-run",
    .run = run,
};
