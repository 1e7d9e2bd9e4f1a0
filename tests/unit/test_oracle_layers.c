/*
 * Every layer of the whole `tiny`, fed with the oracle's own input, against the oracle's output.
 *
 * Before each layer the streams are replaced by what the oracle had there, and its choices (lists,
 * candidates, experts) by the oracle's after they were compared, so that one rounding that falls
 * the other way does not spread.  Such roundings are legal (sums of fp32 beside sums of double), so
 * codes may differ here and there by one step, and a layer's update by the bounds of
 * tests/oracle/README; what is counted is printed.
 */

#include "engine/backend/backend.h"
#include "engine/model/quant.h"
#include "engine/probe.h"
#include "tests/unit/oracle_fixture.h"
#include "tests/unit/test_engine_fixture.h"

#include <math.h>

enum {
    TOKENS_MAX = 128,
    LAYERS = 16,
    WIDTH = 4 * 128,
    TOPK = 16,
    BLOCKS = 4,
    ACTIVE = 2,
    VOCAB = 512
};
enum { PLANT_LAYER = 5 };

/* Relative rms of a layer's update, and the largest relative error of fp32 results. */
#define UPDATE_BOUND 2.3e-3
#define FP32_BOUND 1e-4
#define LOGITS_BOUND 1e-3
/* Without rounding only the order of sums is left; drafts are three layers of them. */
#define OFF_BOUND 1e-5
#define DRAFTS_OFF_BOUND 1e-4
#define DRAFTS_OPEN_BOUND 0.05

struct count {
    uint64_t compared, differing;
    double worst;
};

struct judge {
    const struct fixture *fixture;
    uint32_t tokens;
    bool quant_off;                          /* Nothing is rounded: streams and rows are fp32. */
    bool family_fp32;                        /* Kernels, as in eng_model_family(). */
    bool plant;                              /* A pre-mix is wrong on its way into one layer. */
    float before[LAYERS][TOKENS_MAX][WIDTH]; /* As the layer read them. */
    struct count updates, premix, lists, candidates, experts, weights, engram, windows, logits;
    struct count rows, keys, far; /* far: positions beyond UPDATE_BOUND. */
    struct count tails, draft_windows, drafts, draft_logits;
};

static double update_bound(const struct judge *judge)
{
    return judge->quant_off ? OFF_BOUND : UPDATE_BOUND;
}

static void feed(const struct judge *judge, const char *kind, uint32_t layer, uint32_t position,
                 float *values, size_t width, bool is_stream)
{
    const bool bf16 = is_stream && !judge->quant_off;
    char name[32];
    (void)snprintf(name, sizeof(name), "%s.%u", kind, layer);
    const int64_t row = fixture_row_of(judge->fixture, name, position);
    if (row < 0) return;
    const struct fixture_tensor tensor = fixture_take(judge->fixture, name, bf16 ? "BF16" : "F32");
    EXPECT(tensor.width == width);
    for (size_t i = 0; i < width; i++)
        values[i] = bf16 ? fixture_bf16(&tensor, (size_t)row * width + i)
                         : fixture_f32(&tensor, (size_t)row * width + i);
}

static void before_layer(void *context, const struct eng_probe_rows *rows, float *streams,
                         float *premix)
{
    struct judge *judge = context;
    for (uint32_t i = 0; i < rows->count && rows->layer < LAYERS; i++) {
        float *own = streams + (size_t)i * WIDTH;
        if (rows->layer > 0) {
            feed(judge, "stream", rows->layer - 1, rows->first + i, own, WIDTH, true);
            feed(judge, "premix", rows->layer - 1, rows->first + i, premix + 4 * (size_t)i, 4,
                 false);
        }
        if (judge->plant && rows->layer == PLANT_LAYER) premix[4 * (size_t)i] *= 1.1f;
        memcpy(judge->before[rows->layer][rows->first + i], own, WIDTH * sizeof(float));
    }
}

