/*
 * `cachectl bench prefill`: what reading a prompt costs when only the encoder reads all of it.
 *
 * The same weights twice in one process: once as the daemon runs them (encoder on every token, the
 * decoder over the last window), once with all layers on every token.  The floor is the share of
 * layers, one half, plus the last window's way through the decoder.  `threads` compares two threads
 * with one; the memory line says what a long prompt needs beyond weights, rows and windows.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/bench_list.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_MIB_MAX 256u
#define QUICK_SECONDS 40.0 /* Of pairs, within the minute of --quick. */

struct prefill {
    struct bench_session *session;
    const uint32_t *ids;
    uint32_t tokens;
};

static bool run_prefill(void *context, double *ret_seconds)
{
    const struct prefill *prefill = context;
    struct bench_session *one[] = {prefill->session};

    bench_session_reset(prefill->session);
    const double began = bench_now();
    eng_prefill_begin(prefill->session->session, prefill->ids, 0, prefill->tokens);
    const bool done = bench_finish_runs(one, 1);
    *ret_seconds = bench_now() - began;
    return done;
}

/* Resident memory that is not a mapped file, in bytes. */
static uint64_t own_memory(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/self/status", "re");
    if (file == NULL) return 0;
    while (fgets(line, sizeof(line), file) != NULL)
        if (strncmp(line, "RssAnon:", 8) == 0) (void)sscanf(line + 8, "%llu", &kib);
    (void)fclose(file);
    return kib << 10;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* One long prefill, before anything else has run in this process.  before: what it held without
 * the model.  *ret_bytes: what it holds beyond that, the session's pages and its windows: the
 * engine's scratch, and weights that are not mapped, if there are any.  false: interrupted. */
static bool memory_beyond(struct bench_session *ced, const uint32_t *ids, uint32_t tokens,
                          uint64_t before, uint64_t *ret_bytes, double *ret_seconds)
{
    struct prefill prefill = {ced, ids, tokens};
    ced->progress->doing = "prefilling the longest prompt for its memory";
    if (!run_prefill(&prefill, ret_seconds)) return false;
    const uint64_t held = bench_session_page_bytes(ced) + eng_model_layout(ced->model)->image_bytes;
    *ret_bytes = less(less(own_memory(), before), held);
    return true;
}

static json_t *facts(const struct eng_model *model, uint32_t tokens, uint64_t beyond, bool left_out)
{
    const double mib = (double)beyond / (1u << 20);
    char target[64];
    (void)snprintf(target, sizeof(target), "<= %u: %s", MEMORY_MIB_MAX,
                   mib <= MEMORY_MIB_MAX ? "met" : "missed");
    json_t *object =
        json_pack("{s:s, s:s, s:I, s:f, s:s}", "model", eng_model_name(model), "kernels",
                  eng_model_family(model), "tokens of the memory's prefill", (json_int_t)tokens,
                  "MiB beyond weights, rows and windows", mib, "MiB beyond, target", target);
    if (left_out)
        (void)json_object_set_new(
            object, "left out",
            json_sprintf("pairs of %u, too slow here to be done within a minute", tokens));
    return object;
}

/* NULL: no memory, the sentence is printed. */
static uint32_t *make_ids(uint32_t count)
{
    uint32_t *ids = calloc(count, sizeof(*ids));
    if (ids == NULL) ctl_error("no memory for %u token ids", count);
    return ids;
}

struct bench_case {
    uint32_t tokens, pairs;
    double target;
};

static int measure(struct bench_progress *progress, struct bench_session *ced,
                   struct bench_session *all, const uint32_t *ids, const struct bench_case *cases,
                   uint32_t count, struct bench_pairs *pairs)
{
    int code = CLIENT_EXIT_OK;
    for (uint32_t i = 0; i < count && code == 0; i++) {
        struct prefill mine = {ced, ids, cases[i].tokens}, anchor = {all, ids, cases[i].tokens};
        struct bench_pairs *line = &pairs[i];
        *line = (struct bench_pairs){
            .unit = cases[i].tokens, .anchor_unit = cases[i].tokens, .target = cases[i].target};
        (void)snprintf(line->what, sizeof(line->what), "CED prefill of %u", cases[i].tokens);
        (void)snprintf(line->anchor, sizeof(line->anchor), "all layers");
        code = bench_pairs_measure(progress, line, cases[i].pairs, run_prefill, &mine, run_prefill,
                                   &anchor);
    }
    return code;
}

int bench_prefill(struct bench_progress *progress, const struct bench_engine_options *options)
{
    static const struct bench_case full[] = {{1024, 7, 0.60}, {8192, 5, 0.55}, {32768, 3, 0.53}};
    static const struct bench_case quick[] = {{1024, 5, 0.60}, {2048, 5, 0}};
    const struct bench_case *cases = options->quick ? quick : full;
    uint32_t count = options->quick ? KV_ARRAY_COUNT(quick) : KV_ARRAY_COUNT(full);
    const uint32_t most = cases[count - 1].tokens;
    struct bench_pairs pairs[KV_ARRAY_COUNT(full)];
    struct bench_session ced = {0}, all = {0};
    struct eng_model *one = NULL, *two = NULL;
    struct bench_model_dir dir;
    uint64_t beyond = 0;
    double seconds = 0;
    bool left_out = false;
    uint32_t *ids = make_ids(most);

    int code = ids != NULL ? bench_model_dir_make(progress, options, &dir) : CLIENT_EXIT_FAILED;
    if (code != 0) {
        free(ids);
        return code;
    }
    const uint64_t before = own_memory();
    one = bench_model_open(&dir, (uint32_t)options->threads, false);
    if (one == NULL || !bench_session_init(&ced, one, most, false, progress))
        code = CLIENT_EXIT_FAILED;
    if (code == 0) {
        bench_ids(one, 1, ids, most);
        if (!memory_beyond(&ced, ids, most, before, &beyond, &seconds)) code = CLIENT_EXIT_FAILED;
        /* Both lengths in few pairs take a dozen times as long as this did. */
        left_out = options->quick && 13 * seconds > QUICK_SECONDS;
        if (left_out) count--;
        if (options->quick) bench_quick(progress, count);
    }
    if (code == 0) {
        two = bench_model_open(&dir, (uint32_t)options->threads, true);
        if (two == NULL || !bench_session_init(&all, two, most, true, progress))
            code = CLIENT_EXIT_FAILED;
    }
    if (code == 0) code = measure(progress, &ced, &all, ids, cases, count, pairs);
    if (code == 0)
        code = bench_pairs_report(progress->ctl, "prefill", pairs, count,
                                  facts(one, most, beyond, left_out));
    bench_session_fini(&ced);
    bench_session_fini(&all);
    eng_model_close(one);
    eng_model_close(two);
    bench_model_dir_drop(&dir);
    free(ids);
    return code;
}

int bench_threads(struct bench_progress *progress, const struct bench_engine_options *options)
{
    const uint32_t tokens = options->quick ? 1024 : 4096;
    if (options->quick) bench_quick(progress, 1);
    struct bench_pairs pairs = {.unit = tokens,
                                .anchor_unit = tokens,
                                .target = 1.7,
                                .at_least = true,
                                .speed = true,
                                .what = "prefill with 2 threads",
                                .anchor = "1 thread"};
    struct bench_session one = {0}, two = {0};
    struct bench_model_dir dir;
    uint32_t *ids = make_ids(tokens);

    int code = ids != NULL ? bench_model_dir_make(progress, options, &dir) : CLIENT_EXIT_FAILED;
    if (code != 0) {
        free(ids);
        return code;
    }
    struct eng_model *slow = bench_model_open(&dir, 1, false);
    struct eng_model *fast = bench_model_open(&dir, 2, false);
    if (slow == NULL || fast == NULL || !bench_session_init(&one, slow, tokens, false, progress) ||
        !bench_session_init(&two, fast, tokens, false, progress))
        code = CLIENT_EXIT_FAILED;
    if (code == 0) {
        bench_ids(slow, 1, ids, tokens);
        struct prefill mine = {&two, ids, tokens}, anchor = {&one, ids, tokens};
        code = bench_pairs_measure(progress, &pairs, options->quick ? 5 : 7, run_prefill, &mine,
                                   run_prefill, &anchor);
    }
    if (code == 0)
        code = bench_pairs_report(progress->ctl, "threads", &pairs, 1,
                                  json_pack("{s:s}", "kernels", eng_model_family(slow)));
    bench_session_fini(&one);
    bench_session_fini(&two);
    eng_model_close(slow);
    eng_model_close(fast);
    bench_model_dir_drop(&dir);
    free(ids);
    return code;
}
