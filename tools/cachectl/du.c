/*
 * `cachectl du`: who has how many bytes on SSD, and what the rest of the files is.
 *
 * The daemon answers a part of the walk at a time; the parts are added up here, so a store of a
 * million sessions shows progress and holds no call up.  What is written and removed meanwhile may
 * be counted before or after.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TELL_EVERY_S 1.0

typedef Cached__Admin__V1__DiskUsageResponse usage_answer;

struct row {
    char *name;
    uint64_t sessions, checkpoints, live_bytes, expired_bytes;
};

/* Owned by: run(). */
struct sums {
    struct row *rows;
    size_t count, capacity;
    bool by_session;
    struct row all;
    uint64_t bytes_max, bytes_files, free_bytes, quarantined_bytes, overhead_bytes;
    char encryption[64];
};

static bool take_rows(struct sums *sums, const usage_answer *answer)
{
    for (size_t i = 0; i < answer->n_rows; i++) {
        const Cached__Admin__V1__UsageRow *r = answer->rows[i];
        if (sums->count == sums->capacity) {
            const size_t capacity = sums->capacity == 0 ? 256 : 2 * sums->capacity;
            struct row *rows = realloc(sums->rows, capacity * sizeof(*rows));
            if (rows == NULL) return false;
            sums->rows = rows;
            sums->capacity = capacity;
        }
        sums->by_session |= r->session_id[0] != '\0';
        struct row *row = &sums->rows[sums->count++];
        *row = (struct row){.name = strdup(r->session_id[0] != '\0' ? r->session_id : r->user),
                            .sessions = r->sessions,
                            .checkpoints = r->checkpoints,
                            .live_bytes = r->live_bytes,
                            .expired_bytes = r->expired_bytes};
        if (row->name == NULL) return false;
    }
    return true;
}

static void row_add(struct row *to, const struct row *more)
{
    to->sessions += more->sessions;
    to->checkpoints += more->checkpoints;
    to->live_bytes += more->live_bytes;
    to->expired_bytes += more->expired_bytes;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct row *)a)->name, ((const struct row *)b)->name);
}

static int compare_bytes(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    const uint64_t left = x->live_bytes + x->expired_bytes;
    const uint64_t right = y->live_bytes + y->expired_bytes;
    if (left != right) return left < right ? 1 : -1;
    return strcmp(x->name, y->name);
}

/* Rows of one name become one; the largest first. */
static void add_up(struct sums *sums, const usage_answer *last)
{
    size_t kept = 0;
    if (sums->count > 0) qsort(sums->rows, sums->count, sizeof(*sums->rows), compare_names);
    for (size_t i = 0; i < sums->count; i++) {
        row_add(&sums->all, &sums->rows[i]);
        if (kept > 0 && strcmp(sums->rows[kept - 1].name, sums->rows[i].name) == 0) {
            row_add(&sums->rows[kept - 1], &sums->rows[i]);
            free(sums->rows[i].name);
        } else {
            sums->rows[kept++] = sums->rows[i];
        }
    }
    sums->count = kept;
    if (kept > 0) qsort(sums->rows, kept, sizeof(*sums->rows), compare_bytes);
    (void)snprintf(sums->encryption, sizeof(sums->encryption), "%s", last->encryption);
    sums->bytes_max = last->bytes_max;
    sums->bytes_files = last->bytes_files;
    sums->free_bytes = last->free_bytes;
    sums->quarantined_bytes = last->quarantined_bytes;
    const uint64_t known =
        sums->all.live_bytes + sums->all.expired_bytes + sums->free_bytes + sums->quarantined_bytes;
    sums->overhead_bytes = sums->bytes_files - KV_MIN(known, sums->bytes_files);
}

/* ---- printing ---- */

static int print_json(const struct sums *sums, const char *user, uint64_t top)
{
    json_t *list = json_array();
    for (size_t i = 0; i < sums->count && i < top; i++) {
        const struct row *row = &sums->rows[i];
        (void)json_array_append_new(
            list, json_pack("{s:s, s:I, s:I, s:I, s:I}", sums->by_session ? "session_id" : "user",
                            row->name, "sessions", (json_int_t)row->sessions, "checkpoints",
                            (json_int_t)row->checkpoints, "live_bytes", (json_int_t)row->live_bytes,
                            "expired_bytes", (json_int_t)row->expired_bytes));
    }
    json_t *document = json_pack(
        "{s:s?, s:I, s:o, s:I, s:I, s:I, s:I}", "of_user", user, "row_count",
        (json_int_t)sums->count, "rows", list, "sessions", (json_int_t)sums->all.sessions,
        "checkpoints", (json_int_t)sums->all.checkpoints, "live_bytes",
        (json_int_t)sums->all.live_bytes, "expired_bytes", (json_int_t)sums->all.expired_bytes);
    if (document != NULL && user == NULL && sums->bytes_files > 0) {
        (void)json_object_set_new(document, "free_bytes",
                                  json_integer((json_int_t)sums->free_bytes));
        (void)json_object_set_new(document, "quarantined_bytes",
                                  json_integer((json_int_t)sums->quarantined_bytes));
        (void)json_object_set_new(document, "overhead_bytes",
                                  json_integer((json_int_t)sums->overhead_bytes));
        (void)json_object_set_new(document, "bytes_files",
                                  json_integer((json_int_t)sums->bytes_files));
        (void)json_object_set_new(document, "bytes_max", json_integer((json_int_t)sums->bytes_max));
    }
    if (document != NULL)
        (void)json_object_set_new(document, "encryption", json_string(sums->encryption));
    return out_json_take(document);
}