static void after_layer(void *context, const struct eng_probe_rows *rows, const float *streams,
                        const float *premix)
{
    struct judge *judge = context;
    float want[WIDTH], want_premix[4];
    for (uint32_t i = 0; i < rows->count && rows->layer < LAYERS; i++) {
        const uint32_t position = rows->first + i;
        const float *own = streams + (size_t)i * WIDTH;
        double error = 0, update = 0;
        memset(want, 0, sizeof(want));
        feed(judge, "stream", rows->layer, position, want, WIDTH, true);
        feed(judge, "premix", rows->layer, position, want_premix, 4, false);
        for (size_t k = 0; k < WIDTH; k++) {
            const double moved = (double)want[k] - (double)judge->before[rows->layer][position][k];
            const double off = (double)own[k] - (double)want[k];
            error += off * off;
            update += moved * moved;
        }
        const double relative = sqrt(error / update);
        judge->updates.compared++;
        judge->updates.differing += error > 0;
        judge->updates.worst = fmax(judge->updates.worst, relative);
        judge->far.compared++;
        judge->far.differing += relative > update_bound(judge);
        for (size_t k = 0; k < 4; k++) {
            const double off = fabs((double)premix[4 * i + k] - (double)want_premix[k]);
            judge->premix.compared++;
            judge->premix.worst = fmax(judge->premix.worst, off);
            judge->premix.differing += off > FP32_BOUND && !(relative > update_bound(judge));
        }
    }
}

/* Compares a list with the fixture's, then takes the fixture's.  Returns its length. */
static uint32_t choose(const struct judge *judge, struct count *count, const char *name,
                       uint32_t position, uint32_t *list, uint32_t length, uint32_t max)
{
    const struct fixture_tensor tensor = fixture_take(judge->fixture, name, "I32");
    const int64_t row = fixture_row_of(judge->fixture, name, position);
    uint32_t wanted = 0;
    EXPECT(row >= 0);
    EXPECT(tensor.width == max);
    count->compared++;
    for (uint32_t k = 0; k < max; k++) {
        const uint32_t entry = kv_load32(tensor.data + 4 * ((size_t)row * max + k));
        if (entry == UINT32_MAX) break;
        if (k >= length || list[k] != entry) count->worst = 1;
        list[k] = entry;
        wanted++;
    }
    if (count->worst > 0 || wanted != length) count->differing++;
    count->worst = 0;
    return wanted;
}

static void candidates(void *context, const struct eng_probe_rows *rows, uint32_t *blocks,
                       uint32_t *counts)
{
    struct judge *judge = context;
    for (uint32_t i = 0; i < rows->count; i++)
        counts[i] = choose(judge, &judge->candidates, "candidates", rows->first + i,
                           blocks + (size_t)i * BLOCKS, counts[i], BLOCKS);
}

static void topk(void *context, const struct eng_probe_rows *rows, uint32_t *list, uint32_t *counts)
{
    struct judge *judge = context;
    char name[32];
    (void)snprintf(name, sizeof(name), "topk.%u", rows->layer);
    for (uint32_t i = 0; i < rows->count; i++)
        counts[i] = choose(judge, &judge->lists, name, rows->first + i, list + (size_t)i * TOPK,
                           counts[i], TOPK);
}

static void experts(void *context, const struct eng_probe_rows *rows, uint32_t *chosen,
                    float *weights)
{
    struct judge *judge = context;
    char name[32];
    if (rows->layer >= LAYERS) return;
    (void)snprintf(name, sizeof(name), "experts.%u", rows->layer);
    for (uint32_t i = 0; i < rows->count; i++) {
        float want[ACTIVE] = {0};
        (void)choose(judge, &judge->experts, name, rows->first + i, chosen + (size_t)i * ACTIVE,
                     ACTIVE, ACTIVE);
        (void)snprintf(name, sizeof(name), "experts.%u.weight", rows->layer);
        const struct fixture_tensor tensor = fixture_take(judge->fixture, name, "F32");
        (void)snprintf(name, sizeof(name), "experts.%u", rows->layer);
        const int64_t row = fixture_row_of(judge->fixture, name, rows->first + i);
        for (size_t k = 0; k < ACTIVE; k++) {
            want[k] = fixture_f32(&tensor, (size_t)row * ACTIVE + k);
            const double off = fabs((double)weights[i * ACTIVE + k] - (double)want[k]);
            judge->weights.compared++;
            judge->weights.worst = fmax(judge->weights.worst, off);
            weights[i * ACTIVE + k] = want[k];
        }
    }
}

static void engram(void *context, const struct eng_probe_rows *rows, const uint64_t *table_rows,
                   uint32_t columns)
{
    struct judge *judge = context;
    char name[32];
    (void)snprintf(name, sizeof(name), "engram.%u", rows->layer);
    const struct fixture_tensor tensor = fixture_take(judge->fixture, name, "I64");
    EXPECT(tensor.width == columns);
    for (uint32_t i = 0; i < rows->count; i++) {
        const int64_t row = fixture_row_of(judge->fixture, name, rows->first + i);
        EXPECT(row >= 0);
        for (size_t c = 0; c < columns; c++) {
            judge->engram.compared++;
            judge->engram.differing += table_rows[i * columns + c] !=
                                       kv_load64(tensor.data + 8 * ((size_t)row * columns + c));
        }
    }
}

