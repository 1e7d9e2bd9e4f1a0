/*
 * `cachectl bench restart`: how soon a daemon serves again after kill -9.
 *
 * A daemon runs on a state directory of mkstate.  In each round a thread saves on some of its
 * sessions, the daemon is killed in the middle of that and started again.  What is timed: from the
 * start of the process until it says that it serves, and the first call after that, a Prefill of a
 * session that nobody has asked for since, whose rows come from the SSD; it is answered before its
 * own checkpoint is durable, which is another matter than the hit.  Files that the last
 * daemon read may still be in the page cache; pages of rows are not, they are read around it.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/thread.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/spawn.h"
#include "tools/cachectl/stats.h"
#include "tools/cachectl/turns.h"
#include "tools/mkstate_content.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_MS_TARGET 2000.0
#define HIT_MS_TARGET 50.0
#define CHECKPOINTS 1000000u
#define CHECKPOINTS_QUICK 100000u
#define LOAD_MS 500
#define LOAD_SESSIONS 8u /* And as many for first hits. */
#define LOAD_TOKENS_MAX 4096u
#define PROMPT_TOKENS 136u /* mkstate's sessions have at least 65. */
#define ROUNDS_MAX 5u

_Static_assert(ROUNDS_MAX + 1 <= LOAD_SESSIONS, "no session is asked first twice");

struct round {
    double ready_ms, hit_ms, lookup_ms, read_ms; /* The last two of the hit. */
    uint32_t hit_tokens;
    uint64_t sessions, recovered, dropped, rss_bytes, index_bytes, saved;
    bool clean; /* After a stop, not a kill. */
};

/* Owned by: bench_restart(). */
struct restart {
    struct bench_progress *progress;
    const struct bench_restart_options *options;
    struct spawn spawn;
    char dir[SPAWN_PATH_BYTES];
    bool made_dir;
    char index_ram[40]; /* As configured. */
    uint32_t vocab, rounds;
    uint32_t asked; /* Sessions asked for so far. */
    struct round results[ROUNDS_MAX + 1];
    uint32_t result_count;
};

/* ---- the directory ---- */

static bool go_on(void *progress)
{
    return bench_go_on(progress);
}

static int make_dir(struct restart *own)
{
    char tool[1024], flag[] = "--checkpoints", count[16];
    int status = 0;

    if (own->options->dir != NULL) {
        const int length = snprintf(own->dir, sizeof(own->dir), "%s", own->options->dir);
        if (length > 0 && length < (int)sizeof(own->dir)) return CLIENT_EXIT_OK;
        ctl_error("--dir: 1 to %zu bytes", sizeof(own->dir) - 1);
        return CLIENT_EXIT_USAGE;
    }
    (void)snprintf(own->dir, sizeof(own->dir), "%.120s/cachectl-state.XXXXXX", bench_tmp_dir());
    if (!spawn_self_path("mkstate", tool, sizeof(tool)) || access(tool, X_OK) != 0) {
        ctl_error("no mkstate beside cachectl: give --dir DIR");
        return CLIENT_EXIT_NOT_FOUND;
    }
    if (mkdtemp(own->dir) == NULL) {
        ctl_error("cannot make the directory %s: %s", own->dir, strerror(errno));
        return CLIENT_EXIT_FAILED;
    }
    own->made_dir = true;
    own->progress->doing = "making the state directory";
    (void)snprintf(count, sizeof(count), "%u",
                   own->options->quick ? CHECKPOINTS_QUICK : CHECKPOINTS);
    bench_say(own->progress, "making %s checkpoints in %s", count, own->dir);
    char *const argv[] = {tool, flag, count, own->dir, NULL};
    const pid_t pid = spawn_tool(argv);
    if (pid != 0 && spawn_wait(pid, go_on, own->progress, &status) && WIFEXITED(status) &&
        WEXITSTATUS(status) == 0)
        return CLIENT_EXIT_OK;
    if (!spawn_interrupted()) ctl_error("mkstate failed");
    return CLIENT_EXIT_FAILED;
}

/* ---- calls ---- */

static int connect_user(struct restart *own, struct client **ret_client)
{
    return ctl_connect_as(own->progress->ctl, own->spawn.endpoint, own->spawn.user_token, 10000,
                          ret_client);
}

