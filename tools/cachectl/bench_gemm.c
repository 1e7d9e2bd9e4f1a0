/*
 * `cachectl bench gemm`: matrix products on weights as stored beside oneDNN's bf16 product.
 *
 * At the shapes of the real model and of `small`, one thread.  Ours reads FP8, FP4, BF16 or F32 as
 * a checkpoint holds them; the anchor gets the same weights as bf16, in the order it likes best,
 * put there outside the timing.  Both are measured in turn, A B A B, because the machine's speed
 * moves; each pair gives one ratio (anchor's time over ours), and the median counts.  Packing the
 * inputs, done once for all matrices that share them, is timed apart.
 *
 * A model walks through its layers and meets a matrix once per pass, so a small one is not met
 * again in the second-level cache: both sides go round a set of equal matrices.
 */

#include "tools/cachectl/bench_gemm.h"

#include "engine/backend/kernels/compute.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"
#include "tools/cachectl/bench_onednn.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/spawn.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TARGET 0.9
#define TARGET_ROWS 32u
#define PAIRS_MAX 11u
#define ROWS_MAX 512u
/* Matrices of one shape: as many as make this many bytes of bf16. */
#define SET_BYTES (24u << 20)
#define SET_MAX 64u
#define GO_ON_VALUES 65536u /* How often it is asked whether to go on. */

struct shape {
    const char *name;
    enum eng_format format;
    uint32_t n, k;
};

static const struct shape shapes[] = {
    {"v41-flash wq_b", ENG_FORMAT_FP8, 32768, 1280}, {"v41-flash wkv", ENG_FORMAT_FP8, 512, 5120},
    {"v41-flash wo_b", ENG_FORMAT_FP8, 5120, 8192},  {"v41-flash w1", ENG_FORMAT_FP4, 2304, 5120},
    {"v41-flash w2", ENG_FORMAT_FP4, 5120, 2304},    {"v41-flash gate", ENG_FORMAT_BF16, 384, 5120},
    {"v41-flash hc_fn", ENG_FORMAT_F32, 24, 20480},  {"small wq_b", ENG_FORMAT_FP8, 4096, 256},
    {"small wkv", ENG_FORMAT_FP8, 512, 768},         {"small wo_b", ENG_FORMAT_FP8, 768, 512},
    {"small w1", ENG_FORMAT_FP4, 256, 768},          {"small w2", ENG_FORMAT_FP4, 768, 256},
    {"small head", ENG_FORMAT_BF16, 8192, 768},
};

static const char *const format_names[] = {"fp8", "fp4", "bf16", "f32"};
static const uint32_t row_counts[] = {1, 16, 32, 128, ROWS_MAX};

#define CASES (KV_ARRAY_COUNT(shapes) * KV_ARRAY_COUNT(row_counts))

struct result {
    const struct shape *shape;
    uint32_t rows;
    double ours_us, anchor_us, pack_us;
    double ratio, low, high;
};

/* Owned by: bench_gemm(). */
struct bench {
    struct bench_progress *progress;
    struct onednn *library;
    const struct eng_gemm_ops *ops;
    uint32_t pairs;
    double slice_ns; /* How long one side of a pair runs at least. */
    uint64_t random;
    struct result results[CASES];
    size_t count;
    /* Of the shape at hand. */
    struct eng_matrix matrix;
    bool hot;
    uint32_t set, turn;    /* Matrices, and which one is next. */
    uint8_t *data, *scale; /* [set] */
    uint16_t *weights, *x_bf16;
    float *x, *y, *y_anchor;
    void *packed, *scratch;
};

/* Processor time of this thread, which does all the work of both sides: what other programs take
 * from the machine meanwhile does not count. */
static uint64_t cpu_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t draw(struct bench *bench)
{
    bench->random = bench->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(bench->random >> 32);
}

static void drop_shape(struct bench *bench)
{
    void *const all[] = {bench->data, bench->scale, bench->weights,  bench->x_bf16,
                         bench->x,    bench->y,     bench->y_anchor, bench->packed};
    for (size_t i = 0; i < KV_ARRAY_COUNT(all); i++)
        free(all[i]);
    bench->data = bench->scale = NULL;
    bench->weights = bench->x_bf16 = NULL;
    bench->x = bench->y = bench->y_anchor = NULL;
    bench->packed = NULL;
}

static void *take(size_t bytes)
{
    return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
}

static size_t data_bytes(const struct eng_matrix *m)
{
    static const size_t bits[] = {8, 4, 16, 32};
    return (size_t)m->n * m->k * bits[m->format] / 8;
}

