/*
 * `cachectl trace replay`: a recorded trace against a daemon, answers included.
 *
 * By default no time passes between turns, so nothing expires and every turn must reuse all that
 * the trace allows; with --clock the trace's own gaps pass on the daemon's virtual clock.  --spawn
 * runs the replay on a daemon of its own, so it can neither disturb nor be helped by anyone's data.
 */

#include "tools/cachectl/replay.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/spawn.h"
#include "tools/cachectl/stats.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A prefill of the longest prompt on a slow machine; also the daemon's own maximum. */
#define CALL_TIMEOUT_MS 600000u
#define WINDOW_TOKENS_UNKNOWN 128u
#define PROGRESS_NS 5000000000ull

struct options {
    const char *ops_token_file, *backend, *model_dir, *daemon;
    uint64_t sessions, turns, interleave, scale;
    bool clock;
};

static int open_clients(struct replay *replay, const struct options *options,
                        const struct spawn *spawn)
{
    const struct ctl *ctl = replay->ctl;
    const char *endpoint = spawn->pid > 0 ? spawn->endpoint : ctl->endpoint;
    const char *user = spawn->pid > 0 ? spawn->user_token : ctl->token_file;
    const char *ops = spawn->pid > 0 ? spawn->ops_token : options->ops_token_file;
    const uint32_t timeout_ms = KV_MAX(ctl->timeout_ms, CALL_TIMEOUT_MS);
    Cached__Admin__V1__GetStatsResponse *stats = NULL;

    int code = ctl_connect_as(ctl, endpoint, user, timeout_ms, &replay->client);
    if (code == 0 && ops) code = ctl_connect_as(ctl, endpoint, ops, timeout_ms, &replay->ops);
    if (code != 0) return code;
    replay->window_tokens = WINDOW_TOKENS_UNKNOWN;
    if (!replay->ops) {
        ctl_say(ctl, "without --ops-token-file the model's window is taken to be %u tokens",
                WINDOW_TOKENS_UNKNOWN);
        return CLIENT_EXIT_OK;
    }
    code = stats_fetch(replay->ops, &stats);
    if (code == 0) replay->window_tokens = stats->window_tokens;
    client_free(stats);
    return code;
}

static void say_progress(const struct replay *replay, uint64_t *said_ns, uint64_t began_ns)
{
    const uint64_t now = kv_clock_stopwatch_ns();

    if (now - *said_ns < PROGRESS_NS) return;
    *said_ns = now;
    ctl_say(replay->ctl, "%" PRIu64 " of %" PRIu64 " turns, %.0f s, %" PRIu64 " short",
            replay->turns_done, replay->turns_total, (double)(now - began_ns) / 1e9,
            replay->all.short_turns);
}

/* Runs all sessions, `interleave` at a time, one turn of each after the other. */
static int run_sessions(struct replay *replay, uint32_t session_count, uint32_t interleave)
{
    const uint64_t began = kv_clock_stopwatch_ns();
    uint64_t said = began;
    uint32_t started = 0, running = 0;
    int code = CLIENT_EXIT_OK;

    struct replay_session *slots = calloc(interleave, sizeof(*slots));
    if (!slots) {
        ctl_error("out of memory");
        return CLIENT_EXIT_FAILED;
    }
    do {
        for (uint32_t i = 0; i < interleave && code == 0; i++) {
            bool more = true;
            if (!slots[i].replay && started == session_count) continue;
            if (!slots[i].replay) {
                running++;
                code = replay_session_start(&slots[i], replay, started++);
            }
            if (code == 0) code = replay_session_turn(&slots[i], &more);
            if (code == 0 && !more) {
                code = replay_session_end(&slots[i], false);
                running--;
            }
            say_progress(replay, &said, began);
            if (code == 0 && spawn_interrupted()) {
                ctl_error("interrupted after %" PRIu64 " turns", replay->turns_done);
                code = CLIENT_EXIT_FAILED;
            }
        }
    } while (code == 0 && (running > 0 || started < session_count));
    for (uint32_t i = 0; i < interleave; i++)
        (void)replay_session_end(&slots[i], true);
    free(slots);
    replay->elapsed_ms = (kv_clock_stopwatch_ns() - began) / 1000000;
    return code;
}