/* fp32 values: those that differ by more than OFF_BOUND of the row's largest. */
static void count_values(struct count *count, const uint8_t *mine, const uint8_t *theirs, size_t n)
{
    double largest = 0;
    for (size_t i = 0; i < n; i += 4)
        largest = fmax(largest, fabs((double)eng_float_of(kv_load32(theirs + i))));
    for (size_t i = 0; i < n; i += 4) {
        const double off = fabs((double)eng_float_of(kv_load32(mine + i)) -
                                (double)eng_float_of(kv_load32(theirs + i)));
        count->compared++;
        count->differing += off > OFF_BOUND * largest;
        count->worst = fmax(count->worst, off / largest);
    }
}

static void count_codes(struct count *count, const uint8_t *mine, const uint8_t *theirs, size_t n)
{
    count->compared += n;
    for (size_t i = 0; i < n; i++)
        count->differing += mine[i] != theirs[i];
}

/* Row `at` of a tensor of packed rows, or of fp32 rows. */
static void count_row(const struct judge *judge, struct count *count, const char *name,
                      const uint8_t *row, size_t at)
{
    const struct fixture_tensor tensor =
        fixture_take(judge->fixture, name, judge->quant_off ? "F32" : "U8");
    if (judge->quant_off)
        count_values(count, row, tensor.data + at * tensor.width * 4, tensor.width * 4);
    else
        count_codes(count, row, tensor.data + at * tensor.width, tensor.width);
}

static void window_row(void *context, const struct eng_probe_rows *rows, const uint8_t *row)
{
    struct judge *judge = context;
    char name[32];
    struct count *count = rows->layer < LAYERS ? &judge->windows : &judge->draft_windows;
    (void)snprintf(name, sizeof(name), "win.%u", rows->layer);
    const int64_t at = fixture_row_of(judge->fixture, name, rows->first);
    if (at >= 0) count_row(judge, count, name, row, (size_t)at);
}

static void logits(void *context, const struct eng_probe_rows *rows, const float *values)
{
    struct judge *judge = context;
    const struct fixture_tensor tensor = fixture_take(judge->fixture, "logits", "F32");
    for (uint32_t i = 0; i < rows->count; i++) {
        const int64_t row = fixture_row_of(judge->fixture, "logits", rows->first + i);
        double largest = 0, off = 0;
        EXPECT(row >= 0);
        for (size_t k = 0; k < VOCAB; k++) {
            const double want = (double)fixture_f32(&tensor, (size_t)row * VOCAB + k);
            largest = fmax(largest, fabs(want));
            off = fmax(off, fabs((double)values[i * VOCAB + k] - want));
        }
        judge->logits.compared++;
        judge->logits.worst = fmax(judge->logits.worst, off / largest);
    }
}

/* What an odd prompt leaves half of a pair, as fp32. */
static void compare_tails(struct judge *judge, const struct rig *rig)
{
    const struct eng_model *model = rig->model;
    uint8_t tails[4096];
    char name[32];

    EXPECT(judge->tokens % 2 == 1 && model->tails_bytes <= sizeof(tails));
    model->ops->tails_read(rig->session, judge->tokens - 1, tails);
    for (uint32_t s = 0; s < rig->layout->source_count; s++) {
        const struct kv_source *source = &rig->layout->sources[s];
        double largest = 0, off = 0;
        if (source->tail_bytes == 0) continue;
        (void)snprintf(name, sizeof(name), "tail.%u", source->layer);
        const struct fixture_tensor tensor = fixture_take(judge->fixture, name, "F32");
        EXPECT_EQ_U64(tensor.rows * tensor.width * 4, source->tail_bytes);
        for (size_t i = 0; i < source->tail_bytes / 4; i++) {
            const uint8_t *mine = tails + eng_tail_offset(model, s) + 4 * i;
            const double want = (double)fixture_f32(&tensor, i);
            largest = fmax(largest, fabs(want));
            off = fmax(off, fabs((double)eng_float_of(kv_load32(mine)) - want));
        }
        judge->tails.compared++;
        judge->tails.differing += off > (judge->quant_off ? OFF_BOUND : FP32_BOUND) * largest;
        judge->tails.worst = fmax(judge->tails.worst, off / largest);
    }
}

