/*
 * `cachectl bench draft`: what drafting does to the speed of one session, over the daemon.
 *
 * Two daemons on the same model, one with engine.draft = auto and one with off, decode the same
 * session in turn.  On random weights drafts are hardly ever right, so drafting must get out of the
 * way; on a bigram model they always are, so it must pay.  The tokens of both are compared:
 * drafting may change the speed and nothing else.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/spawn.h"
#include "tools/cachectl/turns.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SESSION "bench"
enum { PROMPT = 256, TOKENS_MAX = 512 };

/* One daemon with one session.  Owned by: measure_model(). */
struct side {
    struct spawn spawn;
    bool spawned;
    struct client *client;
    struct bench_progress *progress;
    uint32_t count; /* Tokens of one run. */
    uint32_t tokens[TOKENS_MAX];
};

struct model_case {
    const char *what;
    const char *flag; /* Of mkmodel. */
    double target;
};

static bool fail(const struct client_failure *failure)
{
    (void)ctl_failure(failure);
    return false;
}

static bool side_start(struct bench_progress *progress, struct side *side, const char *model_dir,
                       const char *draft, uint32_t count)
{
    const struct spawn_options options = {.backend = "cpu", .model_dir = model_dir, .draft = draft};
    uint32_t prompt[PROMPT], vocab = 0;
    struct turn_prefill prefill;
    struct client_failure failure;
    bool created = false;

    progress->doing = "starting the daemons";
    *side = (struct side){.count = count, .progress = progress};
    if (spawn_start(progress->ctl, &options, &side->spawn) != 0) return false;
    side->spawned = true;
    if (ctl_connect_as(progress->ctl, side->spawn.endpoint, side->spawn.user_token, 120000,
                       &side->client) != 0)
        return false;
    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = 3 + i * 7 % 200;
    if (!bench_go_on(progress)) return false;
    if (!turn_open(side->client, SESSION, &created, &vocab, &failure) ||
        !turn_run_prefill(side->client, SESSION, prompt, PROMPT, &prefill, &failure))
        return fail(&failure);
    return true;
}

static bool side_stop(struct side *side)
{
    if (side->client != NULL) client_destroy(side->client);
    return !side->spawned || spawn_stop(&side->spawn);
}

static bool go_on(void *progress)
{
    return bench_go_on(progress);
}

/* The session goes on where the last run ended; both sides stand at the same place in a pair. */
static bool run_side(void *context, double *ret_seconds)
{
    struct side *side = context;
    struct turn_decode decode;
    struct client_failure failure;

    const double began = bench_now();
    if (!turn_run_decode(side->client, SESSION, side->count, side->tokens, go_on, side->progress,
                         &decode, &failure))
        return spawn_interrupted() ? false : fail(&failure);
    *ret_seconds = bench_now() - began;
    if (decode.tokens == side->count) return true;
    ctl_error("the daemon sent %u tokens of %u", decode.tokens, side->count);
    return false;
}

static bool same_tokens(const struct side *a, const struct side *b)
{
    if (memcmp(a->tokens, b->tokens, a->count * sizeof(a->tokens[0])) == 0) return true;
    ctl_error("drafting changed the tokens of an answer");
    return false;
}

static int measure_model(struct bench_progress *progress, const char *model_dir,
                         const struct model_case *model, uint32_t count, uint32_t rounds,
                         struct bench_pairs *pairs)
{
    struct side with, without = {.spawned = false};
    double unused;

    *pairs = (struct bench_pairs){.anchor = "engine.draft = off",
                                  .unit = count,
                                  .anchor_unit = count,
                                  .target = model->target,
                                  .at_least = true,
                                  .speed = true};
    (void)snprintf(pairs->what, sizeof(pairs->what), "%s, draft = auto", model->what);
    bool ok = side_start(progress, &with, model_dir, "auto", count) &&
              side_start(progress, &without, model_dir, "off", count);
    /* The first answer measures what a step costs and how often drafts are right. */
    ok = ok && run_side(&with, &unused) && run_side(&without, &unused) &&
         same_tokens(&with, &without);
    int code =
        ok ? bench_pairs_measure(progress, pairs, rounds, run_side, &with, run_side, &without)
           : CLIENT_EXIT_FAILED;
    if (code == 0 && !same_tokens(&with, &without)) code = CLIENT_EXIT_FAILED;
    if (!side_stop(&with) && code == 0) code = CLIENT_EXIT_FAILED;
    if (!side_stop(&without) && code == 0) code = CLIENT_EXIT_FAILED;
    return code;
}

int bench_draft(struct bench_progress *progress, const struct bench_engine_options *options)
{
    static const struct model_case cases[] = {
        {"random weights", NULL, 0.95},
        {"a model whose drafts are right", "--bigram", 1.0},
    };
    const uint32_t count = options->quick ? 64 : 192, rounds = options->quick ? 5 : 9;
    const uint32_t models = options->model_dir != NULL ? 1 : KV_ARRAY_COUNT(cases);
    struct bench_pairs pairs[KV_ARRAY_COUNT(cases)];
    int code = CLIENT_EXIT_OK;

    if (options->quick) bench_quick(progress, models);
    for (uint32_t i = 0; i < models && code == 0; i++) {
        struct bench_engine_options made = *options;
        struct bench_model_dir dir;
        made.make_flag = cases[i].flag;
        code = bench_model_dir_make(progress, &made, &dir);
        if (code == 0)
            code = measure_model(progress, dir.path, &cases[i], count, rounds, &pairs[i]);
        bench_model_dir_drop(&dir);
    }
    if (code != 0) return code;
    return bench_pairs_report(progress->ctl, "draft", pairs, models,
                              json_pack("{s:s}", "tokens", "equal with and without drafting"));
}
