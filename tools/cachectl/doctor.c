/*
 * `cachectl doctor`: what is wrong with this installation, and the fix in the same line.
 *
 * Local checks always run; with a daemon that answers, its own configuration says which directories
 * to look at, and its numbers are judged too.  A daemon that does not answer is one failed line,
 * not the end: that is when the others are needed most.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/doctor_local.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/stats.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

struct facts {
    Cached__Admin__V1__GetStatsResponse *stats;   /* NULL: not known. */
    Cached__Admin__V1__GetConfigResponse *config; /* NULL: not known. */
};

/* NULL: not known, or empty. */
static const char *config_value(const struct facts *facts, const char *key)
{
    for (size_t i = 0; facts->config && i < facts->config->n_items; i++) {
        const Cached__Admin__V1__ConfigItem *item = facts->config->items[i];
        if (strcmp(item->key, key) == 0 && item->value[0] != '\0') return item->value;
    }
    return NULL;
}

static void add_failure(struct doctor *doctor, const char *name,
                        const struct client_failure *failure)
{
    char text[640];
    const char *fix = "look at the daemon's log";

    client_failure_print(failure, text, sizeof(text));
    if (failure->code == CLIENT_UNAVAILABLE) fix = "start cached, or correct --endpoint";
    if (client_exit_code(failure->code) == CLIENT_EXIT_DENIED) {
        fix = "use a token with role ops or stats, which may read statistics and configuration";
    }
    doctor_add(doctor, name, DOCTOR_FAIL, fix, "%s", text);
}

static void judge_stats(struct doctor *doctor, const Cached__Admin__V1__GetStatsResponse *stats)
{
    char rss[OUT_TEXT_BYTES], budget[OUT_TEXT_BYTES];
    const bool synthetic = strcmp(stats->engine_backend, "SYNTHETIC") == 0;
    const bool is_virtual = strcmp(stats->clock_mode, "virtual") == 0;

    doctor_add(doctor, "backend", synthetic ? DOCTOR_WARN : DOCTOR_OK,
               "for answers that mean something, run with a model",
               synthetic ? "%s: no model is run" : "%s, instructions %s, kernels %s",
               stats->engine_backend, stats->engine_isa, stats->engine_family);
    const double refused = stats_sum(stats, "cached_io_memory_refused_errno", NULL);
    doctor_add(doctor, "io", refused > 0 ? DOCTOR_WARN : DOCTOR_OK,
               "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
               refused > 0 ? "pages move by %s; the kernel registers no more memory for it (errno "
                             "%.0f)"
                           : "pages move by %s",
               stats->io_backend, refused);
    if (is_virtual) {
        doctor_add(doctor, "clock mode", DOCTOR_WARN,
                   "set clock.mode = real; virtual is for replays, demos and tests",
                   "virtual: nothing ever expires by itself");
    }
    const double unlocked = stats_sum(stats, "cached_encryption_unlocked_errno", NULL);
    const bool encrypts = stats_sum(stats, "cached_encryption_on", NULL) > 0;
    doctor_add(doctor, "encryption", unlocked > 0 ? DOCTOR_WARN : DOCTOR_OK,
               "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
               unlocked > 0 ? "%s; keys may be swapped out (errno %.0f)" : "%s",
               encrypts ? "new pages on SSD are encrypted; a scrub counts those from before"
                        : "new pages on SSD are not encrypted",
               unlocked);
    doctor_add(doctor, "memory",
               stats->rss_bytes > stats->rss_budget_bytes ? DOCTOR_WARN : DOCTOR_OK,
               "report it with `cachectl stats --json`: memory should follow from the budgets",
               "RSS %s of a budget of %s", out_bytes(rss, stats->rss_bytes),
               out_bytes(budget, stats->rss_budget_bytes));
    doctor_add(doctor, "recovery", stats->dropped_checkpoints > 0 ? DOCTOR_WARN : DOCTOR_OK,
               "the log of the start names the cause of each",
               "%llu checkpoints recovered, %llu dropped at start",
               (unsigned long long)stats->recovered_checkpoints,
               (unsigned long long)stats->dropped_checkpoints);
    if (stats->wrong_bytes > 0) {
        doctor_add(doctor, "bytes", DOCTOR_FAIL, "stop the daemon, check the disk, report it",
                   "%llu bytes came back different", (unsigned long long)stats->wrong_bytes);
    }
}