/* Kernels of another family than the fixture was tried with may round one activation of three
 * layers the other way, which is legal; nothing feeds the oracle's inputs to the stages in between.
 */
static bool drafts_are_open(const struct judge *judge)
{
    return !judge->quant_off && !judge->family_fp32;
}

static double drafts_bound(const struct judge *judge)
{
    if (judge->quant_off) return DRAFTS_OFF_BOUND;
    return drafts_are_open(judge) ? DRAFTS_OPEN_BOUND : LOGITS_BOUND;
}

static void count_drafts(struct judge *judge, const struct fixture_tensor *want, size_t row,
                         const float *mine)
{
    double largest = 0, off = 0;
    for (size_t k = 0; k < want->width; k++) {
        const double value = (double)fixture_f32(want, row * want->width + k);
        largest = fmax(largest, fabs(value));
        off = fmax(off, fabs((double)mine[k] - value));
    }
    judge->draft_logits.compared++;
    judge->draft_logits.differing += off > drafts_bound(judge) * largest;
    judge->draft_logits.worst = fmax(judge->draft_logits.worst, off / largest);
}

/* One draft a call. */
static void drafts(void *context, const struct eng_probe_rows *rows, const uint32_t *tokens,
                   const float *logits, const float *confidence)
{
    struct judge *judge = context;
    const struct fixture_tensor want = fixture_take(judge->fixture, "draft.logits", "F32");
    const struct fixture_tensor sure = fixture_take(judge->fixture, "draft.confidence", "F32");
    const uint32_t row = rows->first - judge->tokens - 1;

    EXPECT(rows->count == 1 && row < want.rows && want.width == VOCAB);
    judge->drafts.compared++;
    judge->drafts.differing +=
        tokens[0] != kv_load32(fixture_take(judge->fixture, "draft", "I32").data + 4 * row);
    count_drafts(judge, &want, row, logits);
    count_drafts(judge, &sure, row, confidence);
}

static void compare_drafts(struct judge *judge, const struct rig *rig)
{
    const struct fixture_tensor want = fixture_take(judge->fixture, "draft", "I32");
    const struct fixture_tensor first = fixture_take(judge->fixture, "draft.token", "I32");
    uint32_t mine[16];

    EXPECT(want.rows <= KV_ARRAY_COUNT(mine));
    eng_draft(rig->model,
              &(struct eng_draft_item){.session = rig->session,
                                       .first = kv_load32(first.data),
                                       .max = (uint32_t)want.rows,
                                       .tokens = mine},
              1);
    EXPECT_EQ_U64(judge->drafts.compared, want.rows);
}

static void compare_rows(struct judge *judge, const struct rig *rig)
{
    const struct kv_layout *layout = rig->layout;
    char name[32];
    for (uint32_t s = 0; s < layout->source_count; s++) {
        const struct kv_source *source = &layout->sources[s];
        for (size_t entry = 0; entry < judge->tokens / source->ratio; entry++) {
            const uint8_t *page = rig->pages[entry * source->ratio / 128];
            const size_t at = entry % (128 / source->ratio);
            (void)snprintf(name, sizeof(name), "rows.%u", source->layer);
            count_row(judge, &judge->rows, name,
                      page + layout->main_offset[s] + at * source->main_bytes, entry);
            (void)snprintf(name, sizeof(name), "keys.%u", source->layer);
            count_row(judge, &judge->keys, name,
                      page + layout->index_offset[s] + at * source->index_bytes, entry);
        }
    }
}

static void report(const char *what, const struct count *count, uint64_t allowed)
{
    (void)printf("  %-12s %8llu compared, %4llu differ (at most %llu), worst %.3g\n", what,
                 (unsigned long long)count->compared, (unsigned long long)count->differing,
                 (unsigned long long)allowed, count->worst);
    EXPECT(count->compared > 0);
    EXPECT(count->differing <= allowed);
}

static uint64_t codes_allowed(const struct count *count)
{
    return (count->compared + 9999) / 10000;
}

