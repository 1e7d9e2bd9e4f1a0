/*
 * `cachectl bench decode` and `bench batch-replay`: what many sessions gain by sharing passes.
 *
 * decode        16 sessions, one token each a pass, beside one session alone.
 * batch-replay  16 sessions whose windows are gone come back together: beside a prompt of as many
 *               tokens through all layers (the same work), the same through CED (the decoder then
 *               sees one window instead of sixteen), and the sessions one by one.  With --quick on
 *               a slow machine it is fewer sessions, which is said.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/bench_list.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SESSIONS = 16, CONTEXT = 1024 };
#define QUICK_SECONDS 40.0 /* Of pairs, within the minute of --quick. */

struct crowd {
    struct eng_model *model;
    struct bench_session sessions[SESSIONS];
    struct bench_session *all[SESSIONS];
    uint32_t *ids[SESSIONS]; /* CONTEXT + room */
    uint32_t count;          /* Sessions of a replay. */
    uint32_t room, tokens_each;
    double prefill_seconds;        /* Of CONTEXT tokens through CED. */
    struct bench_session long_one; /* A prompt of SESSIONS windows. */
    struct bench_session *long_list[1];
    uint32_t *long_ids;
    uint32_t long_tokens;
};

/* alike: the rows of all sessions are the first one's, which saves their prefills.  Every run puts
 * a session's windows back from its own tokens, so what is decoded or replayed is of its own. */
static bool crowd_init(struct crowd *own, struct eng_model *model, uint32_t room, bool alike,
                       struct bench_progress *progress)
{
    *own = (struct crowd){.model = model, .room = room, .count = SESSIONS};
    progress->doing = "filling the sessions";
    for (uint32_t i = 0; i < SESSIONS; i++) {
        own->ids[i] = calloc(CONTEXT + room, sizeof(uint32_t));
        own->all[i] = &own->sessions[i];
        if (own->ids[i] == NULL) {
            ctl_error("out of memory");
            return false;
        }
        bench_ids(model, i + 1, own->ids[i], CONTEXT + room);
        if (!bench_session_init(&own->sessions[i], model, CONTEXT + room, false, progress))
            return false;
        if (i > 0 && alike) {
            bench_session_copy(&own->sessions[i], &own->sessions[0]);
            continue;
        }
        const double began = bench_now();
        eng_prefill_begin(own->sessions[i].session, own->ids[i], 0, CONTEXT);
        if (!bench_finish_runs(&own->all[i], 1)) return false;
        own->prefill_seconds = bench_now() - began;
    }
    return true;
}

static void crowd_fini(struct crowd *own)
{
    for (uint32_t i = 0; i < SESSIONS; i++) {
        bench_session_fini(&own->sessions[i]);
        free(own->ids[i]);
    }
    bench_session_fini(&own->long_one);
    free(own->long_ids);
}

/* `count` sessions decode tokens_each tokens from CONTEXT on, and are put back. */
static bool decode(struct crowd *own, uint32_t count, double *ret_seconds)
{
    for (uint32_t i = 0; i < count; i++) {
        struct eng_session *session = own->sessions[i].session;
        eng_session_rows_only(session, own->ids[i], CONTEXT);
        eng_prefill_begin(session, own->ids[i],
                          CONTEXT - eng_model_layout(own->model)->window_tokens, CONTEXT + 1);
    }
    if (!bench_finish_runs(own->all, count)) return false;
    const double began = bench_now();
    for (uint32_t step = 0; step < own->tokens_each; step++) {
        for (uint32_t i = 0; i < count; i++)
            eng_tokens_begin(own->sessions[i].session, &own->ids[i][CONTEXT + 1 + step], 1);
        if (!bench_finish_runs(own->all, count)) return false;
    }
    *ret_seconds = bench_now() - began;
    return true;
}

static bool run_many(void *context, double *ret_seconds)
{
    return decode(context, SESSIONS, ret_seconds);
}

