/*
 * `cachectl bench fill`: saves far more than the SSD tier has room for, and says what became of it.
 *
 * Writers open sessions, prefill and close them, one after the other, until the daemon has saved as
 * many bytes as asked for.  With --dir it is a daemon of this benchmark's own, with the default
 * configuration but for the synthetic backend, and its state stays in that directory; without, the
 * daemon at --endpoint.  A save that was refused, for whatever reason, or a failed read or write of
 * the SSD makes it end with an error: a full tier is no reason for either.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/spawn.h"
#include "tools/cachectl/stats.h"
#include "tools/cachectl/turns.h"

#include <inttypes.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define WRITERS 4u
#define SESSION_TOKENS 16384u
#define POLL_MS 200
#define TIMEOUT_MS 60000u
#define IDS_BELOW 400u

struct writer {
    struct fill *fill;
    struct kv_thread thread;
    struct client *client;
    uint32_t index;
    uint64_t sessions, refused, tokens;
    char reason[48]; /* Of the first refusal. */
    bool failed;
    struct client_failure failure;
};

/* Owned by: bench_fill(). */
struct fill {
    struct bench_progress *progress;
    struct client *ops;
    struct writer writers[WRITERS];
    uint64_t run; /* Names of one run's sessions are not another's. */
    atomic_bool stop;
};

struct seen {
    double saved, evicted_bytes, io_errors;
    double capacity, expired, corrupt, waited;
    double limit, used;
};

bool bench_parse_bytes(const char *text, uint64_t *ret_bytes)
{
    static const struct {
        const char *name;
        unsigned shift;
    } units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
    char *end = NULL;
    if (text[0] < '0' || text[0] > '9') return false;
    const unsigned long long number = strtoull(text, &end, 10);
    for (size_t i = 0; i < KV_ARRAY_COUNT(units); i++) {
        if (strcmp(end, units[i].name) != 0) continue;
        if (number == 0 || number > (UINT64_MAX >> 1) >> units[i].shift) return false;
        *ret_bytes = (uint64_t)number << units[i].shift;
        return true;
    }
    return false;
}

/* ---- writers ---- */

static uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t x = *state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static bool write_one(struct writer *writer, uint32_t *ids)
{
    char name[64];
    uint64_t random = writer->fill->run ^ (writer->index + 1) * 1000003u ^ writer->sessions << 32;
    struct turn_prefill prefill;
    uint32_t vocab = 0;
    bool created = false;
    for (uint32_t i = 0; i < SESSION_TOKENS; i++)
        ids[i] = (uint32_t)(next_random(&random) % IDS_BELOW);
    (void)snprintf(name, sizeof(name), "fill-%" PRIx64 "-%u-%" PRIu64, writer->fill->run,
                   writer->index, writer->sessions);
    if (!turn_open(writer->client, name, &created, &vocab, &writer->failure) ||
        !turn_run_prefill(writer->client, name, ids, SESSION_TOKENS, &prefill, &writer->failure) ||
        !turn_close(writer->client, name, &writer->failure))
        return false;
    writer->sessions++;
    writer->tokens += SESSION_TOKENS;
    if (prefill.save_reason[0] == '\0') return true;
    if (writer->refused++ == 0)
        (void)snprintf(writer->reason, sizeof(writer->reason), "%s", prefill.save_reason);
    return true;
}

static void writer_run(void *context)
{
    struct writer *writer = context;
    uint32_t *ids = malloc(sizeof(*ids) * SESSION_TOKENS);
    if (ids == NULL)
        writer->failure = (struct client_failure){.code = CLIENT_INTERNAL, .text = "out of memory"};
    bool ok = ids != NULL;
    while (ok && !atomic_load(&writer->fill->stop))
        ok = write_one(writer, ids);
    writer->failed = !ok;
    if (!ok) atomic_store(&writer->fill->stop, true);
    free(ids);
}

/* ---- what the daemon says ---- */

