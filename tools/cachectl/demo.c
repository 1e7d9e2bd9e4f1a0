/*
 * `cachectl demo`: a few recorded conversations, and then everything that can happen to them.
 *
 * Exits 0 only if every line is what it claims to be: each knows the outcome, the reason and the
 * hit it must show, and a line that differs is marked and makes the demo fail at its end.
 */

#include "tools/cachectl/demo.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/stats.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALL_TIMEOUT_MS 120000u

static bool as_expected(const struct turn_prefill *result, const struct demo_expect *expect)
{
    const bool outcome = (result->outcome == TURN_EXACT && expect->exact) ||
                         (result->outcome == TURN_REPLAY && expect->replay) ||
                         (result->outcome == TURN_MISS && expect->miss);
    const bool reason = !expect->reason || strcmp(result->reason, expect->reason) == 0;
    return outcome && reason && result->hit_tokens >= expect->hit_min;
}

static void print_wrong(struct demo *demo, const struct demo_expect *expect)
{
    demo->wrong = true;
    ctl_error("expected:%s%s%s%s%s, at least %u tokens hit", expect->exact ? " EXACT" : "",
              expect->replay ? " REPLAY" : "", expect->miss ? " MISS" : "",
              expect->reason ? " " : "", expect->reason ? expect->reason : "", expect->hit_min);
}

void demo_line(struct demo *demo, const char *what, const struct demo_session *session,
               const struct turn_prefill *r, const struct demo_expect *expect)
{
    const struct ctl *ctl = demo->ctl;
    const bool ok = as_expected(r, expect);

    if (demo->lines) {
        (void)json_array_append_new(
            demo->lines,
            json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:b}",
                      "session", session->name, "what", what, "outcome",
                      turn_outcome_name(r->outcome), "reason", r->reason, "prompt_tokens",
                      (json_int_t)r->prompt_tokens, "hit_tokens", (json_int_t)r->hit_tokens,
                      "replayed_tokens", (json_int_t)r->replayed_tokens, "computed_tokens",
                      (json_int_t)r->computed_tokens, "queue_ms", r->queue_ms, "lookup_ms",
                      r->lookup_ms, "read_ms", r->read_ms, "run_ms", r->run_ms, "commit_ms",
                      r->commit_ms, "total_ms", r->total_ms, "ok", ok));
    } else {
        const char *color = r->outcome == TURN_EXACT    ? ctl_green(ctl)
                            : r->outcome == TURN_REPLAY ? ctl_yellow(ctl)
                                                        : ctl_bold(ctl);
        char outcome[64];
        (void)snprintf(outcome, sizeof(outcome), "%s %s", turn_outcome_name(r->outcome), r->reason);
        (void)printf("%s %-8s %-10s %5u tokens  %s%-18s%s hit %5u  replayed %3u  computed %5u  "
                     "%7.1f ms (queue %.1f lookup %.1f read %.1f run %.1f commit %.1f)\n",
                     ok ? "ok   " : "WRONG", session->name, what, r->prompt_tokens, color, outcome,
                     ctl_plain(ctl), r->hit_tokens, r->replayed_tokens, r->computed_tokens,
                     r->total_ms, r->queue_ms, r->lookup_ms, r->read_ms, r->run_ms, r->commit_ms);
        (void)fflush(stdout);
    }
    if (!ok) print_wrong(demo, expect);
}

void demo_title(struct demo *demo, const char *fmt, ...)
{
    va_list list;

    if (demo->lines) return;
    (void)printf("%s-- ", ctl_bold(demo->ctl));
    va_start(list, fmt);
    (void)vprintf(fmt, list);
    va_end(list);
    (void)printf("%s\n", ctl_plain(demo->ctl));
    (void)fflush(stdout);
}

void demo_say(struct demo *demo, bool ok, const char *fmt, ...)
{
    char text[256];
    va_list list;

    va_start(list, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, list);
    va_end(list);
    if (!ok) demo->wrong = true;
    if (demo->lines) {
        (void)json_array_append_new(demo->lines, json_pack("{s:s, s:b}", "text", text, "ok", ok));
        return;
    }
    (void)printf("%s %s\n", ok ? "ok   " : "WRONG", text);
    (void)fflush(stdout);
}