static void report_all(const struct judge *judge)
{
    report("updates", &judge->updates, judge->updates.compared);
    /* With rounding on, a value between two codes may go either way: now and then a whole update.
     */
    report("far updates", &judge->far, judge->quant_off ? 0 : judge->far.compared / 200);
    report("pre-mix", &judge->premix, 0);
    report("top-k", &judge->lists, 0);
    report("candidates", &judge->candidates, 0);
    report("experts", &judge->experts, 0);
    report("weights", &judge->weights, 0);
    report("Engram rows", &judge->engram, 0);
    report("windows", &judge->windows, codes_allowed(&judge->windows));
    report("main rows", &judge->rows, codes_allowed(&judge->rows));
    report("index keys", &judge->keys, codes_allowed(&judge->keys));
    report("tails", &judge->tails, 0);
    report("draft rows", &judge->draft_windows, codes_allowed(&judge->draft_windows));
    report("drafts", &judge->drafts, drafts_are_open(judge) ? judge->drafts.compared : 0);
    report("draft logits", &judge->draft_logits, 0);
    report("logits", &judge->logits, 0);
    EXPECT(judge->updates.worst <= (judge->quant_off ? OFF_BOUND : 0.1));
    EXPECT(judge->weights.worst < 1e-3);
    EXPECT(judge->logits.worst <= LOGITS_BOUND);
}

struct trial {
    const char *fixture;
    enum eng_isa isa;
    bool prefill_all, quant_off, plant;
};

/* The whole prompt, however many passes it takes. */
static void compute(struct judge *judge, struct rig *rig)
{
    const struct fixture_tensor tokens = fixture_take(judge->fixture, "tokens", "I32");
    uint32_t ids[TOKENS_MAX];

    judge->tokens = (uint32_t)tokens.rows;
    EXPECT(judge->tokens > 32 && judge->tokens <= TOKENS_MAX);
    for (uint32_t i = 0; i < judge->tokens; i++)
        ids[i] = kv_load32(tokens.data + 4 * (size_t)i);
    eng_prefill_begin(rig->session, ids, 0, judge->tokens);
    for (struct eng_run_left left = eng_run_left(rig->session); left.encode + left.decode > 0;
         left = eng_run_left(rig->session)) {
        const struct eng_piece piece = {
            .session = rig->session, .encode = left.encode, .decode = left.decode};
        eng_pass(rig->model, &piece, 1);
    }
}

static void run(const char *dir, const struct trial *trial)
{
    const struct eng_options options = {.backend = ENG_BACKEND_CPU,
                                        .model_dir = dir,
                                        .spare_tokens = RIG_SPARE,
                                        .isa = trial->isa,
                                        .quant_off = trial->quant_off,
                                        .prefill_all = trial->prefill_all};
    struct judge *judge = calloc(1, sizeof(*judge));
    struct fixture fixture;
    struct eng_model *model = NULL;
    struct kv_error err = {0};
    struct rig rig;

    EXPECT(judge != NULL);
    fixture_open_file(&fixture, trial->fixture);
    *judge =
        (struct judge){.fixture = &fixture, .quant_off = trial->quant_off, .plant = trial->plant};
    EXPECT(eng_model_open(&options, &model, &err) == KV_OK);
    judge->family_fp32 = strcmp(eng_model_family(model), "fp32") == 0;
    rig_init(&rig, model);
    const struct eng_probe probe = {.context = judge,
                                    .all_logits = true,
                                    .before_layer = before_layer,
                                    .after_layer = after_layer,
                                    .candidates = candidates,
                                    .topk = topk,
                                    .experts = experts,
                                    .engram = engram,
                                    .window_row = window_row,
                                    .logits = logits,
                                    .draft = drafts};
    eng_model_set_probe(model, &probe);
    compute(judge, &rig);
    compare_rows(judge, &rig);
    compare_tails(judge, &rig);
    compare_drafts(judge, &rig);
    (void)printf("%s, %s:\n", trial->fixture, eng_model_isa(model));
    if (trial->plant) {
        (void)printf("  a planted error: %llu updates beyond the bound\n",
                     (unsigned long long)judge->far.differing);
        EXPECT(judge->far.differing > 0);
    } else {
        report_all(judge);
    }
    rig_fini(&rig);
    eng_model_close(model);
    fixture_close_file(&fixture);
    free(judge);
}

int main(void)
{
    static const struct trial trials[] = {
        {.fixture = "tiny-all", .prefill_all = true},
        {.fixture = "tiny-ced"},
        {.fixture = "tiny-off", .prefill_all = true, .quant_off = true},
        {.fixture = "tiny-all", .prefill_all = true, .isa = ENG_ISA_PORTABLE},
        {.fixture = "tiny-off", .prefill_all = true, .quant_off = true, .isa = ENG_ISA_PORTABLE},
        {.fixture = "tiny-all", .prefill_all = true, .plant = true},
    };
    char dir[64];
    fixture_make_model(dir, 1);
    for (size_t i = 0; i < KV_ARRAY_COUNT(trials); i++)
        run(dir, &trials[i]);
    fixture_remove_model(dir);
    HARNESS_END();
}