static int look(struct fill *fill, struct seen *ret)
{
    Cached__Admin__V1__GetStatsResponse *stats = NULL;
    const int code = stats_fetch(fill->ops, &stats);
    if (code != 0) return code;
    *ret = (struct seen){
        .saved = stats_sum(stats, "cached_save_bytes_total", NULL),
        .evicted_bytes = stats_sum(stats, "cached_evicted_bytes_total", NULL),
        .io_errors = stats_sum(stats, "cached_io_errors_total", NULL),
        .capacity = stats_sum(stats, "cached_evictions_total", "tier=\"ssd\",cause=\"capacity\""),
        .expired = stats_sum(stats, "cached_evictions_total", "tier=\"ssd\",cause=\"expired\""),
        .corrupt = stats_sum(stats, "cached_evictions_total", "tier=\"ssd\",cause=\"corrupt\""),
        .waited = stats_sum(stats, "cached_saves_waited_total", NULL),
        .limit = stats_sum(stats, "cached_ssd_limit_bytes", NULL),
        .used = stats_sum(stats, "cached_ssd_file_bytes", NULL),
    };
    client_free(stats);
    return 0;
}

static void pause_ms(long ms)
{
    const struct timespec time = {.tv_nsec = ms * 1000000};
    (void)nanosleep(&time, NULL);
}

/* Until enough was saved, or a writer cannot go on.  *ret_most: of files, at any look. */
static int watch(struct fill *fill, uint64_t bytes, const struct seen *begun, struct seen *now,
                 double *ret_most)
{
    double said = bench_now();
    while (!atomic_load(&fill->stop)) {
        const int code = look(fill, now);
        if (code != 0) return code;
        *ret_most = KV_MAX(*ret_most, now->used);
        if (now->saved - begun->saved >= (double)bytes) return 0;
        if (!bench_go_on(fill->progress)) return CLIENT_EXIT_FAILED;
        if (bench_now() - said >= 2) {
            bench_say(fill->progress, "%.0f of %.0f MiB saved, %.0f checkpoints evicted",
                      (now->saved - begun->saved) / (1 << 20), (double)bytes / (1 << 20),
                      now->capacity - begun->capacity);
            said = bench_now();
        }
        pause_ms(POLL_MS);
    }
    return 0;
}

/* ---- the result ---- */

struct totals {
    uint64_t sessions, refused, tokens;
    const char *reason;
    const struct client_failure *failure;
};

static struct totals totals_of(const struct fill *fill)
{
    struct totals totals = {.reason = ""};
    for (uint32_t i = 0; i < WRITERS; i++) {
        const struct writer *writer = &fill->writers[i];
        totals.sessions += writer->sessions;
        totals.refused += writer->refused;
        totals.tokens += writer->tokens;
        if (writer->refused > 0 && totals.reason[0] == '\0') totals.reason = writer->reason;
        if (writer->failed && totals.failure == NULL) totals.failure = &writer->failure;
    }
    return totals;
}

static int report(const struct ctl *ctl, const struct totals *totals, const struct seen *begun,
                  const struct seen *now, double most, double seconds)
{
    const double saved = now->saved - begun->saved;
    const double errors = now->io_errors - begun->io_errors;
    const double rate = seconds > 0 ? saved / seconds / 1e6 : 0;
    char saved_text[OUT_TEXT_BYTES], limit[OUT_TEXT_BYTES], files[OUT_TEXT_BYTES];
    const bool good = totals->refused == 0 && errors == 0;

    if (ctl->json) {
        const int code = out_json_take(json_pack(
            "{s:f, s:I, s:I, s:I, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "saved_bytes",
            saved, "sessions", (json_int_t)totals->sessions, "tokens", (json_int_t)totals->tokens,
            "refused", (json_int_t)totals->refused, "refused_reason", totals->reason,
            "evicted_capacity", now->capacity - begun->capacity, "evicted_expired",
            now->expired - begun->expired, "evicted_corrupt", now->corrupt - begun->corrupt,
            "evicted_bytes", now->evicted_bytes - begun->evicted_bytes, "waited",
            now->waited - begun->waited, "io_errors", errors, "limit_bytes", now->limit,
            "files_bytes_max", most, "mb_per_second", rate));
        return code != 0 || good ? code : CLIENT_EXIT_FAILED;
    }
    (void)printf("saved     %s in %.1f s, %.0f MB/s; %" PRIu64 " sessions\n",
                 out_bytes(saved_text, (uint64_t)saved), seconds, rate, totals->sessions);
    (void)printf("evicted   %.0f for capacity, %.0f expired, %.0f corrupt\n",
                 now->capacity - begun->capacity, now->expired - begun->expired,
                 now->corrupt - begun->corrupt);
    (void)printf("waited    %.0f saves for room\n", now->waited - begun->waited);
    (void)printf("refused   %" PRIu64 " saves%s%s\n", totals->refused,
                 totals->refused > 0 ? ": " : "", totals->reason);
    (void)printf("errors    %.0f of the SSD\n", errors);
    (void)printf("tier      %s of files at most, limit %s\n", out_bytes(files, (uint64_t)most),
                 out_bytes(limit, (uint64_t)now->limit));
    if (!good) ctl_error("saves were refused or failed");
    return good ? CLIENT_EXIT_OK : CLIENT_EXIT_FAILED;
}