static const char *session_name(uint32_t session, char name[MKSTATE_NAME_BYTES])
{
    return mkstate_session(session, name);
}

/* Whether it is mkstate's directory; nothing is changed in another one. */
static int look(struct restart *own)
{
    Cached__Session__V1__GetSessionRequest request = CACHED__SESSION__V1__GET_SESSION_REQUEST__INIT;
    Cached__Session__V1__GetSessionResponse *answer = NULL;
    char name[MKSTATE_NAME_BYTES];
    struct client_failure failure;
    struct client *client = NULL;

    int code = connect_user(own, &client);
    if (code != 0) return code;
    (void)mkstate_session(2 * LOAD_SESSIONS - 1, name);
    request.session_id = name;
    if (!client_call(client, CLIENT_GET_SESSION, &request.base, &answer, &failure)) {
        code = ctl_failure(&failure);
        ctl_error("%s has no session %s of mkstate: make a directory with `mkstate --checkpoints N "
                  "DIR`, and at least %u sessions a user",
                  own->dir, name, 2 * LOAD_SESSIONS);
    }
    client_free(answer);
    client_destroy(client);
    return code;
}

/* The first one after a start, of a session whose tree is in nobody's memory. */
static int first_hit(struct restart *own, struct round *round)
{
    char name[MKSTATE_NAME_BYTES];
    uint32_t ids[PROMPT_TOKENS];
    struct turn_prefill prefill = {.outcome = TURN_NONE};
    struct client_failure failure;
    struct client *client = NULL;
    const uint32_t session = own->asked++;

    int code = connect_user(own, &client);
    if (code != 0) return code;
    mkstate_tokens(own->options->seed, 0, session, own->vocab, ids, PROMPT_TOKENS);
    const uint64_t began = kv_clock_stopwatch_ns();
    if (!turn_run_prefill_early(client, session_name(session, name), ids, PROMPT_TOKENS, &prefill,
                                &failure)) {
        code = ctl_failure(&failure);
    } else if (prefill.hit_tokens == 0) {
        ctl_error("the first Prefill of %s was a %s (%s): a directory of another --seed?", name,
                  turn_outcome_name(prefill.outcome), prefill.reason);
        code = CLIENT_EXIT_FAILED;
    }
    round->hit_ms = (double)(kv_clock_stopwatch_ns() - began) / 1e6;
    round->hit_tokens = prefill.hit_tokens;
    round->lookup_ms = prefill.lookup_ms;
    round->read_ms = prefill.read_ms;
    client_destroy(client);
    return code;
}

static int read_stats(struct restart *own, struct round *round)
{
    Cached__Admin__V1__GetConfigRequest request = CACHED__ADMIN__V1__GET_CONFIG_REQUEST__INIT;
    Cached__Admin__V1__GetConfigResponse *config = NULL;
    Cached__Admin__V1__GetStatsResponse *stats = NULL;
    struct client_failure failure;
    struct client *client = NULL;

    int code = ctl_connect_as(own->progress->ctl, own->spawn.endpoint, own->spawn.ops_token, 10000,
                              &client);
    if (code != 0) return code;
    code = stats_fetch(client, &stats);
    if (code == 0 && !client_call(client, CLIENT_GET_CONFIG, &request.base, &config, &failure))
        code = ctl_failure(&failure);
    if (code == 0) {
        own->vocab = stats->vocab_tokens;
        round->sessions = stats->sessions;
        round->recovered = stats->recovered_checkpoints;
        round->dropped = stats->dropped_checkpoints;
        round->rss_bytes = stats->rss_bytes;
        round->index_bytes = (uint64_t)stats_sum(stats, "cached_index_bytes", NULL);
        for (size_t i = 0; i < config->n_items; i++)
            if (strcmp(config->items[i]->key, "index.ram") == 0)
                (void)snprintf(own->index_ram, sizeof(own->index_ram), "%.39s",
                               config->items[i]->value);
    }
    client_free(stats);
    client_free(config);
    client_destroy(client);
    return code;
}

/* ---- load ---- */

struct load {
    struct restart *own;
    struct client *client;
    _Atomic bool stop;
    _Atomic uint64_t saved; /* Prefills that were answered. */
};

