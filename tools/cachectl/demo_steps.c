/*
 * The other parts of the demo: what happens when windows expire, when the daemon is killed, when a
 * conversation goes back, and when somebody else asks.
 *
 * Each part adds a turn to a session and says beforehand what the answer must be, so the demo is a
 * test that can be watched.
 */

#include "tools/cachectl/demo.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/spawn.h"
#include "tools/cachectl/stats.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RESTART_MS 20000u

/* Prompt and answer of `turn` and a few new tokens, which differ by `salt`.  The caller frees. */
static uint32_t *next_prompt(const struct demo_session *session, uint32_t turn, uint32_t salt,
                             uint32_t *ret_count)
{
    const uint32_t end = session->turn_end[turn];

    uint32_t *tokens = calloc((size_t)end + DEMO_NEW_TOKENS, sizeof(*tokens));
    if (!tokens) abort();
    memcpy(tokens, session->turn_tokens[turn], (size_t)end * sizeof(*tokens));
    for (uint32_t i = 0; i < DEMO_NEW_TOKENS; i++)
        tokens[end + i] = 3 + (salt * 31 + i * 7) % (session->vocab_tokens - 6);
    *ret_count = end + DEMO_NEW_TOKENS;
    return tokens;
}

/* Goes on from a turn; at least `hit_min` tokens must be reused in a way that is allowed. */
static int go_on(struct demo *demo, struct demo_session *session, const char *what, uint32_t turn,
                 uint32_t salt, const struct demo_expect *expect)
{
    struct turn_prefill prefill;
    struct client_failure failure;
    uint32_t count = 0;

    uint32_t *tokens = next_prompt(session, turn, salt, &count);
    const bool ok = turn_run_prefill(demo->user, session->name, tokens, count, &prefill, &failure);
    free(tokens);
    if (!ok) return ctl_failure(&failure);
    demo_line(demo, what, session, &prefill, expect);
    return CLIENT_EXIT_OK;
}

/* The longest life any window of the session has left. */
static int windows_left_ms(struct demo *demo, const struct demo_session *session, uint64_t *ret_ms)
{
    Cached__Session__V1__GetSessionRequest request = CACHED__SESSION__V1__GET_SESSION_REQUEST__INIT;
    Cached__Session__V1__GetSessionResponse *answer = NULL;
    struct client_failure failure;

    request.session_id = (char *)(uintptr_t)session->name;
    if (!client_call(demo->user, CLIENT_GET_SESSION, &request.base, &answer, &failure))
        return ctl_failure(&failure);
    *ret_ms = 0;
    for (size_t i = 0; i < answer->n_checkpoints; i++)
        *ret_ms = KV_MAX(*ret_ms, answer->checkpoints[i]->window_expire_ms);
    client_free(answer);
    return CLIENT_EXIT_OK;
}

int demo_expiry(struct demo *demo)
{
    struct demo_session *session = &demo->sessions[0];
    const uint32_t turn = session->turns - 1;
    struct client_failure failure;
    char text[OUT_TEXT_BYTES];
    uint64_t left_ms = 0;

    int code = windows_left_ms(demo, session, &left_ms);
    if (code != 0) return code;
    /* A live session holds its window in the engine, whatever the pool does. */
    if (!turn_close(demo->user, session->name, &failure) ||
        !turn_advance_clock(demo->ops, left_ms + 1000, &failure))
        return ctl_failure(&failure);
    demo_title(demo, "%s is closed and %s pass: its windows expire, its rows do not", session->name,
               out_duration(text, left_ms + 1000));
    demo_say(demo, left_ms > 0, "windows had %s to live before that", out_duration(text, left_ms));
    const struct demo_expect expect = {
        .replay = true,
        .reason = "EXPIRED",
        .hit_min = session->turn_end[turn] - DEMO_SLACK_TOKENS,
    };
    return go_on(demo, session, "next turn", turn, 1, &expect);
}

/* The pid in the pid file, if the daemon itself says it is the one; else 0. */
static pid_t daemon_pid(struct demo *demo)
{
    Cached__Admin__V1__GetStatsResponse *stats = NULL;
    char text[32] = "";
    uint64_t pid = 0;

    FILE *file = fopen(demo->pid_file, "re");
    const bool got = file && fgets(text, sizeof(text), file);
    if (file) (void)fclose(file);
    text[strcspn(text, " \r\n")] = '\0';
    if (!got || !ctl_parse_count(text, 2, INT32_MAX, &pid)) {
        ctl_error("%s holds no process id", demo->pid_file);
        return 0;
    }
    if (stats_fetch(demo->ops, &stats) != 0) return 0;
    const bool same = stats->pid == pid;
    if (!same) {
        ctl_error("%s says %u, the daemon says %u: nothing is killed", demo->pid_file,
                  (unsigned)pid, (unsigned)stats->pid);
    }
    client_free(stats);
    return same ? (pid_t)pid : 0;
}