static bool run_four(void *context, double *ret_seconds)
{
    return decode(context, 4, ret_seconds);
}

static bool run_one(void *context, double *ret_seconds)
{
    return decode(context, 1, ret_seconds);
}

int bench_decode(struct bench_progress *progress, const struct bench_engine_options *options)
{
    const uint32_t tokens = options->quick ? 8 : 48, rounds = options->quick ? 5 : 9;
    struct bench_pairs pairs[2] = {
        {.what = "16 sessions decode", .anchor = "1 session", .target = 3.0, .at_least = true},
        {.what = "4 sessions decode", .anchor = "1 session"}};
    struct crowd crowd = {0};
    struct bench_model_dir dir;

    if (options->quick) bench_quick(progress, KV_ARRAY_COUNT(pairs));
    int code = bench_model_dir_make(progress, options, &dir);
    struct eng_model *model =
        code == 0 ? bench_model_open(&dir, (uint32_t)options->threads, false) : NULL;
    if (code == 0 &&
        (model == NULL || !crowd_init(&crowd, model, tokens + 2, options->quick, progress)))
        code = CLIENT_EXIT_FAILED;
    crowd.tokens_each = tokens;
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(pairs) && code == 0; i++) {
        pairs[i].speed = true;
        pairs[i].anchor_unit = tokens;
        pairs[i].unit = tokens * (i == 0 ? SESSIONS : 4);
        code = bench_pairs_measure(progress, &pairs[i], rounds, i == 0 ? run_many : run_four,
                                   &crowd, run_one, &crowd);
    }
    if (code == 0)
        code = bench_pairs_report(progress->ctl, "decode", pairs, KV_ARRAY_COUNT(pairs),
                                  json_pack("{s:s, s:I}", "kernels", eng_model_family(model),
                                            "context", (json_int_t)CONTEXT));
    crowd_fini(&crowd);
    eng_model_close(model);
    bench_model_dir_drop(&dir);
    return code;
}

static void begin_replay(struct crowd *own, uint32_t i)
{
    const uint32_t window = eng_model_layout(own->model)->window_tokens;
    eng_session_rows_only(own->sessions[i].session, own->ids[i], CONTEXT);
    eng_prefill_begin(own->sessions[i].session, own->ids[i], CONTEXT - window, CONTEXT + 1);
}

static bool run_together(void *context, double *ret_seconds)
{
    struct crowd *own = context;
    const double began = bench_now();
    for (uint32_t i = 0; i < own->count; i++)
        begin_replay(own, i);
    if (!bench_finish_runs(own->all, own->count)) return false;
    *ret_seconds = bench_now() - began;
    return true;
}

static bool run_one_by_one(void *context, double *ret_seconds)
{
    struct crowd *own = context;
    const double began = bench_now();
    for (uint32_t i = 0; i < own->count; i++) {
        begin_replay(own, i);
        if (!bench_finish_runs(&own->all[i], 1)) return false;
    }
    *ret_seconds = bench_now() - began;
    return true;
}

static bool run_long(void *context, double *ret_seconds)
{
    struct crowd *own = context;
    bench_session_reset(&own->long_one);
    const double began = bench_now();
    eng_prefill_begin(own->long_one.session, own->long_ids, 0, own->long_tokens);
    if (!bench_finish_runs(own->long_list, 1)) return false;
    *ret_seconds = bench_now() - began;
    return true;
}

static bool add_long(struct crowd *own, struct eng_model *model, bool all_layers,
                     struct bench_progress *progress)
{
    own->long_tokens = own->count * eng_model_layout(model)->window_tokens;
    own->long_ids = calloc(own->long_tokens, sizeof(uint32_t));
    own->long_list[0] = &own->long_one;
    if (own->long_ids == NULL) return false;
    bench_ids(model, 99, own->long_ids, own->long_tokens);
    return bench_session_init(&own->long_one, model, own->long_tokens, all_layers, progress);
}

