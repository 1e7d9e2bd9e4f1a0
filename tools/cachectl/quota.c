/*
 * `cachectl quota`: what users may have, what they have, and what goes next.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/quota.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef Cached__Admin__V1__QuotaLimit quota_limit;
typedef Cached__Admin__V1__QuotaNext quota_next;
typedef Cached__Admin__V1__SetLimit set_limit;

/* Limits as flags said them. */
struct wanted {
    const char *texts[KV_QUOTA_COUNT];
    set_limit items[KV_QUOTA_COUNT];
    set_limit *list[KV_QUOTA_COUNT];
    size_t count;
};

#define LIMIT_ARGS(w)                                                                              \
    {"--sessions", ARG_TEXT, "N", "sessions of kind main", &(w)->texts[KV_QUOTA_SESSIONS]},        \
        {"--turns", ARG_TEXT, "N", "turns of a session that keep a checkpoint",                    \
         &(w)->texts[KV_QUOTA_TURNS]},                                                             \
        {"--bytes", ARG_TEXT, "SIZE", "bytes on SSD, as 50GiB", &(w)->texts[KV_QUOTA_BYTES_SSD]},  \
        {"--requests", ARG_TEXT, "N", "calls a second", &(w)->texts[KV_QUOTA_REQUESTS_PER_S]},     \
        {"--tokens", ARG_TEXT, "N", "tokens computed a second",                                    \
         &(w)->texts[KV_QUOTA_TOKENS_PER_S]},                                                      \
        {"--saves", ARG_TEXT, "N", "saves in flight", &(w)->texts[KV_QUOTA_SAVES]},                \
    {                                                                                              \
        "--ttl", ARG_TEXT, "TIME", "life of rows from last use, as 24h; none: ssd.ttl",            \
            &(w)->texts[KV_QUOTA_TTL_MS]                                                           \
    }

struct unit {
    const char *name;
    uint64_t factor;
};
static const struct unit sizes[] = {{"", 1},
                                    {"B", 1},
                                    {"KiB", 1ull << 10},
                                    {"MiB", 1ull << 20},
                                    {"GiB", 1ull << 30},
                                    {"TiB", 1ull << 40},
                                    {NULL, 0}};
/* As in the configuration: a time has its unit. */
static const struct unit times[] = {
    {"ms", 1}, {"s", 1000}, {"min", 60000}, {"h", 3600000}, {NULL, 0}};

static bool parse_amount(const char *text, const struct unit *units, uint64_t *ret_value)
{
    char digits[24] = "";
    const size_t count = strspn(text, "0123456789");
    uint64_t value;
    if (count == 0 || count >= sizeof(digits)) return false;
    memcpy(digits, text, count);
    for (; units->name != NULL; units++) {
        if (strcmp(text + count, units->name) != 0) continue;
        if (!ctl_parse_count(digits, 0, UINT64_MAX / units->factor, &value)) return false;
        *ret_value = value * units->factor;
        return true;
    }
    return false;
}

/* 0, or the exit code: a value that is none. */
static int take_wanted(struct wanted *wanted)
{
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        const char *text = wanted->texts[i];
        if (text == NULL) continue;
        set_limit *item = &wanted->items[wanted->count];
        cached__admin__v1__set_limit__init(item);
        item->name = (char *)(uintptr_t)kv_quota_name((enum kv_quota_kind)i);
        item->unlimited = strcmp(text, "none") == 0;
        item->remove = strcmp(text, "plan") == 0;
        const bool has_value = !item->unlimited && !item->remove;
        const bool is_time = i == KV_QUOTA_TTL_MS;
        if (has_value && !parse_amount(text, is_time ? times : sizes, &item->limit)) {
            ctl_error("%s: %s is no %s, nor `none` or `plan`", item->name, text,
                      is_time ? "time such as 24h" : "number");
            return CLIENT_EXIT_USAGE;
        }
        wanted->list[wanted->count++] = item;
    }
    return 0;
}