/* Until it is stopped, or the daemon is gone: longer and longer prompts on some sessions. */
static void load_run(void *context)
{
    struct load *load = context;
    uint32_t *ids = calloc(LOAD_TOKENS_MAX, sizeof(*ids));
    char name[MKSTATE_NAME_BYTES];
    struct turn_prefill prefill;
    struct client_failure failure;

    for (uint32_t i = 0; ids != NULL && !atomic_load(&load->stop); i++) {
        /* Behind those that are asked first after a start. */
        const uint32_t session = LOAD_SESSIONS + i % LOAD_SESSIONS;
        const uint32_t tokens = PROMPT_TOKENS + i / LOAD_SESSIONS * 32 % LOAD_TOKENS_MAX / 2;
        mkstate_tokens(load->own->options->seed, 0, session, load->own->vocab, ids, tokens);
        if (!turn_run_prefill(load->client, session_name(session, name), ids, tokens, &prefill,
                              &failure))
            break;
        (void)atomic_fetch_add(&load->saved, 1);
    }
    free(ids);
}

static int load_and_kill(struct restart *own, uint64_t *ret_saved)
{
    const struct timespec pause = {0, LOAD_MS * 1000000l};
    struct load load = {.own = own};
    struct kv_thread thread = {.started = false};

    int code = connect_user(own, &load.client);
    if (code != 0) return code;
    if (kv_thread_start(&thread, KV_THREAD_ANY, "load", load_run, &load, NULL) != KV_OK) {
        ctl_error("cannot start a thread");
        code = CLIENT_EXIT_FAILED;
    } else {
        (void)nanosleep(&pause, NULL);
    }
    if (!spawn_kill(&own->spawn) && code == 0) code = CLIENT_EXIT_FAILED;
    atomic_store(&load.stop, true);
    kv_thread_join(&thread);
    client_destroy(load.client);
    *ret_saved = atomic_load(&load.saved);
    return code;
}

/* ---- rounds ---- */

static int measure_start(struct restart *own, bool clean, uint64_t saved)
{
    struct round *round = &own->results[own->result_count];
    int code = spawn_again(own->progress->ctl, &own->spawn);
    if (code != 0) return code;
    *round = (struct round){
        .clean = clean, .saved = saved, .ready_ms = (double)own->spawn.ready_ns / 1e6};
    code = first_hit(own, round);
    if (code == 0) code = read_stats(own, round);
    if (code != 0) return code;
    own->result_count++;
    bench_note(own->progress, 0,
               "%u starts; the last: ready after %.0f ms, first hit %.1f ms, recovered %" PRIu64
               ", dropped %" PRIu64,
               own->result_count, round->ready_ms, round->hit_ms, round->recovered, round->dropped);
    return CLIENT_EXIT_OK;
}

static int measure(struct restart *own)
{
    char user[MKSTATE_NAME_BYTES];
    const struct spawn_options options = {
        .daemon = own->options->daemon,
        .backend = "synthetic",
        .state_dir = own->dir,
        .user = mkstate_user(0, user),
    };

    own->progress->doing = "starting a daemon";
    int code = spawn_start(own->progress->ctl, &options, &own->spawn);
    if (code == 0) code = look(own);
    if (code == 0) code = read_stats(own, &own->results[0]); /* The vocabulary. */
    own->progress->doing = "killing and starting";
    for (uint32_t i = 0; code == 0 && i < own->rounds; i++) {
        uint64_t saved = 0;
        if (!bench_go_on(own->progress)) return CLIENT_EXIT_FAILED;
        code = load_and_kill(own, &saved);
        if (code == 0) code = measure_start(own, false, saved);
    }
    if (code == 0 && !spawn_halt(&own->spawn)) code = CLIENT_EXIT_FAILED;
    if (code == 0) code = measure_start(own, true, 0);
    return code;
}

/* ---- report ---- */

static json_t *round_json(const struct round *round)
{
    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "after",
                     round->clean ? "stop" : "kill", "ready_ms", round->ready_ms, "first_hit_ms",
                     round->hit_ms, "lookup_ms", round->lookup_ms, "read_ms", round->read_ms,
                     "hit_tokens", (json_int_t)round->hit_tokens, "recovered",
                     (json_int_t)round->recovered, "dropped", (json_int_t)round->dropped,
                     "sessions", (json_int_t)round->sessions, "rss_bytes",
                     (json_int_t)round->rss_bytes, "index_bytes", (json_int_t)round->index_bytes,
                     "saved_before", (json_int_t)round->saved);
}

