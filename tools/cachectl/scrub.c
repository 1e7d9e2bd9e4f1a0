/*
 * `cachectl scrub start | status | stop | release`: everything stored is read again and compared;
 * what was quarantined is tried again.
 *
 * The daemon does the work; these commands say what it does.  Damage is exit code 7, whichever of
 * them sees it, so a script needs no parsing.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POLL_MS 200
#define TELL_EVERY_POLLS 10

typedef Cached__Admin__V1__ScrubResponse scrub_answer;

static json_t *answer_json(const scrub_answer *a)
{
    json_t *list = json_array();
    for (size_t i = 0; i < a->n_quarantined; i++) {
        const Cached__Admin__V1__QuarantinedPage *q = a->quarantined[i];
        (void)json_array_append_new(
            list, json_pack("{s:s, s:I, s:I, s:s, s:I, s:s, s:I, s:I}", "file", q->file, "offset",
                            (json_int_t)q->offset, "page", (json_int_t)q->page, "cause", q->cause,
                            "owners", (json_int_t)q->owners, "found_by", q->found_by, "age_ms",
                            (json_int_t)q->age_ms, "generation", (json_int_t)q->generation));
    }
    return json_pack(
        "{s:b, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, "
        "s:o}",
        "running", a->running, "changed", a->changed, "stopping", a->stopping, "rate_bytes",
        (json_int_t)a->rate_bytes, "elapsed_ms", (json_int_t)a->elapsed_ms, "pages_total",
        (json_int_t)a->pages_total, "pages", (json_int_t)a->pages, "bytes", (json_int_t)a->bytes,
        "damaged", (json_int_t)a->damaged, "unread", (json_int_t)a->unread, "waiting",
        (json_int_t)a->waiting, "checkpoints_dropped", (json_int_t)a->checkpoints_dropped, "passes",
        (json_int_t)a->passes, "full_age_ms", (json_int_t)a->full_age_ms, "plain",
        (json_int_t)a->plain, "quarantined_pages", (json_int_t)a->quarantined_pages, "failure",
        a->failure, "quarantined", list);
}

static const char *state_of(const scrub_answer *a)
{
    if (a->stopping) return "stopping";
    if (a->running) return "running";
    return a->rate_bytes == 0 ? "idle" : "ended";
}

static void print_quarantined(const struct ctl *ctl, const scrub_answer *a)
{
    static const char *const names[] = {"FILE", "OFFSET", "OWNERS", "FOUND", "AGE", "CAUSE"};
    struct out_table table;
    char text[OUT_TEXT_BYTES];
    (void)putchar('\n');
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x06);
    for (size_t i = 0; i < a->n_quarantined; i++) {
        const Cached__Admin__V1__QuarantinedPage *q = a->quarantined[i];
        out_table_cell(&table, "%s", q->file);
        out_table_cell(&table, "%" PRIu64, q->offset);
        out_table_cell(&table, "%" PRIu32, q->owners);
        out_table_cell(&table, "%s", q->found_by);
        out_table_cell(&table, "%s", out_duration(text, q->age_ms));
        out_table_cell(&table, "%s", q->cause);
    }
    out_table_print(ctl, &table);
    if (a->quarantined_pages > a->n_quarantined)
        (void)printf("and %" PRIu64 " more\n", a->quarantined_pages - a->n_quarantined);
}

static void print_answer(const struct ctl *ctl, const scrub_answer *a)
{
    char bytes[OUT_TEXT_BYTES], rate[OUT_TEXT_BYTES], time[OUT_TEXT_BYTES];
    const double share =
        a->pages_total == 0 ? 100.0 : 100.0 * (double)a->pages / (double)a->pages_total;
    (void)printf("scrub        %s\n", state_of(a));
    if (a->failure[0] != '\0')
        (void)printf("ended early  %s%s%s\n", ctl_red(ctl), a->failure, ctl_plain(ctl));
    if (a->rate_bytes > 0) {
        (void)printf("rate         %s/s\n", out_bytes(rate, a->rate_bytes));
        (void)printf("read         %" PRIu64 " of %" PRIu64 " pages (%.0f %%), %s in %s\n",
                     a->pages, a->pages_total, KV_MIN(share, 100.0), out_bytes(bytes, a->bytes),
                     out_duration(time, a->elapsed_ms));
        (void)printf("damaged      %s%" PRIu64 "%s pages, %" PRIu64 " checkpoints dropped\n",
                     a->damaged > 0 ? ctl_red(ctl) : "", a->damaged,
                     a->damaged > 0 ? ctl_plain(ctl) : "", a->checkpoints_dropped);
        if (a->unread > 0) (void)printf("not read     %" PRIu64 " pages\n", a->unread);
        (void)printf("encrypted    all but %" PRIu64 " pages\n", a->plain);
        if (a->waiting > 0)
            (void)printf("waiting      %" PRIu64 " pages, for sessions in use\n", a->waiting);
    }
    (void)printf("last pass    %s%s\n",
                 a->full_age_ms == 0 ? "none since the daemon started"
                                     : out_duration(time, a->full_age_ms),
                 a->full_age_ms == 0 ? "" : " ago");
    (void)printf("quarantined  %" PRIu64 " pages\n", a->quarantined_pages);
    if (a->n_quarantined > 0) print_quarantined(ctl, a);
}

/* Prints it, frees it, and says what it stands for. */
static int finish(const struct ctl *ctl, scrub_answer *answer)
{
    const bool is_part = answer->failure[0] != '\0' || answer->unread > 0;
    const int code = answer->damaged > 0 ? CLIENT_EXIT_CORRUPT
                     : is_part           ? CLIENT_EXIT_FAILED
                                         : CLIENT_EXIT_OK;
    int printed = CLIENT_EXIT_OK;
    if (ctl->json)
        printed = out_json_take(answer_json(answer));
    else
        print_answer(ctl, answer);
    client_free(answer);
    return printed != CLIENT_EXIT_OK ? printed : code;
}

