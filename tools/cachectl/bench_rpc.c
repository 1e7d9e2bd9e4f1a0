/*
 * `cachectl bench rpc`: what the daemon adds to a bare gRPC call.
 *
 * Lookup over a unix socket beside two anchors of the same run: an echo of the same message sizes
 * over the same C core, and two hand-overs between threads, which is what the daemon's way (rpc
 * thread, shard) costs at least.  All three are measured in turn, A B C A B C, because the
 * machine's speed moves between one second and the next; each round gives one ratio, and the median
 * of the ratios counts.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/thread.h"
#include "tools/cachectl/bench_call.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/spawn.h"
#include "tools/cachectl/turns.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PROMPT_TOKENS 64u
#define SESSION "bench"
#define TARGET 1.10

/* Microseconds. */
struct sample {
    double p50, p99;
};

struct round {
    struct sample echo, hand, lookup;
    double ratio;
};

/* Owned by: bench_rpc(). */
struct bench {
    struct bench_progress *progress;
    const char *daemon; /* NULL: the one beside this program. */
    uint32_t rounds, calls;
    struct spawn spawn;
    pid_t echo_pid;
    struct bench_call *echo, *lookup;
    uint64_t *times_ns;
    uint8_t request[1024];
    size_t request_bytes, reply_bytes;
    struct round *results;
};

static int compare_u64(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static int compare_ratio(const void *a, const void *b)
{
    const double x = ((const struct round *)a)->ratio;
    const double y = ((const struct round *)b)->ratio;
    return x < y ? -1 : x > y;
}

static struct sample sample_of(uint64_t *times_ns, uint32_t count)
{
    qsort(times_ns, count, sizeof(*times_ns), compare_u64);
    return (struct sample){
        .p50 = (double)times_ns[count / 2] / 1000,
        .p99 = (double)times_ns[count - 1 - count / 100] / 1000,
    };
}

/* The other side of the hand-over: gives back each token it gets, until 2. */
struct partner {
    int there, back;
};

static void partner_run(void *arg)
{
    const struct partner *partner = arg;
    uint64_t token = 1;

    while (token == 1 && read(partner->there, &token, sizeof(token)) == sizeof(token))
        (void)!write(partner->back, &(uint64_t){1}, sizeof(uint64_t));
}

static bool run_hand_overs(uint64_t *times_ns, uint32_t count)
{
    struct partner partner = {eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC)};
    struct kv_thread thread = {.started = false};
    uint64_t token = 1;
    bool ok =
        partner.there >= 0 && partner.back >= 0 &&
        kv_thread_start(&thread, KV_THREAD_ANY, "partner", partner_run, &partner, NULL) == KV_OK;

    for (uint32_t i = 0; i < count && ok; i++) {
        const uint64_t began = kv_clock_stopwatch_ns();
        token = i + 1 == count ? 2 : 1;
        ok = write(partner.there, &token, sizeof(token)) == sizeof(token) &&
             read(partner.back, &token, sizeof(token)) == sizeof(token);
        times_ns[i] = kv_clock_stopwatch_ns() - began;
    }
    kv_thread_join(&thread);
    if (partner.there >= 0) (void)close(partner.there);
    if (partner.back >= 0) (void)close(partner.back);
    return ok;
}

/* One session with one short prompt, and the Lookup that will be repeated. */
static int prepare_lookup(struct bench *bench)
{
    Cached__Session__V1__LookupRequest request = CACHED__SESSION__V1__LOOKUP_REQUEST__INIT;
    Cached__Session__V1__LookupResponse *answer = NULL;
    uint32_t tokens[PROMPT_TOKENS], vocab = 0;
    struct turn_prefill prefill;
    struct client_failure failure;
    struct client *client = NULL;
    char name[] = SESSION;
    bool created = false;

    int code = ctl_connect_as(bench->progress->ctl, bench->spawn.endpoint, bench->spawn.user_token,
                              10000, &client);
    if (code != 0) return code;
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        tokens[i] = 3 + i;
    request.session_id = name;
    request.tokens.len = sizeof(tokens);
    request.tokens.data = (uint8_t *)tokens;
    if (!turn_open(client, SESSION, &created, &vocab, &failure) ||
        !turn_run_prefill(client, SESSION, tokens, PROMPT_TOKENS, &prefill, &failure) ||
        !client_call(client, CLIENT_LOOKUP, &request.base, &answer, &failure)) {
        client_destroy(client);
        return ctl_failure(&failure);
    }
    bench->reply_bytes = protobuf_c_message_get_packed_size(&answer->base);
    bench->request_bytes = protobuf_c_message_get_packed_size(&request.base);
    if (bench->request_bytes <= sizeof(bench->request)) {
        (void)protobuf_c_message_pack(&request.base, bench->request);
    } else {
        code = CLIENT_EXIT_FAILED;
    }
    client_free(answer);
    client_destroy(client);
    return code;
}

