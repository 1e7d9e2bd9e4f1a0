/*
 * `cachectl status`: the daemon on one screen of 80 columns.
 *
 * One call, GetStats.  What changes how every other number is to be read is shouted: a SYNTHETIC
 * backend (no model is run) and a virtual clock (time passes only when told to).
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/stats.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

struct outcomes {
    double exact, replay, miss;
    double requested_tokens, hit_tokens, replayed_tokens;
};

static struct outcomes outcomes_of(const Cached__Admin__V1__GetStatsResponse *stats)
{
    return (struct outcomes){
        .exact = stats_sum(stats, "cached_resumes_total", "outcome=\"exact\""),
        .replay = stats_sum(stats, "cached_resumes_total", "outcome=\"replay\""),
        .miss = stats_sum(stats, "cached_resumes_total", "outcome=\"miss\""),
        .requested_tokens = stats_sum(stats, "cached_requested_tokens_total", NULL),
        .hit_tokens = stats_sum(stats, "cached_hit_tokens_total", NULL),
        .replayed_tokens = stats_sum(stats, "cached_replayed_tokens_total", NULL),
    };
}

static double ratio(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

static bool is_synthetic(const Cached__Admin__V1__GetStatsResponse *stats)
{
    return strcmp(stats->engine_backend, "SYNTHETIC") == 0;
}

static bool is_virtual(const Cached__Admin__V1__GetStatsResponse *stats)
{
    return strcmp(stats->clock_mode, "virtual") == 0;
}

static double engine_speed(const Cached__Admin__V1__GetStatsResponse *s, const char *kind)
{
    return stats_sum(s, "cached_engine_tokens_per_second", kind);
}

static double evicted(const Cached__Admin__V1__GetStatsResponse *s, const char *cause)
{
    char labels[64];
    (void)snprintf(labels, sizeof(labels), "tier=\"ssd\",cause=\"%s\"", cause);
    return stats_sum(s, "cached_evictions_total", labels);
}

/* Whose labels say under which master key: NULL where nothing is encrypted. */
static const char *master_key(const Cached__Admin__V1__GetStatsResponse *s,
                              char text[OUT_TEXT_BYTES])
{
    static const char label[] = "master_key=\"";
    for (size_t i = 0; i < s->n_counters; i++) {
        if (strcmp(s->counters[i]->name, "cached_encryption_keys") != 0) continue;
        const char *found = strstr(s->counters[i]->labels, label);
        if (found == NULL) return NULL;
        found += sizeof(label) - 1;
        (void)snprintf(text, OUT_TEXT_BYTES, "%.*s", (int)strcspn(found, "\""), found);
        return text;
    }
    return NULL;
}