static void print_rounds(const struct restart *own)
{
    static const char *const names[] = {"START AFTER", "READY_MS",  "FIRST_HIT_MS", "LOOKUP_MS",
                                        "READ_MS",     "RECOVERED", "DROPPED",      "SESSIONS",
                                        "RSS",         "INDEX",     "SAVED_BEFORE"};
    struct out_table table;
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x7fe);
    for (uint32_t i = 0; i < own->result_count; i++) {
        const struct round *round = &own->results[i];
        char rss[OUT_TEXT_BYTES], index[OUT_TEXT_BYTES];
        out_table_cell(&table, "%s", round->clean ? "a clean stop" : "kill -9 under load");
        out_table_cell(&table, "%.0f", round->ready_ms);
        out_table_cell(&table, "%.1f", round->hit_ms);
        out_table_cell(&table, "%.1f", round->lookup_ms);
        out_table_cell(&table, "%.1f", round->read_ms);
        out_table_cell(&table, "%" PRIu64, round->recovered);
        out_table_cell(&table, "%" PRIu64, round->dropped);
        out_table_cell(&table, "%" PRIu64, round->sessions);
        out_table_cell(&table, "%s", out_bytes(rss, round->rss_bytes));
        out_table_cell(&table, "%s", out_bytes(index, round->index_bytes));
        out_table_cell(&table, "%" PRIu64, round->saved);
    }
    out_table_print(own->progress->ctl, &table);
}

/* The slowest start after a kill counts. */
static int report(struct restart *own)
{
    double ready = 0, hit = 0;
    for (uint32_t i = 0; i < own->result_count; i++) {
        if (own->results[i].clean) continue;
        ready = KV_MAX(ready, own->results[i].ready_ms);
        hit = KV_MAX(hit, own->results[i].hit_ms);
    }
    const bool ready_met = ready < READY_MS_TARGET, hit_met = hit < HIT_MS_TARGET;
    if (own->progress->ctl->json) {
        json_t *rounds = json_array();
        for (uint32_t i = 0; i < own->result_count; i++)
            (void)json_array_append_new(rounds, round_json(&own->results[i]));
        return out_json_take(json_pack("{s:s, s:o, s:f, s:f, s:b, s:f, s:f, s:b, s:s}", "benchmark",
                                       "restart", "starts", rounds, "ready_ms", ready,
                                       "ready_ms_target", READY_MS_TARGET, "ready_met", ready_met,
                                       "first_hit_ms", hit, "first_hit_ms_target", HIT_MS_TARGET,
                                       "first_hit_met", hit_met, "index_ram", own->index_ram));
    }
    const struct round *last = &own->results[own->result_count - 1];
    print_rounds(own);
    (void)printf("slowest after a kill: ready %.0f ms, target < %.0f %s; first hit %.1f ms, target "
                 "< %.0f %s\n",
                 ready, READY_MS_TARGET, ready_met ? "met" : "missed", hit, HIT_MS_TARGET,
                 hit_met ? "met" : "missed");
    (void)printf("recovered %" PRIu64 ", dropped %" PRIu64 "; index.ram is %s; the index takes "
                 "%.0f B a session; files of records in the page cache, pages of rows read from "
                 "the device\n",
                 last->recovered, last->dropped, own->index_ram,
                 (double)last->index_bytes / (double)KV_MAX(last->sessions, 1u));
    return CLIENT_EXIT_OK;
}

int bench_restart(struct bench_progress *progress, const struct bench_restart_options *options)
{
    struct restart own = {.progress = progress, .options = options};
    own.rounds = options->quick ? 3 : ROUNDS_MAX;
    int code = make_dir(&own);
    if (code == 0) code = measure(&own);
    if (!spawn_stop(&own.spawn) && code == 0) code = CLIENT_EXIT_FAILED;
    if (code == 0) code = report(&own);
    if (own.made_dir) spawn_remove_tree(own.dir, 2);
    return code;
}