/* ---- printing ---- */

static const char *limit_text(char text[OUT_TEXT_BYTES], const char *name, uint64_t value,
                              bool unlimited)
{
    if (strcmp(name, "ttl_ms") == 0) return out_duration(text, value);
    if (unlimited) return "none";
    if (strcmp(name, "bytes_ssd") == 0) return out_bytes(text, value);
    (void)snprintf(text, OUT_TEXT_BYTES, "%" PRIu64, value);
    return text;
}

static json_t *limits_json(quota_limit *const *limits, size_t count)
{
    json_t *all = json_object();
    for (size_t i = 0; i < count; i++)
        (void)json_object_set_new(all, limits[i]->name,
                                  json_pack("{s:o, s:b, s:b, s:I}", "limit",
                                            limits[i]->unlimited && limits[i]->limit == 0
                                                ? json_null()
                                                : json_integer((json_int_t)limits[i]->limit),
                                            "unlimited", limits[i]->unlimited, "own",
                                            limits[i]->own, "used", (json_int_t)limits[i]->used));
    return all;
}

static json_t *next_json(quota_next *const *next, size_t count)
{
    json_t *all = json_array();
    for (size_t i = 0; i < count; i++)
        (void)json_array_append_new(all, json_pack("{s:s, s:I, s:I, s:b, s:b}", "session_id",
                                                   next[i]->session_id, "idle_ms",
                                                   (json_int_t)next[i]->idle_ms, "bytes",
                                                   (json_int_t)next[i]->bytes, "in_use",
                                                   next[i]->in_use, "over", next[i]->over));
    return all;
}

static void print_limits(const struct ctl *ctl, quota_limit *const *limits, size_t count)
{
    static const char *const names[] = {"LIMIT", "OF", "USED", "FROM"};
    char text[OUT_TEXT_BYTES];
    struct out_table table;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x06);
    for (size_t i = 0; i < count; i++) {
        const quota_limit *l = limits[i];
        const bool counted = strcmp(l->name, "sessions") == 0 ||
                             strcmp(l->name, "bytes_ssd") == 0 || strcmp(l->name, "saves") == 0;
        out_table_cell(&table, "%s", l->name);
        out_table_cell(&table, "%s", limit_text(text, l->name, l->limit, l->unlimited));
        out_table_cell(&table, "%s", counted ? limit_text(text, l->name, l->used, false) : "-");
        const bool is_configured = l->unlimited && strcmp(l->name, "ttl_ms") == 0;
        out_table_cell(&table, "%s", is_configured ? "ssd.ttl" : l->own ? "own" : "plan");
    }
    out_table_print(ctl, &table);
}

static void print_next(const struct ctl *ctl, quota_next *const *next, size_t count)
{
    static const char *const names[] = {"NEXT", "SESSION", "IDLE", "BYTES", "STATE"};
    char text[OUT_TEXT_BYTES];
    struct out_table table;
    if (count == 0) return;
    (void)printf("\n");
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x09);
    for (size_t i = 0; i < count; i++) {
        out_table_cell(&table, "%zu", i + 1);
        out_table_cell(&table, "%s", next[i]->session_id);
        out_table_cell(&table, "%s", out_duration(text, next[i]->idle_ms));
        out_table_cell(&table, "%s", out_bytes(text, next[i]->bytes));
        out_table_cell(&table, "%s",
                       next[i]->in_use ? "in use"
                       : next[i]->over ? "goes"
                                       : "stays while there is room");
    }
    out_table_print(ctl, &table);
}

static void print_expired(uint64_t expired)
{
    if (expired > 0)
        (void)printf("\n%" PRIu64 " sessions go unused longer than that ttl: their rows expire\n",
                     expired);
}