static int print_json(const Cached__Admin__V1__GetStatsResponse *s)
{
    const struct outcomes o = outcomes_of(s);
    json_t *tiers = json_array();
    char fingerprint[OUT_TEXT_BYTES], key_text[OUT_TEXT_BYTES];
    const char *key = master_key(s, key_text);

    for (size_t i = 0; i < s->n_tiers; i++) {
        const Cached__Admin__V1__TierStats *t = s->tiers[i];
        (void)json_array_append_new(
            tiers, json_pack("{s:s, s:I, s:I, s:I, s:I, s:s}", "name", t->name, "bytes_used",
                             (json_int_t)t->bytes_used, "bytes_capacity",
                             (json_int_t)t->bytes_capacity, "items_used", (json_int_t)t->items_used,
                             "items_capacity", (json_int_t)t->items_capacity, "note", t->note));
    }
    (void)out_hex(fingerprint, s->model_fingerprint.data, KV_MIN(s->model_fingerprint.len, 8));
    json_t *daemon =
        json_pack("{s:s, s:s, s:I, s:I, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:I}",
                  "version", s->version, "commit", s->commit, "uptime_ms", (json_int_t)s->uptime_ms,
                  "pid", (json_int_t)s->pid, "model", s->model_name, "fingerprint", fingerprint,
                  "backend", s->engine_backend, "isa", s->engine_isa, "kernels", s->engine_family,
                  "io_backend", s->io_backend, "clock_mode", s->clock_mode, "health", s->health,
                  "start_phase", s->start_phase, "start_percent", (json_int_t)s->start_percent);
    json_t *sessions = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f}", "known", (json_int_t)s->sessions, "live",
        (json_int_t)s->sessions_live, "checkpoints", (json_int_t)s->checkpoints, "recovered",
        (json_int_t)s->recovered_checkpoints, "dropped", (json_int_t)s->dropped_checkpoints,
        "lost_batches", stats_sum(s, "cached_lost_batches", NULL), "recovered_bytes",
        stats_sum(s, "cached_start_recovered", "what=\"bytes\""), "dropped_bytes",
        stats_sum(s, "cached_start_dropped", "what=\"bytes\""));
    json_t *resumes = json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "exact", o.exact, "replay",
                                o.replay, "miss", o.miss, "requested_tokens", o.requested_tokens,
                                "hit_tokens", o.hit_tokens, "replayed_tokens", o.replayed_tokens,
                                "hit_ratio", ratio(o.hit_tokens, o.requested_tokens));
    json_t *engine =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "prefill_tokens_per_second",
                  engine_speed(s, "prefill"), "replay_tokens_per_second", engine_speed(s, "replay"),
                  "decode_tokens_per_second", engine_speed(s, "decode"), "passes",
                  stats_sum(s, "cached_engine_passes_total", NULL), "pass_rows_mean",
                  stats_sum(s, "cached_engine_pass_rows", "mean"), "pass_rows_max",
                  stats_sum(s, "cached_engine_pass_rows", "max"), "pass_sessions_mean",
                  stats_sum(s, "cached_engine_pass_sessions", "mean"), "drafts_accepted",
                  stats_sum(s, "cached_engine_drafts_total", "accepted"), "drafts_refused",
                  stats_sum(s, "cached_engine_drafts_total", "refused"));
    json_t *space = json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "evicted_capacity",
                              evicted(s, "capacity"), "evicted_expired", evicted(s, "expired"),
                              "evicted_corrupt", evicted(s, "corrupt"), "freed_bytes",
                              stats_sum(s, "cached_evicted_bytes_total", NULL), "saves_waited",
                              stats_sum(s, "cached_saves_waited_total", NULL), "saves_refused",
                              stats_sum(s, "cached_saves_refused_total", NULL), "limit_bytes",
                              stats_sum(s, "cached_ssd_limit_bytes", NULL));
    json_t *encryption = json_pack(
        "{s:b, s:s, s:f, s:f, s:f}", "on", stats_sum(s, "cached_encryption_on", NULL) > 0,
        "master_key", key == NULL ? "" : key, "keys", stats_sum(s, "cached_encryption_keys", NULL),
        "pages_encrypted", stats_sum(s, "cached_pages_encrypted_total", NULL), "pages_read_plain",
        stats_sum(s, "cached_pages_read_plain_total", NULL));
    json_t *memory = json_pack("{s:I, s:I}", "rss_bytes", (json_int_t)s->rss_bytes,
                               "rss_budget_bytes", (json_int_t)s->rss_budget_bytes);
    return out_json_take(json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:I, s:I, s:f}", "daemon", daemon,
        "tiers", tiers, "engine", engine, "sessions", sessions, "resumes", resumes, "space", space,
        "encryption", encryption, "memory", memory, "requests_inflight",
        (json_int_t)s->requests_inflight, "wrong_bytes", (json_int_t)s->wrong_bytes, "page_bytes",
        (json_int_t)s->page_bytes, "image_bytes", (json_int_t)s->image_bytes, "bytes_per_token",
        s->bytes_per_token));
}