/* Milliseconds for the small ones, seconds for the large.  false: this program is to end. */
static bool fill_weights(struct bench *bench)
{
    const struct eng_matrix *m = &bench->matrix;
    const size_t values = (size_t)m->n * m->k;

    for (size_t i = 0; i < values; i++) {
        if (i % GO_ON_VALUES == 0 && !bench_go_on(bench->progress)) return false;
        const uint32_t r = draw(bench);
        const float f = (float)(int32_t)r * 0x1p-31f;
        const uint16_t half = eng_bf16_encode(f);
        if (m->format == ENG_FORMAT_FP8)
            bench->data[i] = (uint8_t)((r & 0x7f) == 0x7f ? 0 : r);
        else if (m->format == ENG_FORMAT_FP4)
            bench->data[i / 2] = (uint8_t)r;
        else if (m->format == ENG_FORMAT_BF16)
            memcpy(bench->data + 2 * i, &half, sizeof(half));
        else
            memcpy(bench->data + 4 * i, &f, sizeof(f));
    }
    for (size_t i = 0; i < values / 32; i++)
        bench->scale[i] = (uint8_t)(118 + draw(bench) % 8);
    for (uint32_t n = 0; n < m->n; n++) {
        if (n % 64 == 0 && !bench_go_on(bench->progress)) return false;
        for (uint32_t k = 0; k < m->k; k++)
            bench->weights[(size_t)n * m->k + k] = eng_bf16_encode(eng_matrix_value(m, n, k));
    }
    return true;
}

/* false: no memory (the sentence is printed), or this program is to end. */
static bool make_shape(struct bench *bench, const struct shape *shape)
{
    struct eng_matrix *m = &bench->matrix;
    const size_t values = (size_t)shape->n * shape->k, inputs = (size_t)ROWS_MAX * shape->k;

    *m = (struct eng_matrix){.format = shape->format, .n = shape->n, .k = shape->k};
    bench->set = 1;
    if (!bench->hot)
        bench->set = (uint32_t)KV_MIN(SET_MAX, (SET_BYTES + 2 * values - 1) / (2 * values));
    bench->data = take(bench->set * data_bytes(m));
    bench->scale = take(bench->set * (values / 32));
    bench->weights = take(values * sizeof(uint16_t));
    bench->x = take(inputs * sizeof(float));
    bench->x_bf16 = take(inputs * sizeof(uint16_t));
    bench->y = take((size_t)ROWS_MAX * shape->n * sizeof(float));
    bench->y_anchor = take((size_t)ROWS_MAX * shape->n * sizeof(float));
    bench->packed = take(eng_packed_bytes(ROWS_MAX, shape->k));
    if (bench->data == NULL || bench->scale == NULL || bench->weights == NULL || bench->x == NULL ||
        bench->x_bf16 == NULL || bench->y == NULL || bench->y_anchor == NULL ||
        bench->packed == NULL) {
        ctl_error("out of memory");
        return false;
    }
    m->data = bench->data;
    m->scale = bench->scale;
    if (!fill_weights(bench)) return false;
    for (uint32_t i = 1; i < bench->set; i++) {
        memcpy(bench->data + i * data_bytes(m), bench->data, data_bytes(m));
        memcpy(bench->scale + i * (values / 32), bench->scale, values / 32);
    }
    for (size_t i = 0; i < inputs; i++) {
        bench->x[i] = eng_bf16_round((float)(int32_t)draw(bench) * 0x1p-31f);
        bench->x_bf16[i] = eng_bf16_encode(bench->x[i]);
    }
    return true;
}

static void run_ours(struct bench *bench, uint32_t rows)
{
    struct eng_matrix m = bench->matrix;
    bench->turn = (bench->turn + 1) % bench->set;
    m.data += bench->turn * data_bytes(&m);
    m.scale += bench->turn * ((size_t)m.n * m.k / 32);
    const struct eng_gemm_args args = {.matrix = &m,
                                       .packed = bench->packed,
                                       .rows = rows,
                                       .y = bench->y,
                                       .y_stride = bench->matrix.n};
    bench->ops->gemm(&args, 0, UINT32_MAX, bench->scratch);
}

static void run_pack(struct bench *bench, uint32_t rows)
{
    const struct eng_pack_args args = {.x = bench->x,
                                       .x_stride = bench->matrix.k,
                                       .rows = rows,
                                       .k = bench->matrix.k,
                                       .packed = bench->packed};
    bench->ops->pack(&args, 0, UINT32_MAX);
}

/* The same numbers come out, up to what bf16 weights cost. */
static bool agrees(const struct bench *bench, uint32_t rows)
{
    const size_t values = (size_t)rows * bench->matrix.n;
    double worst = 0, most = 0;

    for (size_t i = 0; i < values; i++) {
        worst = fmax(worst, fabs((double)bench->y[i] - (double)bench->y_anchor[i]));
        most = fmax(most, fabs((double)bench->y_anchor[i]));
    }
    return worst <= 0.02 * most;
}

static int compare_double(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(*values), compare_double);
    return values[count / 2];
}