static int show(const struct ctl *ctl, const char *user, const char *plan,
                quota_limit *const *limits, size_t limit_count, quota_next *const *next,
                size_t next_count, uint64_t expired)
{
    if (ctl->json)
        return out_json_take(json_pack("{s:s, s:s, s:o, s:o, s:I}", "user", user, "plan", plan,
                                       "limits", limits_json(limits, limit_count), "next",
                                       next_json(next, next_count), "expired_sessions",
                                       (json_int_t)expired));
    (void)printf("user %s, plan %s\n\n", user, plan);
    print_limits(ctl, limits, limit_count);
    print_next(ctl, next, next_count);
    print_expired(expired);
    return CLIENT_EXIT_OK;
}

/* ---- the commands ---- */

/* One call; a request that is refused as such is wrong usage. */
static int call(struct ctl *ctl, enum client_method method, const ProtobufCMessage *request,
                void *ret_answer)
{
    struct client *client = NULL;
    struct client_failure failure;
    int code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    if (!client_call(client, method, request, ret_answer, &failure)) {
        code = ctl_failure(&failure);
        if (failure.code == CLIENT_INVALID_ARGUMENT) code = CLIENT_EXIT_USAGE;
    }
    client_destroy(client);
    return code;
}

static int run_set(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__SetQuotaRequest request = CACHED__ADMIN__V1__SET_QUOTA_REQUEST__INIT;
    Cached__Admin__V1__SetQuotaResponse *a = NULL;
    struct wanted wanted = {0};
    const char *plan = NULL;
    bool dry_run = false;
    int code = 0;
    const struct arg args[] = {
        LIMIT_ARGS(&wanted),
        {"--plan", ARG_TEXT, "NAME", "the user's plan from now on", &plan},
        {"--dry-run", ARG_FLAG, NULL, "only say what would go", &dry_run},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    code = take_wanted(&wanted);
    if (code != 0) return code;
    request.user = argv[0];
    if (plan != NULL) request.plan = (char *)(uintptr_t)plan;
    request.limits = wanted.list;
    request.n_limits = wanted.count;
    request.dry_run = dry_run;
    code = call(ctl, CLIENT_SET_QUOTA, &request.base, &a);
    if (code != 0) return code;
    code = show(ctl, argv[0], a->plan, a->limits, a->n_limits, a->next, a->n_next,
                a->expired_sessions);
    client_free(a);
    return code;
}

static int run_get(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__GetQuotaRequest request = CACHED__ADMIN__V1__GET_QUOTA_REQUEST__INIT;
    Cached__Admin__V1__GetQuotaResponse *a = NULL;
    int code = 0;
    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    request.user = argv[0];
    code = call(ctl, CLIENT_GET_QUOTA, &request.base, &a);
    if (code != 0) return code;
    code = show(ctl, argv[0], a->plan, a->limits, a->n_limits, a->next, a->n_next, 0);
    client_free(a);
    return code;
}

static int run_delete(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__DeleteQuotaRequest request = CACHED__ADMIN__V1__DELETE_QUOTA_REQUEST__INIT;
    Cached__Admin__V1__DeleteQuotaResponse *a = NULL;
    bool dry_run = false;
    int code = 0;
    const struct arg args[] = {
        {"--dry-run", ARG_FLAG, NULL, "only say whether there is anything", &dry_run},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    request.user = argv[0];
    request.dry_run = dry_run;
    code = call(ctl, CLIENT_DELETE_QUOTA, &request.base, &a);
    if (code != 0) return code;
    if (ctl->json)
        code = out_json_take(json_pack("{s:s, s:b, s:b}", "user", argv[0], "dry_run", dry_run,
                                       "deleted", a->found && !dry_run));
    else
        (void)printf("%s %s\n", argv[0],
                     !a->found ? "has nothing of its own"
                     : dry_run ? "would have its plan's limits, of the default plan"
                               : "has the limits of the default plan now");
    client_free(a);
    return code;
}

static int list_page(struct ctl *ctl, char **token, json_t *list, struct out_table *table)
{
    Cached__Admin__V1__ListUsersRequest request = CACHED__ADMIN__V1__LIST_USERS_REQUEST__INIT;
    Cached__Admin__V1__ListUsersResponse *a = NULL;
    char text[OUT_TEXT_BYTES];
    request.page_size = 1000;
    if (*token) request.page_token = *token;
    const int code = call(ctl, CLIENT_LIST_USERS, &request.base, &a);
    if (code != 0) return code;
    for (size_t i = 0; i < a->n_users; i++) {
        const Cached__Admin__V1__UserInfo *u = a->users[i];
        if (list)
            (void)json_array_append_new(
                list,
                json_pack("{s:s, s:s, s:b, s:I, s:I, s:I, s:I}", "user", u->user, "plan", u->plan,
                          "own", u->own, "sessions", (json_int_t)u->sessions, "sessions_limit",
                          (json_int_t)u->sessions_limit, "bytes_ssd", (json_int_t)u->bytes_ssd,
                          "bytes_ssd_limit", (json_int_t)u->bytes_ssd_limit));
        if (list) continue;
        out_table_cell(table, "%s", u->user);
        out_table_cell(table, "%s%s", u->plan, u->own ? " and own" : "");
        out_table_cell(table, "%" PRIu64, u->sessions);
        out_table_cell(table, "%s",
                       limit_text(text, "sessions", u->sessions_limit, u->sessions_limit == 0));
        out_table_cell(table, "%s", out_bytes(text, u->bytes_ssd));
        out_table_cell(table, "%s",
                       limit_text(text, "bytes_ssd", u->bytes_ssd_limit, u->bytes_ssd_limit == 0));
    }
    free(*token);
    *token = a->next_page_token[0] ? strdup(a->next_page_token) : NULL;
    client_free(a);
    return 0;
}

static int run_list(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    static const char *const names[] = {"USER", "PLAN", "SESSIONS", "OF", "BYTES", "OF"};
    struct out_table table;
    char *token = NULL;
    int code = 0;
    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    json_t *list = ctl->json ? json_array() : NULL;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x3c);
    do {
        code = list_page(ctl, &token, list, &table);
    } while (code == 0 && token);
    free(token);
    if (code == 0 && !ctl->json)
        out_table_print(ctl, &table);
    else
        out_table_drop(&table);
    if (code == 0 && ctl->json) return out_json_take(json_pack("{s:o}", "users", list));
    json_decref(list);
    return code;
}

static int list_plans(struct ctl *ctl)
{
    Cached__Admin__V1__ListPlansRequest request = CACHED__ADMIN__V1__LIST_PLANS_REQUEST__INIT;
    Cached__Admin__V1__ListPlansResponse *a = NULL;
    static const char *const names[] = {"PLAN",    "USERS",    "SESSIONS", "TURNS", "BYTES",
                                        "CALLS/S", "TOKENS/S", "SAVES",    "TTL"};
    char text[OUT_TEXT_BYTES];
    struct out_table table;
    const int code = call(ctl, CLIENT_LIST_PLANS, &request.base, &a);
    if (code != 0) return code;
    json_t *list = json_array();
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x1fe);
    for (size_t i = 0; i < a->n_plans; i++) {
        const Cached__Admin__V1__Plan *p = a->plans[i];
        (void)json_array_append_new(list,
                                    json_pack("{s:s, s:I, s:b, s:o}", "plan", p->name, "users",
                                              (json_int_t)p->users, "configured", p->configured,
                                              "limits", limits_json(p->limits, p->n_limits)));
        out_table_cell(&table, "%s", p->name);
        out_table_cell(&table, "%" PRIu64, p->users);
        for (size_t k = 0; k < p->n_limits; k++)
            out_table_cell(
                &table, "%s",
                limit_text(text, p->limits[k]->name, p->limits[k]->limit, p->limits[k]->unlimited));
    }
    client_free(a);
    if (ctl->json) {
        out_table_drop(&table);
        return out_json_take(json_pack("{s:o}", "plans", list));
    }
    json_decref(list);
    out_table_print(ctl, &table);
    return CLIENT_EXIT_OK;
}