static int call(struct client *client, Cached__Admin__V1__ScrubAction action, uint64_t rate_bytes,
                scrub_answer **ret_answer)
{
    Cached__Admin__V1__ScrubRequest request = CACHED__ADMIN__V1__SCRUB_REQUEST__INIT;
    struct client_failure failure;
    request.action = action;
    request.rate_bytes = rate_bytes;
    if (client_call(client, CLIENT_SCRUB, &request.base, ret_answer, &failure)) return 0;
    return ctl_failure(&failure);
}

/* "200MiB/s", "1GiB", "4000000". */
static bool parse_rate(const char *text, uint64_t *ret_bytes)
{
    static const struct {
        const char *unit;
        uint64_t bytes;
    } units[] = {{"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"", 1}};
    char *end = NULL;
    if (text[0] < '0' || text[0] > '9') return false;
    const uint64_t count = strtoull(text, &end, 10);
    size_t left = strlen(end);
    if (left >= 2 && strcmp(end + left - 2, "/s") == 0) left -= 2;
    for (size_t i = 0; i < KV_ARRAY_COUNT(units); i++) {
        if (strlen(units[i].unit) != left || strncmp(end, units[i].unit, left) != 0) continue;
        if (count > KV_SCRUB_RATE_MAX / units[i].bytes) return false;
        *ret_bytes = count * units[i].bytes;
        return *ret_bytes >= KV_SCRUB_RATE_MIN;
    }
    return false;
}

/* Asks until the pass has ended; *answer is replaced by the last one. */
static int await(const struct ctl *ctl, struct client *client, scrub_answer **answer)
{
    const struct timespec pause = {.tv_nsec = POLL_MS * 1000000L};
    char done[OUT_TEXT_BYTES];
    for (uint32_t polls = 1; (*answer)->running; polls++) {
        if (polls % TELL_EVERY_POLLS == 0)
            ctl_say(ctl, "%" PRIu64 " of %" PRIu64 " pages, %s, %" PRIu64 " damaged",
                    (*answer)->pages, (*answer)->pages_total, out_bytes(done, (*answer)->bytes),
                    (*answer)->damaged);
        (void)nanosleep(&pause, NULL);
        client_free(*answer);
        *answer = NULL;
        const int code =
            call(client, CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_STATUS, 0, answer);
        if (code != 0) return code;
    }
    return 0;
}

static int run_start(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    const char *rate = NULL;
    bool wait = false;
    uint64_t rate_bytes = 0;
    scrub_answer *answer = NULL;
    struct client *client = NULL;
    int code = 0;
    const struct arg args[] = {
        {"--rate", ARG_TEXT, "RATE", "bytes a second, 1MiB/s to 64GiB/s (scrub.rate)", &rate},
        {"--wait", ARG_FLAG, NULL, "until the pass has ended, with progress on stderr", &wait},
    };

    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    if (rate != NULL && !parse_rate(rate, &rate_bytes)) {
        ctl_error("--rate takes 1MiB/s to 64GiB/s, found %.64s", rate);
        return CLIENT_EXIT_USAGE;
    }
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    code = call(client, CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_START, rate_bytes, &answer);
    if (code == 0 && !answer->changed) ctl_say(ctl, "a scrub runs already: it goes on");
    const uint64_t passes = code == 0 ? answer->passes : 0;
    if (code == 0 && wait) code = await(ctl, client, &answer);
    client_destroy(client);
    if (code != 0) return code;
    const bool was_stopped = wait && answer->passes == passes && answer->failure[0] == '\0';
    if (was_stopped) ctl_error("the pass was stopped before its end");
    code = finish(ctl, answer);
    return code == CLIENT_EXIT_OK && was_stopped ? CLIENT_EXIT_FAILED : code;
}

static int run_plain(struct ctl *ctl, const struct command *command, int argc, char **argv,
                     Cached__Admin__V1__ScrubAction action)
{
    scrub_answer *answer = NULL;
    struct client *client = NULL;
    int code = 0;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    code = call(client, action, 0, &answer);
    if (code == 0 && action == CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_STOP &&
        !answer->changed)
        ctl_say(ctl, "no scrub runs");
    client_destroy(client);
    return code != 0 ? code : finish(ctl, answer);
}

static int run_status(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    return run_plain(ctl, command, argc, argv,
                     CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_STATUS);
}

static int run_stop(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    return run_plain(ctl, command, argc, argv, CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_STOP);
}

static int print_release(const struct ctl *ctl, scrub_answer *answer)
{
    const int code = answer->still_bad > 0 ? CLIENT_EXIT_CORRUPT : CLIENT_EXIT_OK;
    int printed = CLIENT_EXIT_OK;
    if (ctl->json) {
        printed = out_json_take(
            json_pack("{s:I, s:I, s:I, s:I}", "released", (json_int_t)answer->released, "still_bad",
                      (json_int_t)answer->still_bad, "not_tried", (json_int_t)answer->still_named,
                      "quarantined_pages", (json_int_t)answer->quarantined_pages));
    } else {
        (void)printf("released     %" PRIu64 " pages\nstill bad    %s%" PRIu64
                     "%s pages\nnot tried    %" PRIu64
                     " pages, of sessions not used since\nquarantined  %" PRIu64 " pages\n",
                     answer->released, answer->still_bad > 0 ? ctl_red(ctl) : "", answer->still_bad,
                     answer->still_bad > 0 ? ctl_plain(ctl) : "", answer->still_named,
                     answer->quarantined_pages);
    }
    client_free(answer);
    return printed != CLIENT_EXIT_OK ? printed : code;
}

static int run_release(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    scrub_answer *answer = NULL;
    struct client *client = NULL;
    int code = 0;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    code = ctl_connect(ctl, &client);
    if (code != 0) return code;
    code = call(client, CACHED__ADMIN__V1__SCRUB_ACTION__SCRUB_ACTION_RELEASE, 0, &answer);
    client_destroy(client);
    return code != 0 ? code : print_release(ctl, answer);
}

const struct command command_scrub_start = {
    .name = "scrub start",
    .arguments = "",
    .summary = "read everything stored again and compare it, in the background",
    .details =
        "Reads past the page cache at the rate given.  Damaged pages are quarantined and what\n"
        "needs them is dropped; exit code 7 when the pass has found some so far, 1 when some\n"
        "could not be read, the records could not, or --wait saw it stopped.  One pass at\n"
        "a time: while one runs, --rate changes its rate.  A restart of the daemon stops it.\n"
        "Needs a token with role ops.",
    .example = "cachectl scrub start --rate 200MiB/s --wait",
    .run = run_start,
};

const struct command command_scrub_status = {
    .name = "scrub status",
    .arguments = "",
    .summary = "the running or last pass, and what is quarantined",
    .details = "Exit code 7 when that pass found damaged pages, 1 when it could not read all of\n"
               "them or their records.  Needs a token with role ops.",
    .example = "cachectl scrub status --json",
    .run = run_status,
};

const struct command command_scrub_stop = {
    .name = "scrub stop",
    .arguments = "",
    .summary = "end the running pass; its position is not kept",
    .details = "Exit code 7 when it had found damaged pages.  Needs a token with role ops.",
    .example = "cachectl scrub stop",
    .run = run_stop,
};

const struct command command_scrub_release = {
    .name = "scrub release",
    .arguments = "",
    .summary = "try quarantined places, and use those again that are good",
    .details =
        "Writes a pattern and zeros to each of them, flushed and read back past the page cache.\n"
        "Those that keep both are free again, also after a restart.  For when the cause is gone:\n"
        "a cable, a disk, somebody who wrote into the files.  Exit code 7 when some are still\n"
        "bad; they stay out of use.  Needs a token with role ops.",
    .example = "cachectl scrub release",
    .run = run_release,
};