int demo_connect(struct demo *demo)
{
    const struct ctl *ctl = demo->ctl;
    const uint32_t timeout_ms = KV_MAX(ctl->timeout_ms, CALL_TIMEOUT_MS);
    Cached__Admin__V1__GetStatsResponse *stats = NULL;

    int code = ctl_connect_as(ctl, ctl->endpoint, ctl->token_file, timeout_ms, &demo->user);
    if (code == 0)
        code = ctl_connect_as(ctl, ctl->endpoint, demo->ops_token_file, timeout_ms, &demo->ops);
    if (code == 0) code = stats_fetch(demo->ops, &stats);
    if (code == 0) {
        demo->window_tokens = stats->window_tokens;
        if (strcmp(stats->clock_mode, "virtual") != 0) {
            ctl_error("the daemon's clock is real: the demo cannot wait for windows to expire.  "
                      "Start cached with clock.mode = virtual");
            code = CLIENT_EXIT_FAILED;
        }
    }
    client_free(stats);
    return code;
}

void demo_disconnect(struct demo *demo)
{
    client_destroy(demo->user);
    client_destroy(demo->ops);
    demo->user = NULL;
    demo->ops = NULL;
}

static int run_parts(struct demo *demo)
{
    int (*const parts[])(struct demo *) = {demo_connect, demo_turns,    demo_expiry,
                                           demo_restart, demo_rollback, demo_other_user};
    int code = CLIENT_EXIT_OK;

    for (size_t i = 0; i < KV_ARRAY_COUNT(parts) && code == 0; i++)
        code = parts[i](demo);
    demo_disconnect(demo);
    for (uint32_t i = 0; i < demo->session_count; i++) {
        struct demo_session *session = &demo->sessions[i];
        for (uint32_t turn = 0; session->turn_tokens && turn < DEMO_TURNS_MAX; turn++)
            free(session->turn_tokens[turn]);
        free(session->turn_tokens);
    }
    return code;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct demo demo = {.ctl = ctl};
    struct kv_error err = {.text = ""};
    uint64_t turns = 4;
    int code = 0;

    const struct arg args[] = {
        {"--other-token-file", ARG_TEXT, "F", "token of a second user", &demo.other_token_file},
        {"--ops-token-file", ARG_TEXT, "F", "token with role ops", &demo.ops_token_file},
        {"--pid-file", ARG_TEXT, "F", "the daemon's pid file", &demo.pid_file},
        {"--restart", ARG_TEXT, "COMMAND", "starts the daemon again (/bin/sh -c)", &demo.restart},
        {"--turns", ARG_COUNT, "N", "turns of each session (4)", &turns},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    if (!demo.other_token_file || !demo.ops_token_file || !demo.pid_file || !demo.restart) {
        ctl_error("demo needs --other-token-file, --ops-token-file, --pid-file and --restart");
        return CLIENT_EXIT_USAGE;
    }
    if (turns < 2 || turns > DEMO_TURNS_MAX) {
        ctl_error("--turns takes 2 to %u", DEMO_TURNS_MAX);
        return CLIENT_EXIT_USAGE;
    }
    demo.turns = (uint32_t)turns;
    if (trace_load(argv[0], 1, &demo.trace, &err) != KV_OK) {
        ctl_error("%s", err.text);
        return CLIENT_EXIT_FAILED;
    }
    demo.lines = ctl->json ? json_array() : NULL;
    code = run_parts(&demo);
    trace_destroy(demo.trace);
    if (code == 0 && demo.wrong) {
        ctl_error("the demo is not what it should be: see the lines marked WRONG");
        code = CLIENT_EXIT_FAILED;
    }
    if (ctl->json) {
        const int print_code =
            out_json_take(json_pack("{s:o, s:b}", "lines", demo.lines, "ok", code == 0));
        return code == 0 ? print_code : code;
    }
    if (code != 0) return code;

    demo_title(&demo, "status");
    ctl->token_file = demo.ops_token_file;
    return command_status.run(ctl, &command_status, 0, NULL);
}

const struct command command_demo = {
    .name = "demo",
    .arguments = "FILE",
    .summary = "recorded conversations, then expiry, kill -9, rollback, another user",
    .details =
        "FILE is a trace, such as the excerpt in tests/data.  Kills the daemon named by the\n"
        "pid file and starts it again, so use it on a daemon made for it, as\n"
        "deploy/quickstart does: its clock must be virtual, and nothing may be stored in it\n"
        "yet.  Exits 0 only if every line is what it says.",
    .example = "cachectl demo tests/data/agentic_excerpt.jsonl --other-token-file other.token "
               "--ops-token-file ops.token --pid-file cached.pid --restart './start-cached'",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run,
};
