/*
 * `cachectl session list` and `cachectl session show`: what the caller's sessions hold.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/session_tree.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef Cached__Session__V1__SessionInfo session_info;
typedef Cached__Session__V1__CheckpointInfo checkpoint_info;
typedef Cached__Session__V1__GetSessionResponse session_answer;

static const char *kind_name(Cached__Session__V1__SessionKind kind)
{
    switch (kind) {
    case CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_SUB:
        return "sub";
    case CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_EPHEMERAL:
        return "ephemeral";
    default:
        return "main";
    }
}

const char *checkpoint_kind_name(Cached__Session__V1__CheckpointKind kind)
{
    switch (kind) {
    case CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_PREFILL_END:
        return "PREFILL_END";
    case CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_DECODE_END:
        return "DECODE_END";
    case CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_ANCHOR:
        return "ANCHOR";
    default:
        return "MANUAL";
    case CACHED__SESSION__V1__CHECKPOINT_KIND__CHECKPOINT_KIND_BRANCH:
        return "BRANCH";
    }
}

const char *level_name(Cached__Session__V1__Level level)
{
    switch (level) {
    case CACHED__SESSION__V1__LEVEL__LEVEL_ACCEPTED:
        return "ACCEPTED";
    case CACHED__SESSION__V1__LEVEL__LEVEL_RAM:
        return "RAM";
    case CACHED__SESSION__V1__LEVEL__LEVEL_SSD:
        return "SSD";
    default:
        return "NONE";
    }
}

static json_t *session_json(const session_info *s)
{
    return json_pack("{s:s, s:s, s:I, s:I, s:b, s:I, s:I, s:I, s:b, s:s}", "session_id",
                     s->session_id, "kind", kind_name(s->kind), "head_position",
                     (json_int_t)s->head_position, "checkpoints", (json_int_t)s->checkpoints,
                     "live", s->live, "idle_ms", (json_int_t)s->idle_ms, "age_ms",
                     (json_int_t)s->age_ms, "ttl_ms", (json_int_t)s->ttl_ms, "ttl_of_plan",
                     s->ttl_of_plan, "parent_session_id", s->parent_session_id);
}

/* One page; *token is replaced by the next one. */
static int list_page(struct client *client, char **token, json_t *list, struct out_table *table)
{
    Cached__Session__V1__ListSessionsRequest request =
        CACHED__SESSION__V1__LIST_SESSIONS_REQUEST__INIT;
    Cached__Session__V1__ListSessionsResponse *answer = NULL;
    struct client_failure failure;
    char text[OUT_TEXT_BYTES];

    request.page_size = 1000;
    if (*token) request.page_token = *token;
    if (!client_call(client, CLIENT_LIST_SESSIONS, &request.base, &answer, &failure)) {
        return ctl_failure(&failure);
    }
    for (size_t i = 0; i < answer->n_sessions; i++) {
        const session_info *s = answer->sessions[i];
        if (list) (void)json_array_append_new(list, session_json(s));
        if (list) continue;
        out_table_cell(table, "%s", s->session_id);
        out_table_cell(table, "%s", kind_name(s->kind));
        out_table_cell(table, "%u", s->head_position);
        out_table_cell(table, "%u", s->checkpoints);
        out_table_cell(table, "%s", s->live ? "yes" : "no");
        out_table_cell(table, "%s", out_duration(text, s->idle_ms));
        out_table_cell(table, "%s", out_duration(text, s->age_ms));
        out_table_cell(table, "%s%s", s->ttl_ms == 0 ? "-" : out_duration(text, s->ttl_ms),
                       s->ttl_of_plan ? " (plan)" : "");
        out_table_cell(table, "%s", s->parent_session_id[0] ? s->parent_session_id : "-");
    }
    free(*token);
    *token = answer->next_page_token[0] ? strdup(answer->next_page_token) : NULL;
    client_free(answer);
    return CLIENT_EXIT_OK;
}