/* ---- start and end ---- */

static int connect_all(struct fill *fill, const struct bench_fill_options *options,
                       const struct spawn *spawn)
{
    const struct ctl *ctl = fill->progress->ctl;
    const bool own = spawn->pid > 0;
    const char *endpoint = own ? spawn->endpoint : ctl->endpoint;
    const char *user = own ? spawn->user_token : ctl->token_file;
    const char *ops = own ? spawn->ops_token : options->ops_token_file;
    int code = ctl_connect_as(ctl, endpoint, ops, TIMEOUT_MS, &fill->ops);
    for (uint32_t i = 0; code == 0 && i < WRITERS; i++) {
        fill->writers[i] = (struct writer){.fill = fill, .index = i};
        code = ctl_connect_as(ctl, endpoint, user, TIMEOUT_MS, &fill->writers[i].client);
    }
    return code;
}

static int measure(struct fill *fill, uint64_t bytes)
{
    struct seen begun = {0}, now = {0};
    double most = 0;
    int code = look(fill, &begun);
    const double began = bench_now();
    for (uint32_t i = 0; code == 0 && i < WRITERS; i++) {
        struct writer *writer = &fill->writers[i];
        if (kv_thread_start(&writer->thread, KV_THREAD_ANY, "fill", writer_run, writer, NULL) !=
            KV_OK)
            code = CLIENT_EXIT_FAILED;
    }
    if (code == 0) code = watch(fill, bytes, &begun, &now, &most);
    const double seconds = bench_now() - began;
    atomic_store(&fill->stop, true);
    for (uint32_t i = 0; i < WRITERS; i++)
        kv_thread_join(&fill->writers[i].thread);
    const struct totals totals = totals_of(fill);
    if (totals.failure != NULL) return ctl_failure(totals.failure);
    if (code != 0) return code;
    code = look(fill, &now);
    return code != 0 ? code : report(fill->progress->ctl, &totals, &begun, &now, most, seconds);
}

int bench_fill(struct bench_progress *progress, const struct bench_fill_options *options)
{
    const struct spawn_options own = {
        .daemon = options->daemon, .backend = "synthetic", .state_dir = options->dir};
    struct fill fill = {.progress = progress,
                        .run = (uint64_t)time(NULL) << 20 | (uint32_t)getpid()};
    struct spawn spawn = {.pid = 0};
    uint64_t bytes = 0;

    if (options->bytes == NULL || !bench_parse_bytes(options->bytes, &bytes)) {
        ctl_error("bench fill needs --bytes N, like 3GiB; found %.64s",
                  options->bytes == NULL ? "none" : options->bytes);
        return CLIENT_EXIT_USAGE;
    }
    if (options->dir == NULL && options->ops_token_file == NULL) {
        ctl_error("bench fill needs --dir DIR, or --ops-token-file F of a daemon that runs");
        return CLIENT_EXIT_USAGE;
    }
    progress->doing = "filling";
    int code = 0;
    if (options->dir != NULL) code = spawn_start(progress->ctl, &own, &spawn);
    if (code == 0) code = connect_all(&fill, options, &spawn);
    if (code == 0) code = measure(&fill, bytes);
    for (uint32_t i = 0; i < WRITERS; i++)
        client_destroy(fill.writers[i].client);
    client_destroy(fill.ops);
    if (!spawn_stop(&spawn) && code == 0) code = CLIENT_EXIT_FAILED;
    return code;
}