static int run_plan(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    Cached__Admin__V1__SetPlanRequest request = CACHED__ADMIN__V1__SET_PLAN_REQUEST__INIT;
    Cached__Admin__V1__SetPlanResponse *a = NULL;
    struct wanted wanted = {0};
    bool dry_run = false, delete = false;
    int code = 0;
    const struct arg args[] = {
        LIMIT_ARGS(&wanted),
        {"--delete", ARG_FLAG, NULL, "remove the plan; nobody may have it", &delete},
        {"--dry-run", ARG_FLAG, NULL, "change nothing", &dry_run},
    };
    const int count = ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code);
    if (count < 0) return code;
    code = take_wanted(&wanted);
    if (code != 0) return code;
    if (count == 0 && (wanted.count > 0 || delete)) {
        ctl_error("which plan?  `cachectl quota plan` alone lists them");
        return CLIENT_EXIT_USAGE;
    }
    if (count == 0) return list_plans(ctl);
    request.name = argv[0];
    request.limits = wanted.list;
    request.n_limits = wanted.count;
    request.dry_run = dry_run;
    request.remove = delete;
    code = call(ctl, CLIENT_SET_PLAN, &request.base, &a);
    if (code != 0) return code;
    if (ctl->json) {
        code = out_json_take(json_pack("{s:s, s:b, s:b, s:o, s:I}", "plan", argv[0], "dry_run",
                                       dry_run, "deleted", delete &&!dry_run, "limits",
                                       limits_json(a->limits, a->n_limits), "expired_sessions",
                                       (json_int_t)a->expired_sessions));
    } else if (delete) {
        (void)printf("plan %s %s\n", argv[0], dry_run ? "would be deleted" : "is deleted");
    } else {
        (void)printf("plan %s%s\n\n", argv[0], dry_run ? " would be" : "");
        print_limits(ctl, a->limits, a->n_limits);
        print_expired(a->expired_sessions);
    }
    client_free(a);
    return code;
}