static int run_list(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    static const char *const names[] = {"SESSION", "KIND", "HEAD", "CHECKPOINTS", "LIVE",
                                        "IDLE",    "AGE",  "TTL",  "PARENT"};
    struct client *client = NULL;
    struct out_table table;
    char *token = NULL;
    int code = 0;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;

    json_t *list = ctl->json ? json_array() : NULL;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x0c);
    do {
        code = list_page(client, &token, list, &table);
    } while (code == 0 && token);
    client_destroy(client);
    free(token);
    if (code == 0 && !ctl->json) {
        out_table_print(ctl, &table);
    } else {
        out_table_drop(&table);
    }
    if (code == 0 && ctl->json) return out_json_take(json_pack("{s:o}", "sessions", list));
    json_decref(list);
    return code;
}

static void print_note(struct out_table *table, const checkpoint_info *c)
{
    char approximate[OUT_TEXT_BYTES] = "", pinned[64] = "", leaves[64] = "", text[OUT_TEXT_BYTES];
    if (c->approximate)
        (void)snprintf(approximate, sizeof(approximate), "approximate from %u ", c->approx_from);
    if (c->pin_expire_ms > 0)
        (void)snprintf(pinned, sizeof(pinned), "pinned %s ", out_duration(text, c->pin_expire_ms));
    if (c->leave_ms > 0)
        (void)snprintf(leaves, sizeof(leaves), "goes in %s ", out_duration(text, c->leave_ms));
    out_table_cell(table, "%s%s%s", approximate, pinned, leaves);
}

static void print_checkpoints(const struct ctl *ctl, const session_answer *answer)
{
    static const char *const names[] = {"POSITION", "KIND",  "ID",  "PARENT", "TOKENS", "ROWS",
                                        "WINDOW",   "BYTES", "AGE", "TTL",    "NOTE"};
    char text[OUT_TEXT_BYTES];
    struct out_table table;

    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x91);
    for (size_t i = 0; i < answer->n_checkpoints; i++) {
        const checkpoint_info *c = answer->checkpoints[i];
        uint32_t parent_position = 0;
        for (size_t j = 0; j < i; j++) {
            const checkpoint_info *p = answer->checkpoints[j];
            if (p->id.len == c->parent_id.len && p->id.len > 0 &&
                memcmp(p->id.data, c->parent_id.data, p->id.len) == 0)
                parent_position = p->position;
        }
        out_table_cell(&table, "%u", c->position);
        out_table_cell(&table, "%s", checkpoint_kind_name(c->kind));
        out_table_cell(&table, "%s", out_hex(text, c->id.data, KV_MIN(c->id.len, 4)));
        (void)out_hex(text, c->parent_id.data, KV_MIN(c->parent_id.len, 4));
        out_table_cell(&table, "%s", text[0] ? text : "-");
        out_table_cell(&table, "%u", c->position - KV_MIN(parent_position, c->position));
        out_table_cell(&table, "%s", level_name(c->rows_level));
        out_table_cell(&table, "%s",
                       c->window_level == CACHED__SESSION__V1__LEVEL__LEVEL_RAM ? "yes" : "no");
        out_table_cell(&table, "%s", out_bytes(text, c->bytes));
        out_table_cell(&table, "%s", out_duration(text, c->age_ms));
        out_table_cell(&table, "%s",
                       c->rows_expire_ms == 0 ? "-" : out_duration(text, c->rows_expire_ms));
        print_note(&table, c);
    }
    out_table_print(ctl, &table);
}