static int start_echo(struct bench *bench, char *endpoint, size_t endpoint_bytes)
{
    char self[1024], verb[] = "bench-echo", bytes[24];

    (void)snprintf(endpoint, endpoint_bytes, "unix:%s/echo", bench->spawn.dir);
    (void)snprintf(bytes, sizeof(bytes), "%zu", bench->reply_bytes);
    if (!spawn_self_path(NULL, self, sizeof(self))) return CLIENT_EXIT_FAILED;
    char *const argv[] = {self, verb, endpoint, bytes, NULL};
    bench->echo_pid = spawn_process(argv, NULL);
    if (bench->echo_pid == 0) return CLIENT_EXIT_FAILED;
    for (int i = 0; i < 250 && bench_go_on(bench->progress); i++) {
        const struct timespec pause = {0, 20000000};
        struct stat info;
        if (stat(endpoint + strlen("unix:"), &info) == 0) return CLIENT_EXIT_OK;
        (void)nanosleep(&pause, NULL);
    }
    if (!spawn_interrupted()) ctl_error("the echo server did not start");
    return CLIENT_EXIT_FAILED;
}

static int prepare(struct bench *bench)
{
    const struct spawn_options options = {.daemon = bench->daemon, .backend = "synthetic"};
    char endpoint[SPAWN_PATH_BYTES], token[CTL_TOKEN_BYTES], why[320];

    int code = spawn_start(bench->progress->ctl, &options, &bench->spawn);
    if (code == 0) code = prepare_lookup(bench);
    if (code == 0) code = start_echo(bench, endpoint, sizeof(endpoint));
    if (code != 0) return code;
    if (!client_read_token(bench->spawn.user_token, token, sizeof(token), why, sizeof(why))) {
        ctl_error("%s", why);
        return CLIENT_EXIT_FAILED;
    }
    bench->echo =
        bench_call_create(endpoint, BENCH_ECHO_PATH, token, bench->request, bench->request_bytes);
    bench->lookup = bench_call_create(bench->spawn.endpoint, BENCH_LOOKUP_PATH, token,
                                      bench->request, bench->request_bytes);
    bench->times_ns = calloc(bench->calls, sizeof(*bench->times_ns));
    bench->results = calloc(bench->rounds, sizeof(*bench->results));
    if (bench->echo && bench->lookup && bench->times_ns && bench->results) return CLIENT_EXIT_OK;
    ctl_error("out of memory");
    return CLIENT_EXIT_FAILED;
}

/* One round of all three.  false: a call failed, or this program is to end. */
static bool measure_round(struct bench *bench, struct round *ret_round)
{
    uint64_t *times = bench->times_ns;
    struct round round;

    if (!bench_call_run(bench->echo, bench->progress, times, bench->calls)) return false;
    round.echo = sample_of(times, bench->calls);
    if (!bench_call_run(bench->lookup, bench->progress, times, bench->calls)) return false;
    round.lookup = sample_of(times, bench->calls);
    if (!run_hand_overs(times, bench->calls)) return false;
    round.hand = sample_of(times, bench->calls);
    round.ratio = round.lookup.p50 / (round.echo.p50 + round.hand.p50);
    *ret_round = round;
    return true;
}