static void print_tier(const struct ctl *ctl, const Cached__Admin__V1__TierStats *tier, bool first,
                       bool serving)
{
    enum { BAR = 20 };
    char bar[BAR + 1];
    char used[OUT_TEXT_BYTES], capacity[OUT_TEXT_BYTES];

    const double part = ratio((double)tier->bytes_used, (double)tier->bytes_capacity);
    int filled = (int)(KV_MIN(part, 1.0) * BAR + 0.5);
    if (filled == 0 && tier->bytes_used > 0) filled = 1;
    for (int i = 0; i < BAR; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[BAR] = '\0';
    (void)printf("%-9s %-5s [%s] %9s of %-9s %3.0f %%  %" PRIu64 " of %" PRIu64 "\n",
                 first ? "tiers" : "", tier->name, bar, out_bytes(used, tier->bytes_used),
                 out_bytes(capacity, tier->bytes_capacity), part * 100, tier->items_used,
                 tier->items_capacity);
    /* Of a healthy daemon the notes say what a tier is, which its operator knows. */
    if (serving || tier->note[0] == '\0') return;
    (void)printf("%-9s %-5s %s%s%s\n", "", "", ctl_yellow(ctl), tier->note, ctl_plain(ctl));
}

/* Which calls move pages, and what the kernel has been told of them. */
static void print_io(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *s)
{
    char used[OUT_TEXT_BYTES], given[OUT_TEXT_BYTES];
    const double registered = stats_sum(s, "cached_io_memory_bytes", "registered");
    const double refused = stats_sum(s, "cached_io_memory_refused_errno", NULL);

    (void)printf("%-9s %s", "io", s->io_backend);
    if (strcmp(s->io_backend, "io_uring") == 0)
        (void)printf(", %s of %s of memory registered%s", out_bytes(used, (uint64_t)registered),
                     out_bytes(given, (uint64_t)stats_sum(s, "cached_io_memory_bytes", "given")),
                     refused > 0 ? "" : " (as it is used)");
    if (refused > 0)
        (void)printf("; %sthe kernel refuses more: errno %.0f%s", ctl_yellow(ctl), refused,
                     ctl_plain(ctl));
    (void)printf("\n");
}

static void print_encryption(const Cached__Admin__V1__GetStatsResponse *s)
{
    char text[OUT_TEXT_BYTES];
    const char *key = master_key(s, text);
    const bool on = stats_sum(s, "cached_encryption_on", NULL) > 0;
    (void)printf("%-9s %s", "encrypted", on ? "yes" : key == NULL ? "no" : "no more");
    if (key != NULL)
        (void)printf(", master key %s, %.0f keys of users%s", key,
                     stats_sum(s, "cached_encryption_keys", NULL),
                     on ? "" : "; pages from before stay encrypted");
    (void)printf("\n");
}

static void print_head(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *s)
{
    char uptime[OUT_TEXT_BYTES], fingerprint[OUT_TEXT_BYTES];
    const bool serving = strcmp(s->health, "serving") == 0;

    (void)printf("%scached %s%s  commit %.12s  pid %" PRIu64 "  up %s\n", ctl_bold(ctl), s->version,
                 ctl_plain(ctl), s->commit, s->pid, out_duration(uptime, s->uptime_ms));
    (void)printf("%-9s %s%s%s\n", "health", serving ? ctl_green(ctl) : ctl_red(ctl), s->health,
                 ctl_plain(ctl));
    (void)printf(
        "%-9s %s  fingerprint %s  %g B/token\n", "model", s->model_name,
        out_hex(fingerprint, s->model_fingerprint.data, KV_MIN(s->model_fingerprint.len, 8)),
        s->bytes_per_token);
    if (is_synthetic(s)) {
        (void)printf("%-9s %sSYNTHETIC: no model is run, tokens mean nothing, bytes are checked "
                     "(%" PRIu64 " wrong)%s\n",
                     "backend", ctl_red(ctl), s->wrong_bytes, ctl_plain(ctl));
    } else {
        (void)printf("%-9s %s, instructions %s, kernels %s\n", "backend", s->engine_backend,
                     s->engine_isa, s->engine_family);
    }
    if (is_virtual(s)) {
        (void)printf("%-9s %sVIRTUAL: time passes only by AdvanceClock%s\n", "clock",
                     ctl_yellow(ctl), ctl_plain(ctl));
    } else {
        (void)printf("%-9s %s\n", "clock", s->clock_mode);
    }
    print_io(ctl, s);
    print_encryption(s);
}

static void print_engine(const Cached__Admin__V1__GetStatsResponse *s)
{
    const double accepted = stats_sum(s, "cached_engine_drafts_total", "accepted");
    const double drafts = accepted + stats_sum(s, "cached_engine_drafts_total", "refused");
    (void)printf("%-9s prefill %.0f, replay %.0f, decode %.0f tokens/s\n", "engine",
                 engine_speed(s, "prefill"), engine_speed(s, "replay"), engine_speed(s, "decode"));
    (void)printf("%-9s %.1f rows (encoder + decoder) of %.1f sessions, at most %.0f", "passes",
                 stats_sum(s, "cached_engine_pass_rows", "mean"),
                 stats_sum(s, "cached_engine_pass_sessions", "mean"),
                 stats_sum(s, "cached_engine_pass_rows", "max"));
    if (drafts > 0) (void)printf("; %.0f %% of drafts accepted", 100 * ratio(accepted, drafts));
    (void)putchar('\n');
}

static void print_evictions(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *s)
{
    char bytes[OUT_TEXT_BYTES];
    const double freed = stats_sum(s, "cached_evicted_bytes_total", NULL);
    const double refused = stats_sum(s, "cached_saves_refused_total", NULL);
    (void)printf("%-9s from SSD %.0f for capacity, %.0f expired, %.0f corrupt; %s freed", "evicted",
                 evicted(s, "capacity"), evicted(s, "expired"), evicted(s, "corrupt"),
                 out_bytes(bytes, (uint64_t)freed));
    if (refused > 0)
        (void)printf("; %s%.0f saves refused%s", ctl_red(ctl), refused, ctl_plain(ctl));
    (void)putchar('\n');
}

static void print_starting(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *s)
{
    char uptime[OUT_TEXT_BYTES];
    (void)printf("%scached %s%s  commit %.12s  pid %" PRIu64 "  up %s\n", ctl_bold(ctl), s->version,
                 ctl_plain(ctl), s->commit, s->pid, out_duration(uptime, s->uptime_ms));
    (void)printf("%-9s %s%s%s\n", "health", ctl_yellow(ctl), s->health, ctl_plain(ctl));
}

static void print_recovery(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *s)
{
    static const struct {
        const char *label, *text;
    } causes[] = {
        {"what=\"checkpoints\",cause=\"place_gone\"", "need pages that are gone"},
        {"what=\"checkpoints\",cause=\"record_damaged\"", "had a damaged record"},
        {"what=\"checkpoints\",cause=\"session_unknown\"", "are of sessions without a record"},
        {"what=\"sessions\"", "sessions had a damaged record"},
    };
    char bytes[OUT_TEXT_BYTES];
    const double recovered = stats_sum(s, "cached_start_recovered", "what=\"bytes\"");
    (void)printf("%-9s %" PRIu64 " checkpoints recovered (%s), %" PRIu64 " dropped%s\n", "at start",
                 s->recovered_checkpoints, out_bytes(bytes, (uint64_t)recovered),
                 s->dropped_checkpoints,
                 stats_sum(s, "cached_start_trees_read", NULL) > 0 ? "; all trees were read" : "");
    for (size_t i = 0; i < KV_ARRAY_COUNT(causes); i++) {
        const double count = stats_sum(s, "cached_start_dropped", causes[i].label);
        if (count > 0)
            (void)printf("%-9s %s%.0f %s%s\n", "", ctl_yellow(ctl), count, causes[i].text,
                         ctl_plain(ctl));
    }
}

static void print_screen(const struct ctl *ctl, const Cached__Admin__V1__GetStatsResponse *s)
{
    char rss[OUT_TEXT_BYTES], budget[OUT_TEXT_BYTES];
    const struct outcomes o = outcomes_of(s);
    const bool over = s->rss_bytes > s->rss_budget_bytes;
    const double lost = stats_sum(s, "cached_lost_batches", NULL);

    if (s->start_phase[0] != '\0') {
        print_starting(ctl, s);
        return;
    }
    print_head(ctl, s);
    for (size_t i = 0; i < s->n_tiers; i++)
        print_tier(ctl, s->tiers[i], i == 0, strcmp(s->health, "serving") == 0);
    (void)printf("%-9s %" PRIu64 " known, %" PRIu64 " live, %" PRIu64 " checkpoints\n", "sessions",
                 s->sessions, s->sessions_live, s->checkpoints);
    print_recovery(ctl, s);
    if (lost > 0)
        (void)printf("%-9s %s%.0f batches of acknowledged records, before this start%s\n", "lost",
                     ctl_red(ctl), lost, ctl_plain(ctl));
    (void)printf("%-9s %.0f EXACT, %.0f REPLAY, %.0f MISS\n", "resumes", o.exact, o.replay, o.miss);
    (void)printf("%-9s %.1f %% of %.0f prompt tokens were hits, %.0f replayed\n", "tokens",
                 100 * ratio(o.hit_tokens, o.requested_tokens), o.requested_tokens,
                 o.replayed_tokens);
    print_evictions(ctl, s);
    print_engine(s);
    (void)printf("%-9s %sRSS %s of a budget of %s%s\n", "memory", over ? ctl_red(ctl) : "",
                 out_bytes(rss, s->rss_bytes), out_bytes(budget, s->rss_budget_bytes),
                 over ? ctl_plain(ctl) : "");
    (void)printf("%-9s %" PRIu64
                 " in flight, %.0f of them waiting for a live session; %.0f failed, "
                 "%.0f refused at a full queue\n",
                 "requests", s->requests_inflight, stats_sum(s, "cached_live_waiting", NULL),
                 stats_sum(s, "cached_failed_requests_total", NULL),
                 stats_sum(s, "cached_live_refused_total", NULL));
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    return stats_run(ctl, command, argc, argv, print_json, print_screen);
}

const struct command command_status = {
    .name = "status",
    .arguments = "",
    .summary = "the daemon on one screen",
    .details = "Needs a token with role ops or stats.",
    .example = "cachectl status",
    .run = run,
};