static bool measure(struct bench *bench, struct onednn_gemm *const *anchors, struct result *result)
{
    double ratios[PAIRS_MAX], ours[PAIRS_MAX], others[PAIRS_MAX];
    uint64_t began = cpu_ns();

    run_pack(bench, result->rows);
    result->pack_us = (double)(cpu_ns() - began) / 1000;
    if (!onednn_gemm_run(anchors[0])) return false;
    began = cpu_ns();
    run_ours(bench, result->rows);
    const double once = (double)(cpu_ns() - began);
    if (!agrees(bench, result->rows)) return false;
    const uint32_t repeats = (uint32_t)KV_MAX(1.0, bench->slice_ns / KV_MAX(once, 1.0));

    for (uint32_t pair = 0; pair < bench->pairs; pair++) {
        bool ok = true;
        if (!bench_go_on(bench->progress)) return false;
        began = cpu_ns();
        for (uint32_t i = 0; i < repeats; i++)
            run_ours(bench, result->rows);
        const uint64_t middle = cpu_ns();
        for (uint32_t i = 0; i < repeats && ok; i++)
            ok = onednn_gemm_run(anchors[i % bench->set]);
        const uint64_t end = cpu_ns();
        if (!ok) return false;
        ours[pair] = (double)(middle - began) / repeats / 1000;
        others[pair] = (double)(end - middle) / repeats / 1000;
        ratios[pair] = others[pair] / ours[pair];
        began = cpu_ns();
        run_pack(bench, result->rows);
        result->pack_us = KV_MIN(result->pack_us, (double)(cpu_ns() - began) / 1000);
    }
    result->ours_us = median(ours, bench->pairs);
    result->anchor_us = median(others, bench->pairs);
    result->ratio = median(ratios, bench->pairs);
    result->low = ratios[0];
    result->high = ratios[bench->pairs - 1];
    return true;
}

static bool measure_case(struct bench *bench, struct result *result)
{
    const struct shape *shape = result->shape;
    struct onednn_gemm *anchors[SET_MAX] = {NULL};
    bool ok = true;

    for (uint32_t i = 0; i < bench->set && ok && bench_go_on(bench->progress); i++) {
        anchors[i] = onednn_gemm_create(bench->library, shape->n, shape->k, result->rows,
                                        bench->weights, bench->x_bf16, bench->y_anchor);
        ok = anchors[i] != NULL;
    }
    ok = ok && !spawn_interrupted() && measure(bench, anchors, result);
    for (uint32_t i = 0; i < bench->set; i++)
        onednn_gemm_destroy(anchors[i]);
    return ok;
}

static double tflops(const struct result *result, double us)
{
    return 2.0 * result->rows * result->shape->n * result->shape->k / us / 1e6;
}

static double stored_bytes(const struct result *result)
{
    const struct shape *shape = result->shape;
    const struct eng_matrix m = {.format = shape->format, .n = shape->n, .k = shape->k};
    return (double)eng_matrix_bytes(&m);
}

/* The worst of those the target is about. */
static const struct result *lowest(const struct bench *bench)
{
    const struct result *worst = NULL;
    for (size_t i = 0; i < bench->count; i++) {
        const struct result *result = &bench->results[i];
        if (result->rows >= TARGET_ROWS && (worst == NULL || result->ratio < worst->ratio))
            worst = result;
    }
    return worst;
}

static void note(struct bench *bench)
{
    const struct result *last = &bench->results[bench->count - 1], *worst = lowest(bench);
    bench_note(bench->progress, 0, "%zu of %zu cases; the last: %s, %u rows, ratio %.2f",
               bench->count, CASES, last->shape->name, last->rows, last->ratio);
    if (worst != NULL)
        bench_note(bench->progress, 1, "the lowest from %u rows on: %s, %u rows, ratio %.2f",
                   TARGET_ROWS, worst->shape->name, worst->rows, worst->ratio);
}

static int run_shape(struct bench *bench, const struct shape *shape)
{
    bench->progress->doing = shape->name;
    if (!make_shape(bench, shape)) return CLIENT_EXIT_FAILED;
    for (size_t i = 0; i < KV_ARRAY_COUNT(row_counts); i++) {
        struct result *result = &bench->results[bench->count];
        *result = (struct result){.shape = shape, .rows = row_counts[i]};
        if (!measure_case(bench, result)) {
            if (!spawn_interrupted())
                ctl_error("%s, %u rows: oneDNN refused, or the results differ", shape->name,
                          result->rows);
            return CLIENT_EXIT_FAILED;
        }
        bench->count++;
        note(bench);
    }
    bench_say(bench->progress, "%s: done", shape->name);
    return bench_go_on(bench->progress) ? CLIENT_EXIT_OK : CLIENT_EXIT_FAILED;
}