static void ask_daemon(struct ctl *ctl, struct doctor *doctor, struct facts *facts)
{
    Cached__Admin__V1__GetStatsRequest stats = CACHED__ADMIN__V1__GET_STATS_REQUEST__INIT;
    Cached__Admin__V1__GetConfigRequest config = CACHED__ADMIN__V1__GET_CONFIG_REQUEST__INIT;
    struct client_failure failure;
    struct client *client = NULL;
    bool serving = false;

    if (ctl_connect(ctl, &client) != 0) {
        doctor_add(doctor, "daemon", DOCTOR_FAIL, "correct the endpoint and the token file",
                   "cannot open a channel to %s", ctl->endpoint);
        return;
    }
    if (!client_health(client, "", &serving, &failure)) {
        add_failure(doctor, "daemon", &failure);
    } else if (!client_call(client, CLIENT_GET_STATS, &stats.base, &facts->stats, &failure)) {
        add_failure(doctor, "daemon", &failure);
    } else {
        doctor_add(doctor, "daemon", serving ? DOCTOR_OK : DOCTOR_FAIL,
                   "the sentence says what to repair", "answers at %s: %s", ctl->endpoint,
                   facts->stats->health);
        if (facts->stats->start_phase[0] == '\0') judge_stats(doctor, facts->stats);
    }
    if (facts->stats &&
        !client_call(client, CLIENT_GET_CONFIG, &config.base, &facts->config, &failure)) {
        add_failure(doctor, "config", &failure);
    }
    client_destroy(client);
}

static int print_json(const struct doctor *doctor, bool failed)
{
    static const char *const states[] = {"ok", "warn", "fail"};
    json_t *list = json_array();

    for (size_t i = 0; i < doctor->count; i++) {
        const struct doctor_line *line = &doctor->lines[i];
        (void)json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "name", line->name,
                                                    "state", states[line->state], "found",
                                                    line->found, "fix", line->fix));
    }
    const int code = out_json_take(json_pack("{s:o}", "checks", list));
    return code == 0 && failed ? CLIENT_EXIT_FAILED : code;
}

static int print(const struct ctl *ctl, const struct doctor *doctor)
{
    const char *const words[] = {"ok", "warn", "fail"};
    const char *const colors[] = {ctl_green(ctl), ctl_yellow(ctl), ctl_red(ctl)};
    bool failed = false;

    for (size_t i = 0; i < doctor->count; i++)
        failed = failed || doctor->lines[i].state == DOCTOR_FAIL;
    if (ctl->json) return print_json(doctor, failed);
    for (size_t i = 0; i < doctor->count; i++) {
        const struct doctor_line *line = &doctor->lines[i];
        const char *gap = ctl->terminal ? " " : "\t";
        (void)printf("%s%-*s%s%s%-*s%s%s%s%s\n", colors[line->state], ctl->terminal ? 4 : 0,
                     words[line->state], ctl_plain(ctl), gap, ctl->terminal ? 10 : 0, line->name,
                     gap, line->found, line->fix[0] ? (ctl->terminal ? "; fix: " : "\t") : "",
                     line->fix);
    }
    return failed ? CLIENT_EXIT_FAILED : CLIENT_EXIT_OK;
}

static void check_state_dir(struct doctor *doctor, const char *state_dir, uint64_t growth_bytes)
{
    static const char fix[] = "give --state-dir DIR, or a token of role ops or stats";
    if (state_dir == NULL) {
        doctor_add(doctor, "O_DIRECT", DOCTOR_WARN, fix, "state directory not known");
        doctor_add(doctor, "space", DOCTOR_WARN, fix, "state directory not known");
        return;
    }
    if (doctor_check_direct(doctor, state_dir)) doctor_check_space(doctor, state_dir, growth_bytes);
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    const char *state_dir = NULL;
    const char *model_dir = NULL;
    struct doctor doctor = {.count = 0};
    struct facts facts = {NULL, NULL};
    uint64_t growth_bytes = 0;
    int code = 0;

    const struct arg args[] = {
        {"--state-dir", ARG_TEXT, "DIR", "instead of the daemon's own", &state_dir},
        {"--model-dir", ARG_TEXT, "DIR", "instead of the daemon's own", &model_dir},
    };
    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;

    ask_daemon(ctl, &doctor, &facts);
    if (!state_dir) state_dir = config_value(&facts, "state.dir");
    if (!model_dir) model_dir = config_value(&facts, "engine.model_dir");
    for (size_t i = 0; facts.stats && i < facts.stats->n_tiers; i++) {
        const Cached__Admin__V1__TierStats *tier = facts.stats->tiers[i];
        if (strcmp(tier->name, "ssd") != 0 || tier->bytes_used > tier->bytes_capacity) continue;
        growth_bytes = tier->bytes_capacity - tier->bytes_used;
    }
    doctor_check_token(&doctor, ctl->token_file);
    doctor_check_io_uring(&doctor);
    check_state_dir(&doctor, state_dir, growth_bytes);
    doctor_check_memlock(&doctor, facts.stats ? facts.stats->pid : 0);
    /* The synthetic backend needs no model. */
    if (model_dir || !facts.stats || strcmp(facts.stats->engine_backend, "SYNTHETIC") != 0) {
        doctor_check_model(&doctor, model_dir);
    }
    doctor_check_clock(&doctor);

    code = print(ctl, &doctor);
    client_free(facts.stats);
    client_free(facts.config);
    return code;
}

const struct command command_doctor = {
    .name = "doctor",
    .arguments = "",
    .summary = "what is wrong here, and how to repair it",
    .details =
        "One line a check: ok, warn or fail, what was found, and the fix.  Exits 1 if any\n"
        "check failed.  Needs a token with role ops or stats to see the daemon's directories.",
    .example = "cachectl doctor --json",
    .run = run,
};