/* A killed process is gone, or a zombie whose parent has not looked yet. */
static bool has_ended(pid_t pid)
{
    char path[64], text[256] = "";

    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file) return true;
    (void)fgets(text, sizeof(text), file);
    (void)fclose(file);
    const char *state = strrchr(text, ')');
    return !state || strncmp(state, ") Z", 3) == 0;
}

static bool kill_hard(pid_t pid)
{
    const struct timespec pause = {0, 10000000};

    if (kill(pid, SIGKILL) != 0) {
        ctl_error("cannot kill process %d: %s", (int)pid, strerror(errno));
        return false;
    }
    for (int i = 0; i < 500; i++) {
        if (has_ended(pid)) return true;
        (void)nanosleep(&pause, NULL);
    }
    ctl_error("process %d does not end", (int)pid);
    return false;
}

int demo_restart(struct demo *demo)
{
    char shell[] = "/bin/sh", flag[] = "-c";
    char *const argv[] = {shell, flag, (char *)(uintptr_t)demo->restart, NULL};
    struct timespec before, after;

    const pid_t pid = daemon_pid(demo);
    if (pid == 0) return CLIENT_EXIT_FAILED;
    demo_disconnect(demo);
    if (!kill_hard(pid)) return CLIENT_EXIT_FAILED;
    (void)clock_gettime(CLOCK_MONOTONIC, &before);
    if (spawn_process(argv, NULL) == 0) {
        ctl_error("cannot run %s", demo->restart);
        return CLIENT_EXIT_FAILED;
    }
    if (!spawn_wait_ready(demo->ctl->endpoint, 0, RESTART_MS)) {
        ctl_error("the daemon did not come back within %u s after: %s", RESTART_MS / 1000,
                  demo->restart);
        return CLIENT_EXIT_UNAVAILABLE;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &after);
    demo_title(demo, "kill -9 and restart: ready after %.0f ms, rows are still there",
               (double)(after.tv_sec - before.tv_sec) * 1e3 +
                   (double)(after.tv_nsec - before.tv_nsec) / 1e6);
    int code = demo_connect(demo);
    for (uint32_t i = 0; i < demo->session_count && code == 0; i++) {
        struct demo_session *session = &demo->sessions[i];
        const uint32_t turn = session->turns - 1;
        const struct demo_expect expect = {
            .replay = true,
            .hit_min = session->turn_end[turn] - DEMO_SLACK_TOKENS,
        };
        code = demo_session_open(demo, session);
        if (code == 0) code = go_on(demo, session, "next turn", turn, 2, &expect);
    }
    return code;
}

int demo_rollback(struct demo *demo)
{
    struct demo_session *session = &demo->sessions[0];
    const uint32_t turn = session->turns > 1 ? session->turns - 2 : 0;
    struct client_failure failure;
    uint32_t head = 0;

    demo_title(demo, "%s goes back to turn %u and takes another way", session->name, turn);
    if (!turn_rollback(demo->user, session->name, session->turn_checkpoint[turn], &head, &failure))
        return ctl_failure(&failure);
    demo_say(demo, head == session->turn_position[turn],
             "Rollback: the head stands at %u tokens, the checkpoint of turn %u", head, turn);
    const struct demo_expect expect = {
        .exact = true,
        .replay = true,
        .hit_min = session->turn_end[turn] - DEMO_SLACK_TOKENS,
    };
    return go_on(demo, session, "other turn", turn, 3, &expect);
}

int demo_other_user(struct demo *demo)
{
    struct demo_session *session = &demo->sessions[0];
    struct client_failure failure;
    struct client *other = NULL;
    struct turn_prefill prefill;
    uint32_t vocab = 0, count = 0;
    bool created = false;

    demo_title(demo, "another user asks for %s, with the same prompt", session->name);
    int code = ctl_connect_as(demo->ctl, demo->ctl->endpoint, demo->other_token_file,
                              demo->ctl->timeout_ms, &other);
    if (code != 0) return code;
    /* A short prompt: it is computed, since there is nothing to reuse. */
    count = KV_MIN(session->turn_end[0], 2 * demo->window_tokens + 64);
    if (!turn_open(other, session->name, &created, &vocab, &failure) ||
        !turn_run_prefill(other, session->name, session->turn_tokens[0], count, &prefill, &failure))
        code = ctl_failure(&failure);
    client_destroy(other);
    if (code != 0) return code;
    demo_say(demo, created, "OpenSession: created=%s, as for any new id",
             created ? "true" : "false");
    const struct demo_expect expect = {.miss = true, .reason = "NEVER_STORED"};
    demo_line(demo, "first turn", session, &prefill, &expect);
    return CLIENT_EXIT_OK;
}