static int measure(struct bench *bench)
{
    struct bench_progress *progress = bench->progress;
    const uint32_t warm = KV_MIN(bench->calls, 200u);

    progress->doing = "rounds of calls";
    bool ok = bench_call_run(bench->echo, progress, bench->times_ns, warm) &&
              bench_call_run(bench->lookup, progress, bench->times_ns, warm);
    for (uint32_t i = 0; i < bench->rounds && ok; i++) {
        const struct round *round = &bench->results[i];
        ok = measure_round(bench, &bench->results[i]);
        if (!ok) break;
        bench_say(progress, "round %u of %u: %.2f", i + 1, bench->rounds, round->ratio);
        bench_note(progress, 0,
                   "%u of %u rounds; the last: Lookup %.1f us, echo %.1f us, hand-overs %.1f us at "
                   "p50, ratio %.3f",
                   i + 1, bench->rounds, round->lookup.p50, round->echo.p50, round->hand.p50,
                   round->ratio);
    }
    if (ok) return CLIENT_EXIT_OK;
    if (!spawn_interrupted()) ctl_error("a call of the benchmark failed");
    return CLIENT_EXIT_FAILED;
}

static json_t *sample_json(const struct sample *sample)
{
    return json_pack("{s:f, s:f}", "p50_us", sample->p50, "p99_us", sample->p99);
}

/* The round whose ratio is the median, with the spread beside it. */
static int report(struct bench *bench)
{
    static const char *const names[] = {"WHAT", "P50_US", "P99_US"};
    struct out_table table;

    qsort(bench->results, bench->rounds, sizeof(*bench->results), compare_ratio);
    const struct round *median = &bench->results[bench->rounds / 2];
    const double low = bench->results[0].ratio;
    const double high = bench->results[bench->rounds - 1].ratio;
    const bool met = median->ratio <= TARGET;
    if (bench->progress->ctl->json) {
        return out_json_take(json_pack(
            "{s:s, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:b, s:I, s:I, s:I, s:I}", "benchmark", "rpc",
            "echo", sample_json(&median->echo), "hand_overs", sample_json(&median->hand), "lookup",
            sample_json(&median->lookup), "ratio", median->ratio, "ratio_min", low, "ratio_max",
            high, "target", TARGET, "met", met, "rounds", (json_int_t)bench->rounds, "calls",
            (json_int_t)bench->calls, "request_bytes", (json_int_t)bench->request_bytes,
            "reply_bytes", (json_int_t)bench->reply_bytes));
    }
    const struct sample *samples[] = {&median->echo, &median->hand, &median->lookup};
    const char *const what[] = {"echo over bare gRPC C core", "two hand-overs between threads",
                                "Lookup"};
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 6);
    for (size_t i = 0; i < KV_ARRAY_COUNT(samples); i++) {
        out_table_cell(&table, "%s", what[i]);
        out_table_cell(&table, "%.1f", samples[i]->p50);
        out_table_cell(&table, "%.1f", samples[i]->p99);
    }
    out_table_print(bench->progress->ctl, &table);
    (void)printf("Lookup / (echo + hand-overs), p50: median %.3f, min %.3f, max %.3f; target %.2f "
                 "%s\n",
                 median->ratio, low, high, TARGET, met ? "met" : "missed");
    (void)printf("%u rounds of %u calls each, request %zu B, reply %zu B, unix socket, the round "
                 "with the median ratio above\n",
                 bench->rounds, bench->calls, bench->request_bytes, bench->reply_bytes);
    return CLIENT_EXIT_OK;
}

int bench_rpc(struct bench_progress *progress, const char *daemon, bool quick)
{
    struct bench bench = {
        .progress = progress,
        .daemon = daemon,
        .rounds = quick ? 5 : 11,
        .calls = quick ? 1000 : 4000,
    };

    int code = prepare(&bench);
    if (code == 0) code = measure(&bench);
    if (code == 0) code = report(&bench);
    bench_call_destroy(bench.echo);
    bench_call_destroy(bench.lookup);
    if (bench.echo_pid > 0) {
        (void)kill(bench.echo_pid, SIGKILL);
        (void)waitpid(bench.echo_pid, NULL, 0);
    }
    if (!spawn_stop(&bench.spawn) && code == 0) code = CLIENT_EXIT_FAILED;
    free(bench.times_ns);
    free(bench.results);
    return code;
}
