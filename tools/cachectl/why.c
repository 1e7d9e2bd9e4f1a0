/*
 * `cachectl why`: the cause first, in one line, then what is known around it.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef Cached__Admin__V1__WhyRemoval why_removal;
typedef Cached__Admin__V1__WhyResponse why_answer;

static const char *time_text(char text[OUT_TEXT_BYTES], uint64_t ms)
{
    const time_t seconds = (time_t)(ms / 1000);
    struct tm parts;
    if (ms == 0 || gmtime_r(&seconds, &parts) == NULL ||
        strftime(text, OUT_TEXT_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0)
        (void)snprintf(text, OUT_TEXT_BYTES, "unknown");
    return text;
}

/* A limit in its unit, which its name ends in; "turns", "sessions" are counts. */
static const char *amount_text(char text[OUT_TEXT_BYTES], const char *limit, uint64_t amount)
{
    if (strcmp(limit, "ttl_ms") == 0) return out_duration(text, amount);
    if (strstr(limit, "bytes") != NULL) return out_bytes(text, amount);
    (void)snprintf(text, OUT_TEXT_BYTES, "%" PRIu64, amount);
    return text;
}

/* "QUOTA turns limit=2 value=3 removed=2026-11-30T16:00:00Z" */
static void print_cause(const char *reason, const why_removal *r)
{
    char limit[OUT_TEXT_BYTES], value[OUT_TEXT_BYTES], when[OUT_TEXT_BYTES];
    (void)printf("%s", reason);
    if (r != NULL && strcmp(r->limit_name, "ttl_ms") == 0)
        (void)printf(" age=%s limit=%s", amount_text(value, r->limit_name, r->value),
                     amount_text(limit, r->limit_name, r->limit));
    else if (r != NULL && r->limit_name[0] != '\0')
        (void)printf(" %s limit=%s", r->limit_name, amount_text(limit, r->limit_name, r->limit));
    if (r != NULL) (void)printf(" removed=%s", time_text(when, r->removed_ms));
    (void)printf("\n");
}

static json_t *removal_json(const why_removal *r)
{
    return json_pack("{s:s, s:b, s:I, s:I, s:I, s:I, s:s, s:I, s:I}", "cause", r->cause,
                     "rows_kept", r->rows_kept, "from", (json_int_t)r->from, "to",
                     (json_int_t)r->to, "checkpoints", (json_int_t)r->checkpoints, "removed_ms",
                     (json_int_t)r->removed_ms, "limit_name", r->limit_name, "limit",
                     (json_int_t)r->limit, "value", (json_int_t)r->value);
}

static int print_json(const why_answer *a)
{
    json_t *list = json_array();
    for (size_t i = 0; i < a->n_removals; i++)
        (void)json_array_append_new(list, removal_json(a->removals[i]));
    return out_json_take(
        json_pack("{s:b, s:s, s:o, s:b, s:I, s:I, s:I, s:I, s:o, s:b}", "found", a->found, "reason",
                  a->reason, "removed", a->removed == NULL ? json_null() : removal_json(a->removed),
                  "stored", a->stored, "head_position", (json_int_t)a->head_position, "checkpoints",
                  (json_int_t)a->checkpoints, "idle_ms", (json_int_t)a->idle_ms, "ttl_ms",
                  (json_int_t)a->ttl_ms, "removals", list, "removals_cut", a->removals_cut));
}

static void print_removals(const struct ctl *ctl, const why_answer *a)
{
    static const char *const names[] = {"CAUSE", "FROM",  "TO",    "CHECKPOINTS",
                                        "ROWS",  "LIMIT", "VALUE", "REMOVED"};
    char text[OUT_TEXT_BYTES];
    struct out_table table;
    if (a->n_removals == 0) return;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x0e);
    for (size_t i = 0; i < a->n_removals; i++) {
        const why_removal *r = a->removals[i];
        const bool limited = r->limit_name[0] != '\0';
        out_table_cell(&table, "%s", r->cause);
        out_table_cell(&table, "%u", r->from);
        out_table_cell(&table, "%u", r->to);
        out_table_cell(&table, "%u", r->checkpoints);
        out_table_cell(&table, "%s", r->rows_kept ? "kept" : "gone");
        out_table_cell(&table, "%s%s%s", r->limit_name, limited ? "=" : "-",
                       limited ? amount_text(text, r->limit_name, r->limit) : "");
        out_table_cell(&table, "%s", limited ? amount_text(text, r->limit_name, r->value) : "-");
        out_table_cell(&table, "%s", time_text(text, r->removed_ms));
    }
    (void)printf("\n");
    out_table_print(ctl, &table);
    if (a->removals_cut) (void)printf("Older removals are forgotten.\n");
}

static void print_answer(const struct ctl *ctl, const why_answer *a, const char *user,
                         const char *session, const char *position)
{
    char idle[OUT_TEXT_BYTES], ttl[OUT_TEXT_BYTES];
    print_cause(a->reason[0] == '\0' ? "STORED" : a->reason, a->removed);
    if (!a->found) {
        (void)printf("%s/%s is gone: %u checkpoints went with it\n", user, session,
                     a->removed == NULL ? 0 : a->removed->checkpoints);
        return;
    }
    (void)printf("%s/%s: head at %u, %u checkpoints, last used %s ago, kept %s from last use\n",
                 user, session, a->head_position, a->checkpoints, out_duration(idle, a->idle_ms),
                 out_duration(ttl, a->ttl_ms));
    if (position != NULL)
        (void)printf("position %s: %s\n", position,
                     a->stored ? "its rows are there" : "no rows of it");
    print_removals(ctl, a);
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__WhyRequest request = CACHED__ADMIN__V1__WHY_REQUEST__INIT;
    why_answer *answer = NULL;
    struct client *client = NULL;
    struct client_failure failure;
    uint64_t position = 0;
    int code = 0;

    const int count = ctl_parse(ctl, command, NULL, 0, argc, argv, &code);
    if (count < 0) return code;
    const bool has_position = count == 3;
    if (has_position && !ctl_parse_count(argv[2], 0, UINT32_MAX, &position)) {
        ctl_error("POSITION is a token's number, from 0");
        return CLIENT_EXIT_USAGE;
    }
    request.user = argv[0];
    request.session_id = argv[1];
    request.has_position = has_position;
    request.position = (uint32_t)position;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    if (client_call(client, CLIENT_WHY, &request.base, &answer, &failure)) {
        if (ctl->json)
            code = print_json(answer);
        else
            print_answer(ctl, answer, argv[0], argv[1], has_position ? argv[2] : NULL);
        client_free(answer);
    } else {
        code = ctl_failure(&failure);
        if (failure.code == CLIENT_INVALID_ARGUMENT) code = CLIENT_EXIT_USAGE;
    }
    client_destroy(client);
    return code;
}

const struct command command_why = {
    .name = "why",
    .arguments = "USER SESSION [POSITION]",
    .summary = "why rows of a session are not there",
    .details =
        "The first line is the cause: EXPIRED with age and limit, QUOTA with the limit, CAPACITY,\n"
        "ROLLED_BACK, DELETED, LOST_NODE, CORRUPT, MODEL_CHANGED, NEVER_STORED, TOO_SHORT, or\n"
        "STORED.  Without POSITION it is about the head; what was removed before is listed below,\n"
        "also after a restart.  Asking renews nothing.  Needs a token with role ops, or harness\n"
        "for one's own sessions.",
    .example = "cachectl why alice chat-1 1024",
    .arguments_min = 2,
    .arguments_max = 3,
    .run = run,
};