static int report_json(const struct bench *bench, const char *isa)
{
    const struct result *worst = lowest(bench);
    json_t *list = json_array();

    for (size_t i = 0; i < bench->count; i++) {
        const struct result *r = &bench->results[i];
        (void)json_array_append_new(
            list,
            json_pack("{s:s, s:s, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "shape",
                      r->shape->name, "format", format_names[r->shape->format], "n",
                      (json_int_t)r->shape->n, "k", (json_int_t)r->shape->k, "rows",
                      (json_int_t)r->rows, "ours_us", r->ours_us, "onednn_us", r->anchor_us,
                      "pack_us", r->pack_us, "stored_gb_per_s", stored_bytes(r) / r->ours_us / 1000,
                      "ratio", r->ratio, "ratio_min", r->low, "ratio_max", r->high));
    }
    return out_json_take(json_pack("{s:s, s:s, s:b, s:I, s:f, s:f, s:b, s:o}", "benchmark", "gemm",
                                   "isa", isa, "hot", bench->hot, "pairs", (json_int_t)bench->pairs,
                                   "target", TARGET, "lowest_ratio", worst->ratio, "met",
                                   worst->ratio >= TARGET, "cases", list));
}

static int report(const struct bench *bench, const char *isa)
{
    static const char *const names[] = {"SHAPE",   "N X K",   "STORED", "ROWS",
                                        "OURS_US", "TFLOP/S", "GB/S",   "ONEDNN_US",
                                        "RATIO",   "MIN",     "MAX",    "PACK_US"};
    const struct result *worst = lowest(bench);
    struct out_table table;
    size_t missed = 0, counted = 0;

    if (bench->progress->ctl->json) return report_json(bench, isa);
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0xff8);
    for (size_t i = 0; i < bench->count; i++) {
        const struct result *r = &bench->results[i];
        out_table_cell(&table, "%s", r->shape->name);
        out_table_cell(&table, "%ux%u", r->shape->n, r->shape->k);
        out_table_cell(&table, "%s", format_names[r->shape->format]);
        out_table_cell(&table, "%u", r->rows);
        out_table_cell(&table, "%.1f", r->ours_us);
        out_table_cell(&table, "%.3f", tflops(r, r->ours_us));
        out_table_cell(&table, "%.1f", stored_bytes(r) / r->ours_us / 1000);
        out_table_cell(&table, "%.1f", r->anchor_us);
        out_table_cell(&table, "%.2f", r->ratio);
        out_table_cell(&table, "%.2f", r->low);
        out_table_cell(&table, "%.2f", r->high);
        out_table_cell(&table, "%.1f", r->pack_us);
        if (r->rows < TARGET_ROWS) continue;
        counted++;
        if (r->ratio < TARGET) missed++;
    }
    out_table_print(bench->progress->ctl, &table);
    (void)printf("oneDNN bf16 time / ours (%s), one thread, processor time, median of %u pairs.  "
                 "From %u rows on: "
                 "%zu of %zu cases reach %.2f; lowest %.2f (%s, %u rows); target %s\n",
                 isa, bench->pairs, TARGET_ROWS, counted - missed, counted, TARGET, worst->ratio,
                 worst->shape->name, worst->rows, missed == 0 ? "met" : "missed");
    (void)printf("%s\n", bench->hot
                             ? "--hot: the same matrix again and again, in the cache if it fits"
                             : "both sides go round a set of equal matrices, as a model does");
    (void)printf("GB/S: stored bytes of the matrix over our time; PACK_US: inputs, once for all "
                 "matrices that share them\n");
    return CLIENT_EXIT_OK;
}

int bench_gemm(struct bench_progress *progress, bool quick, bool hot)
{
    const char *why = NULL;
    struct bench bench = {
        .progress = progress,
        .ops = eng_kernels_of(ENG_ISA_AUTO, false)->gemm,
        .pairs = quick ? 5 : PAIRS_MAX,
        .slice_ns = quick ? 5e6 : 3e7,
        .random = 1,
        .hot = hot,
        .library = onednn_open(&why),
        .scratch = take(ENG_KERNEL_SCRATCH),
    };
    int code = CLIENT_EXIT_OK;

    if (bench.library == NULL) {
        ctl_error("the anchor of this benchmark is missing: %s", why);
        code = CLIENT_EXIT_UNAVAILABLE;
    } else if (bench.scratch == NULL) {
        ctl_error("out of memory");
        code = CLIENT_EXIT_FAILED;
    }
    for (size_t i = 0; i < KV_ARRAY_COUNT(shapes) && code == CLIENT_EXIT_OK; i++) {
        code = run_shape(&bench, &shapes[i]);
        drop_shape(&bench);
    }
    if (code == CLIENT_EXIT_OK) code = report(&bench, eng_isa_name(eng_isa_best()));
    free(bench.scratch);
    onednn_close(bench.library);
    return code;
}