static int print_show_json(const session_answer *answer)
{
    json_t *checkpoints = json_array(), *heads = json_array();
    char id[OUT_TEXT_BYTES], parent[OUT_TEXT_BYTES];

    for (size_t i = 0; i < answer->n_checkpoints; i++) {
        const checkpoint_info *c = answer->checkpoints[i];
        (void)out_hex(id, c->id.data, KV_MIN(c->id.len, 8));
        (void)out_hex(parent, c->parent_id.data, KV_MIN(c->parent_id.len, 8));
        (void)json_array_append_new(
            checkpoints,
            json_pack("{s:s, s:s, s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:b, s:I, s:I, s:I, s:s}",
                      "id", id, "parent_id", parent, "position", (json_int_t)c->position, "kind",
                      checkpoint_kind_name(c->kind), "rows_level", level_name(c->rows_level),
                      "window_level", level_name(c->window_level), "rows_expire_ms",
                      (json_int_t)c->rows_expire_ms, "window_expire_ms",
                      (json_int_t)c->window_expire_ms, "bytes", (json_int_t)c->bytes, "age_ms",
                      (json_int_t)c->age_ms, "approximate", c->approximate, "approx_from",
                      (json_int_t)c->approx_from, "pin_expire_ms", (json_int_t)c->pin_expire_ms,
                      "leave_ms", (json_int_t)c->leave_ms, "session_id",
                      c->session_id[0] ? c->session_id : answer->session->session_id));
    }
    for (size_t i = 0; i < answer->n_heads; i++) {
        const Cached__Session__V1__TreeHead *head = answer->heads[i];
        (void)out_hex(id, head->checkpoint_id.data, KV_MIN(head->checkpoint_id.len, 8));
        (void)json_array_append_new(heads, json_pack("{s:s, s:s, s:I}", "session_id",
                                                     head->session_id, "checkpoint_id", id,
                                                     "position", (json_int_t)head->position));
    }
    (void)out_hex(id, answer->head_checkpoint_id.data, KV_MIN(answer->head_checkpoint_id.len, 8));
    return out_json_take(json_pack(
        "{s:o, s:s, s:I, s:o, s:o}", "session", session_json(answer->session), "head_checkpoint_id",
        id, "epoch", (json_int_t)answer->epoch, "checkpoints", checkpoints, "heads", heads));
}

static void print_show(const struct ctl *ctl, const session_answer *answer, bool tree_only)
{
    const session_info *s = answer->session;
    char idle[OUT_TEXT_BYTES], age[OUT_TEXT_BYTES], ttl[OUT_TEXT_BYTES];

    (void)printf("session   %s%s%s  (%s%s%s)\n", ctl_bold(ctl), s->session_id, ctl_plain(ctl),
                 kind_name(s->kind), s->parent_session_id[0] ? " of " : "", s->parent_session_id);
    (void)printf("head      %u tokens, %s, epoch %" PRIu64 "\n", s->head_position,
                 s->live ? "live" : "not live", answer->epoch);
    (void)printf("used      %s ago, opened %s ago\n", out_duration(idle, s->idle_ms),
                 out_duration(age, s->age_ms));
    (void)printf("ttl       %s%s\n\n", out_duration(ttl, s->ttl_ms),
                 s->ttl_of_plan ? " (plan)" : "");
    if (!tree_only) print_checkpoints(ctl, answer);
    if (answer->n_checkpoints > 0) session_tree_print(answer, tree_only);
}

static int run_show(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Session__V1__GetSessionRequest request = CACHED__SESSION__V1__GET_SESSION_REQUEST__INIT;
    session_answer *answer = NULL;
    struct client_failure failure;
    struct client *client = NULL;
    bool tree_only = false;
    int code = 0;
    const struct arg args[] = {
        {"--tree", ARG_FLAG, NULL, "the tree only, with what each checkpoint holds", &tree_only},
    };

    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    request.session_id = argv[0];
    if (!client_call(client, CLIENT_GET_SESSION, &request.base, &answer, &failure)) {
        code = ctl_failure(&failure);
        /* The name is all that was said, so that is what was wrong. */
        if (failure.code == CLIENT_INVALID_ARGUMENT) code = CLIENT_EXIT_USAGE;
    } else if (!answer->session) {
        ctl_error("the daemon's answer holds no session");
        code = CLIENT_EXIT_FAILED;
    } else if (ctl->json) {
        code = print_show_json(answer);
    } else {
        print_show(ctl, answer, tree_only);
    }
    client_free(answer);
    client_destroy(client);
    return code;
}

const struct command command_session_list = {
    .name = "session list",
    .arguments = "",
    .summary = "the sessions of the token's user",
    .example = "cachectl session list",
    .run = run_list,
};

const struct command command_session_show = {
    .name = "session show",
    .arguments = "SESSION",
    .summary = "one session, its checkpoints and their tree",
    .details = "In the tree a line of only children stays in one column; side branches, from\n"
               "rollbacks, edited prompts and forks, are indented.  With --tree a line says what\n"
               "a checkpoint adds: tokens, bytes, where its rows are (SSD, or RAM until they are\n"
               "saved) and whether its window is in memory, its age, and how long it lives if\n"
               "nobody uses it; and which session made it, if another one did.",
    .example = "cachectl session show chat-1",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_show,
};
