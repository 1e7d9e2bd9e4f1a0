/*
 * `cachectl explain`: the reasons of the API, from the same table the daemon answers from, so the
 * two cannot drift apart.  Needs no daemon.
 */

#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/reason.h"

#include <ctype.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

static json_t *reason_json(const struct kv_reason_info *info)
{
    return json_pack("{s:s, s:s, s:i, s:s, s:s}", "name", info->name, "kind",
                     info->grpc_code == 0 ? "outcome" : "failure", "exit_code",
                     (int)client_exit_code((enum client_code)info->grpc_code), "cause", info->cause,
                     "remedy", info->remedy);
}

static int list_all(const struct ctl *ctl)
{
    static const char *const names[] = {"REASON", "STATUS", "EXIT", "CAUSE"};

    if (ctl->json) {
        json_t *list = json_array();
        for (unsigned i = 0; i < KV_REASON_COUNT; i++)
            (void)json_array_append_new(list, reason_json(kv_reason_info((enum kv_reason)i)));
        return out_json_take(json_pack("{s:o}", "reasons", list));
    }
    struct out_table table;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0);
    for (unsigned i = 0; i < KV_REASON_COUNT; i++) {
        const struct kv_reason_info *info = kv_reason_info((enum kv_reason)i);
        out_table_cell(&table, "%s", info->name);
        out_table_cell(&table, "%s",
                       info->grpc_code == 0 ? "outcome" : kv_reason_code_name(info->grpc_code));
        out_table_cell(&table, "%d", (int)client_exit_code((enum client_code)info->grpc_code));
        out_table_cell(&table, "%s", info->cause);
    }
    out_table_print(ctl, &table);
    return CLIENT_EXIT_OK;
}

static int not_found(const char *name)
{
    const char *names[KV_REASON_COUNT];

    for (unsigned i = 0; i < KV_REASON_COUNT; i++)
        names[i] = kv_reason_info((enum kv_reason)i)->name;
    const char *nearest = ctl_nearest(name, names, KV_REASON_COUNT);
    ctl_error("no reason is called %.64s%s%s%s; `cachectl explain` lists all", name,
              nearest ? " (did you mean " : "", nearest ? nearest : "", nearest ? "?)" : "");
    return CLIENT_EXIT_NOT_FOUND;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    enum kv_reason reason = KV_REASON_NONE;
    char name[64];
    int code = 0;

    const int count = ctl_parse(ctl, command, NULL, 0, argc, argv, &code);
    if (count < 0) return code;
    if (count == 0) return list_all(ctl);

    /* People type what they read in a log in lower case. */
    (void)snprintf(name, sizeof(name), "%s", argv[0]);
    for (char *p = name; *p != '\0'; p++)
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    if (strlen(argv[0]) >= sizeof(name) || !kv_reason_find(name, &reason)) return not_found(name);

    const struct kv_reason_info *info = kv_reason_info(reason);
    if (ctl->json) return out_json_take(reason_json(info));
    (void)printf("%s%s%s", ctl_bold(ctl), info->name, ctl_plain(ctl));
    if (info->grpc_code == 0) {
        (void)printf("  (an outcome, not a failure)\n");
    } else {
        (void)printf("  (%s, exit code %d)\n", kv_reason_code_name(info->grpc_code),
                     (int)client_exit_code((enum client_code)info->grpc_code));
    }
    (void)printf("  cause   %s\n  remedy  %s\n", info->cause, info->remedy);
    return CLIENT_EXIT_OK;
}

const struct command command_explain = {
    .name = "explain",
    .arguments = "[REASON]",
    .summary = "what a reason means and what to do about it",
    .details = "Without REASON it lists all of them.  An unknown name exits 3.",
    .example = "cachectl explain EXPIRED",
    .arguments_max = 1,
    .run = run,
};