static void cells(struct out_table *table, const struct row *row, bool by_session)
{
    char text[OUT_TEXT_BYTES];
    out_table_cell(table, "%s", row->name);
    if (!by_session) out_table_cell(table, "%" PRIu64, row->sessions);
    out_table_cell(table, "%" PRIu64, row->checkpoints);
    out_table_cell(table, "%s", out_bytes(text, row->live_bytes));
    out_table_cell(table, "%s", out_bytes(text, row->expired_bytes));
}

static void print_rows(const struct ctl *ctl, const struct sums *sums, uint64_t top)
{
    static const char *const users[] = {"USER", "SESSIONS", "CHECKPOINTS", "LIVE", "EXPIRED"};
    static const char *const sessions[] = {"SESSION", "CHECKPOINTS", "LIVE", "EXPIRED"};
    char name[32] = "(all)";
    struct out_table table;
    struct row all = sums->all, others = {.name = name};
    if (sums->by_session)
        out_table_init(&table, sessions, KV_ARRAY_COUNT(sessions), 0x0e);
    else
        out_table_init(&table, users, KV_ARRAY_COUNT(users), 0x1e);
    for (size_t i = 0; i < sums->count; i++) {
        if (i < top)
            cells(&table, &sums->rows[i], sums->by_session);
        else
            row_add(&others, &sums->rows[i]);
    }
    if (sums->count > top) {
        (void)snprintf(name, sizeof(name), "(%zu others)", sums->count - (size_t)top);
        cells(&table, &others, sums->by_session);
        (void)snprintf(name, sizeof(name), "(all)");
    }
    all.name = name;
    cells(&table, &all, sums->by_session);
    out_table_print(ctl, &table);
}

static void print_states(const struct ctl *ctl, const struct sums *sums)
{
    static const char *const names[] = {"STATE", "BYTES", "SIZE"};
    const struct {
        const char *name;
        uint64_t bytes;
    } states[] = {
        {"live", sums->all.live_bytes},           {"expired", sums->all.expired_bytes},
        {"quarantined", sums->quarantined_bytes}, {"free", sums->free_bytes},
        {"overhead", sums->overhead_bytes},       {"(files)", sums->bytes_files},
    };
    char text[OUT_TEXT_BYTES];
    struct out_table table;
    (void)putchar('\n');
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x06);
    for (size_t i = 0; i < KV_ARRAY_COUNT(states); i++) {
        out_table_cell(&table, "%s", states[i].name);
        out_table_cell(&table, "%" PRIu64, states[i].bytes);
        out_table_cell(&table, "%s", out_bytes(text, states[i].bytes));
    }
    out_table_print(ctl, &table);
    (void)printf("\nencryption: %s\n", sums->encryption);
}

/* ---- the walk ---- */

static double now_s(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Session ids are spread evenly, so the first digits of one say how far a walk by id is. */
static double share_of(const char *token)
{
    char digits[5] = {0};
    (void)snprintf(digits, sizeof(digits), "%.4s", token);
    return (double)strtoul(digits, NULL, 16) / 65536.0;
}

static int walk(const struct ctl *ctl, struct client *client, const char *user, struct sums *sums)
{
    char token[40] = "";
    double told_s = now_s();
    for (;;) {
        Cached__Admin__V1__DiskUsageRequest request = CACHED__ADMIN__V1__DISK_USAGE_REQUEST__INIT;
        usage_answer *answer = NULL;
        struct client_failure failure;
        request.user = (char *)(uintptr_t)(user == NULL ? "" : user);
        request.page_token = token;
        if (!client_call(client, CLIENT_DISK_USAGE, &request.base, &answer, &failure))
            return ctl_failure(&failure);
        const bool taken = take_rows(sums, answer);
        const bool more = answer->next_page_token[0] != '\0';
        (void)snprintf(token, sizeof(token), "%s", answer->next_page_token);
        if (taken && !more) add_up(sums, answer);
        client_free(answer);
        if (!taken) ctl_error("no memory for %zu rows", sums->count);
        if (!taken) return CLIENT_EXIT_FAILED;
        if (!more) return CLIENT_EXIT_OK;
        if (now_s() - told_s < TELL_EVERY_S) continue;
        told_s = now_s();
        ctl_say(ctl, "%.0f %% of all sessions", 100 * share_of(token));
    }
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct sums sums = {0};
    struct client *client = NULL;
    uint64_t top = 20;
    int code = 0;
    const struct arg args[] = {
        {"--top", ARG_COUNT, "N", "rows to print, the largest; others are added up (20)", &top},
    };

    const int count = ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code);
    if (count < 0) return code;
    const char *user = count > 0 ? argv[0] : NULL;
    code = ctl_connect(ctl, &client);
    if (code == 0) code = walk(ctl, client, user, &sums);
    client_destroy(client);
    if (code == 0 && ctl->json) {
        code = print_json(&sums, user, top);
    } else if (code == 0) {
        print_rows(ctl, &sums, top);
        if (user == NULL && sums.bytes_files > 0) print_states(ctl, &sums);
    }
    for (size_t i = 0; i < sums.count; i++)
        free(sums.rows[i].name);
    free(sums.rows);
    return code;
}

const struct command command_du = {
    .name = "du",
    .arguments = "[USER]",
    .summary = "bytes on SSD by user, by session of one user, and by state",
    .details =
        "Live bytes are those of checkpoints in their time, expired ones are freed soon,\n"
        "overhead is headers, ends of files and places on their way to be free.  The sum of\n"
        "all states is the size of the segment files.  A token of role ops sees everybody, one\n"
        "of role harness the sessions of its own user.",
    .example = "cachectl du --json",
    .arguments_max = 1,
    .run = run,
};