const struct command command_quota_set = {
    .name = "quota set",
    .arguments = "USER",
    .summary = "limits of one user; they count at once",
    .details =
        "A value is a number (sizes as 50GiB, times as 24h), `none` for no limit, or `plan` for\n"
        "what the plan says.  --ttl counts for sessions opened without a ttl of their own.  What a "
        "lower limit makes too much goes by itself when room is needed: the user's\n"
        "own least recently used session first, never another user's.  --dry-run shows which.\n"
        "Needs a token with role ops.",
    .example = "cachectl quota set alice --sessions 20 --turns 10 --bytes 50GiB",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_set,
};

const struct command command_quota_get = {
    .name = "quota get",
    .arguments = "USER",
    .summary = "limits of one user, what is used, and what goes next",
    .details = "Needs a token with role ops, or harness for one's own.",
    .example = "cachectl quota get alice",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_get,
};

const struct command command_quota_list = {
    .name = "quota list",
    .arguments = "",
    .summary = "all users, their plans and what they use",
    .details = "Needs a token with role ops.",
    .example = "cachectl quota list --json",
    .run = run_list,
};

const struct command command_quota_delete = {
    .name = "quota delete",
    .arguments = "USER",
    .summary = "take away a user's own limits and plan",
    .details = "The default plan counts from then on.  Needs a token with role ops.",
    .example = "cachectl quota delete alice",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_delete,
};

const struct command command_quota_plan = {
    .name = "quota plan",
    .arguments = "[NAME]",
    .summary = "list plans; make, change or remove one",
    .details =
        "Limits as in `quota set`; those that are not named stay, of a new plan there are none.\n"
        "`default` is the plan of everybody else; the configuration has it until it is set here.\n"
        "Needs a token with role ops.",
    .example = "cachectl quota plan small --sessions 20 --ttl 24h",
    .arguments_max = 1,
    .run = run_plan,
};