static int measure_replays(struct bench_progress *progress, struct crowd *crowd,
                           struct crowd *other, uint32_t rounds, struct bench_pairs pairs[3])
{
    static const char *const layers[] = {"all layers", "CED"};
    const bench_run runs[] = {run_long, run_long, run_one_by_one};
    void *const contexts[] = {other, crowd, crowd};
    const double targets[] = {0.9, 0.9, 1.0};
    int code = CLIENT_EXIT_OK;

    for (uint32_t i = 0; i < 3 && code == 0; i++) {
        pairs[i] = (struct bench_pairs){.anchor = "one by one",
                                        .target = crowd->count == SESSIONS ? targets[i] : 0,
                                        .at_least = true,
                                        .speed = true,
                                        .unit = crowd->long_tokens + crowd->count,
                                        .anchor_unit = crowd->long_tokens};
        (void)snprintf(pairs[i].what, sizeof(pairs[i].what), "%u replays together", crowd->count);
        if (i == 2)
            pairs[i].anchor_unit = pairs[i].unit;
        else
            (void)snprintf(pairs[i].anchor, sizeof(pairs[i].anchor), "one prompt of %u windows, %s",
                           crowd->count, layers[i]);
        code = bench_pairs_measure(progress, &pairs[i], rounds, run_together, crowd, runs[i],
                                   contexts[i]);
    }
    return code;
}

/* As many sessions as three pairs of each comparison leave time for: 16, or a half, a quarter or an
 * eighth of them. */
static uint32_t sessions_within(const struct crowd *crowd, double seconds)
{
    const uint32_t window = eng_model_layout(crowd->model)->window_tokens;
    /* Nearly half of a prompt's layers are left out under CED, and 17 times the sessions' windows
     * cross all layers. */
    const double each = 17 * window * crowd->prefill_seconds / (0.55 * CONTEXT);
    uint32_t count = SESSIONS;
    while (count > 2 && count * each > seconds)
        count /= 2;
    return count;
}

static json_t *replay_facts(const struct eng_model *model, uint32_t count)
{
    json_t *facts =
        json_pack("{s:s, s:s}", "kernels", eng_model_family(model), "note",
                  "a replay's rows cross the decoder, those of a prompt under CED do not");
    if (count < SESSIONS)
        (void)json_object_set_new(
            facts, "sessions",
            json_sprintf("%u, for what %d take would not be done within a minute here; the targets "
                         "are of %d",
                         count, SESSIONS, SESSIONS));
    return facts;
}

int bench_batch_replay(struct bench_progress *progress, const struct bench_engine_options *options)
{
    struct bench_pairs pairs[3];
    struct crowd crowd = {0}, other = {0};
    struct bench_model_dir dir;

    if (options->quick) bench_quick(progress, KV_ARRAY_COUNT(pairs));
    int code = bench_model_dir_make(progress, options, &dir);
    struct eng_model *model = NULL, *every = NULL;
    if (code == 0) {
        model = bench_model_open(&dir, (uint32_t)options->threads, false);
        every = bench_model_open(&dir, (uint32_t)options->threads, true);
    }
    if (code == 0 &&
        (model == NULL || every == NULL || !crowd_init(&crowd, model, 8, options->quick, progress)))
        code = CLIENT_EXIT_FAILED;
    if (code == 0 && options->quick) crowd.count = sessions_within(&crowd, QUICK_SECONDS);
    other.count = crowd.count;
    if (code == 0 &&
        (!add_long(&crowd, model, false, progress) || !add_long(&other, every, true, progress)))
        code = CLIENT_EXIT_FAILED;
    if (code == 0) code = measure_replays(progress, &crowd, &other, options->quick ? 3 : 7, pairs);
    if (code == 0)
        code = bench_pairs_report(progress->ctl, "batch-replay", pairs, KV_ARRAY_COUNT(pairs),
                                  replay_facts(model, crowd.count));
    crowd_fini(&crowd);
    crowd_fini(&other);
    eng_model_close(model);
    eng_model_close(every);
    bench_model_dir_drop(&dir);
    return code;
}