static int run_replay(struct replay *replay, const struct options *options,
                      const struct spawn *spawn)
{
    const struct trace *trace = replay->trace;
    const uint32_t sessions = (uint32_t)KV_MIN(options->sessions, trace->session_count);
    Cached__Admin__V1__GetStatsResponse *stats = NULL;

    int code = open_clients(replay, options, spawn);
    if (code != 0) return code;
    for (uint32_t i = 0; i < sessions; i++)
        replay->turns_total += KV_MIN(trace->sessions[i].item_count, replay->turns_max);
    ctl_say(replay->ctl, "replaying %" PRIu64 " turns of %u sessions of %s", replay->turns_total,
            sessions, trace->header.name);
    code = run_sessions(replay, sessions, (uint32_t)options->interleave);
    if (code != 0) return code;
    if (replay->ops) {
        code = stats_fetch(replay->ops, &stats);
        if (code == 0) replay->wrong_bytes = stats->wrong_bytes;
        replay->wrong_bytes_known = code == 0;
        client_free(stats);
    }
    return code == 0 ? replay_report(replay) : code;
}

static int usage(const char *text)
{
    ctl_error("%s", text);
    return CLIENT_EXIT_USAGE;
}

static int check_options(const struct options *options)
{
    const bool spawn = options->backend != NULL;

    if (spawn && strcmp(options->backend, "synthetic") != 0 && strcmp(options->backend, "cpu") != 0)
        return usage("--spawn takes synthetic or cpu");
    if (spawn && strcmp(options->backend, "cpu") == 0 && !options->model_dir)
        return usage("--spawn cpu needs --model-dir DIR");
    if (!spawn && (options->model_dir || options->daemon))
        return usage("--model-dir and --daemon belong to --spawn");
    if (options->sessions == 0 || options->turns == 0 || options->scale == 0)
        return usage("--sessions, --turns and --scale take at least 1");
    if (options->scale > UINT32_MAX || options->interleave == 0 || options->interleave > 64)
        return usage("--interleave takes 1 to 64");
    if (options->clock && options->interleave > 1)
        return usage("--clock replays one session after the other: leave out --interleave");
    if (options->clock && !spawn && !options->ops_token_file)
        return usage("--clock needs --ops-token-file F, or --spawn");
    return CLIENT_EXIT_OK;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct options options = {
        .sessions = UINT32_MAX, .turns = UINT32_MAX, .interleave = 1, .scale = 1};
    struct replay replay = {.ctl = ctl};
    struct trace *trace = NULL;
    struct spawn spawn = {.pid = 0};
    struct kv_error err = {.text = ""};
    int code = 0;

    const struct arg args[] = {
        {"--sessions", ARG_COUNT, "N", "only the first N sessions", &options.sessions},
        {"--turns", ARG_COUNT, "N", "only the first N turns of each", &options.turns},
        {"--interleave", ARG_COUNT, "N", "N sessions at a time, turn by turn", &options.interleave},
        {"--scale", ARG_COUNT, "N", "recorded tokens per token sent", &options.scale},
        {"--clock", ARG_FLAG, NULL, "let the trace's gaps pass on a virtual clock", &options.clock},
        {"--ops-token-file", ARG_TEXT, "F", "token with role ops: window, clock, wrong bytes",
         &options.ops_token_file},
        {"--spawn", ARG_TEXT, "BACKEND", "a daemon of its own: synthetic or cpu", &options.backend},
        {"--model-dir", ARG_TEXT, "DIR", "its model (for cpu)", &options.model_dir},
        {"--daemon", ARG_TEXT, "PATH", "its program (../cached/cached beside cachectl)",
         &options.daemon},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    code = check_options(&options);
    if (code != 0) return code;

    if (trace_load(argv[0], (uint32_t)options.scale, &trace, &err) != KV_OK) {
        ctl_error("%s", err.text);
        return CLIENT_EXIT_FAILED;
    }
    replay.trace = trace;
    replay.advance_clock = options.clock;
    replay.turns_max = options.turns;
    (void)snprintf(replay.prefix, sizeof(replay.prefix), "replay-%u-%" PRIx64, (unsigned)getpid(),
                   kv_clock_stopwatch_ns() / 1000000);

    const struct spawn_options spawn_options = {
        .daemon = options.daemon,
        .backend = options.backend,
        .model_dir = options.model_dir,
    };
    if (options.backend) code = spawn_start(ctl, &spawn_options, &spawn);
    if (code == 0) code = run_replay(&replay, &options, &spawn);
    client_destroy(replay.client);
    client_destroy(replay.ops);
    if (!spawn_stop(&spawn) && code == 0) code = CLIENT_EXIT_FAILED;
    trace_destroy(trace);
    return code;
}

const struct command command_trace_replay = {
    .name = "trace replay",
    .arguments = "FILE",
    .summary = "a trace against a daemon: outcomes and hits beside the ideal",
    .details =
        "Sends every turn's prompt and answer and prints, by class of turn, what the daemon\n"
        "did.  Exits 1 if a turn reuses 3 or more tokens less than the trace allows, or if\n"
        "bytes came back different.  Without --clock no time passes between turns.",
    .example = "cachectl trace replay tests/data/agentic_excerpt.jsonl --spawn synthetic",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run,
};
