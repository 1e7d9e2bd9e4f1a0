/*
 * Attention and scores from packed rows: near a softmax in double, the same bits within a family,
 * and independent of where rows lie and what lies beside them.
 */

#include "engine/backend/kernels/compute.h"
#include "engine/model/quant.h"
#include "tests/harness.h"
#include "tests/unit/kernels_draw.h"

#include <math.h>

#define WINDOW_MAX 200u
#define LIST_MAX 150u

/* Packed rows and what they decode to. */
struct store {
    enum eng_row_kind kind;
    uint32_t dim;
    uint8_t *bytes;
    const uint8_t *rows[512];
    float *values;
};

static struct store make(enum eng_row_kind kind, uint32_t dim, uint32_t count)
{
    struct store s = {.kind = kind, .dim = dim};
    const size_t row_bytes = kind == ENG_ROW_WINDOW  ? eng_window_row_bytes(dim)
                             : kind == ENG_ROW_MAIN  ? eng_main_row_bytes(dim)
                             : kind == ENG_ROW_INDEX ? eng_index_row_bytes(dim)
                                                     : 2 * (size_t)dim;
    s.bytes = take(count * row_bytes);
    s.values = take((size_t)count * dim * sizeof(float));
    for (uint32_t r = 0; r < count; r++) {
        float *v = s.values + (size_t)r * dim;
        uint8_t *row = s.bytes + r * row_bytes;
        const float gain = ldexpf(1, (int)(draw() % 3));
        for (uint32_t i = 0; i < dim; i++)
            v[i] = draw() % 32 == 0 ? 0.0f : eng_bf16_round(gain * draw_float());
        s.rows[r] = row;
        if (kind == ENG_ROW_WINDOW) {
            eng_window_row_encode(v, dim, row);
            eng_window_row_decode(row, dim, v);
        } else if (kind == ENG_ROW_MAIN) {
            eng_main_row_encode(v, dim, row);
            eng_main_row_decode(row, dim, v);
        } else if (kind == ENG_ROW_INDEX) {
            eng_index_row_encode(v, dim, row);
            eng_index_row_decode(row, dim, v);
        } else {
            for (uint32_t i = 0; i < dim; i++) {
                const uint16_t code = eng_bf16_encode(v[i]);
                memcpy(row + 2 * i, &code, sizeof(code));
            }
        }
    }
    return s;
}

static void drop(struct store *s)
{
    free(s->bytes);
    free(s->values);
}

static struct eng_rows prepare(const struct eng_attend_ops *ops, const struct store *s,
                               uint32_t from, uint32_t count, bool sliding, uint32_t step)
{
    struct eng_rows rows = {.capacity = count, .dim = s->dim, .sliding = sliding};
    rows.memory = take(eng_rows_bytes(count, s->dim, sliding));
    memset(rows.memory, 0xff, eng_rows_bytes(count, s->dim, sliding)); /* NaN everywhere. */
    for (uint32_t r = 0; r < count; r += step)
        ops->prepare(&rows, s->kind, r, s->rows + from + r, r + step < count ? step : count - r);
    return rows;
}

struct setting {
    uint32_t heads, dim, window, first, valid, list;
};

static double reference(const struct setting *c, const struct store *w, const struct store *l,
                        const float *q, const float *sink, const float *o)
{
    double worst = 0, most = 0;
    double *want = take(c->dim * sizeof(*want));

    for (uint32_t h = 0; h < c->heads; h++) {
        double sum = exp((double)sink[h]);
        memset(want, 0, c->dim * sizeof(*want));
        for (uint32_t i = 0; i < c->valid + c->list; i++) {
            const float *key = i < c->valid ? w->values + (size_t)(c->first + i) * c->dim
                                            : l->values + (size_t)(i - c->valid) * c->dim;
            double dot = 0;
            for (uint32_t d = 0; d < c->dim; d++)
                dot += (double)q[h * c->dim + d] * (double)key[d];
            const double p = exp(dot / sqrt((double)c->dim));
            sum += p;
            for (uint32_t d = 0; d < c->dim; d++)
                want[d] += p * (double)key[d];
        }
        for (uint32_t d = 0; d < c->dim; d++) {
            worst = fmax(worst, fabs(want[d] / sum - (double)o[h * c->dim + d]));
            most = fmax(most, fabs(want[d] / sum));
        }
    }
    free(want);
    return most > 0 ? worst / most : worst;
}

static void run(const struct eng_attend_ops *ops, const struct setting *c,
                const struct eng_rows *window, uint32_t first, const struct eng_rows *list,
                const float *q, const float *sink, float *o)
{
    void *scratch = take(ENG_ATTEND_SCRATCH);
    memset(scratch, 0xff, ENG_ATTEND_SCRATCH);
    ops->attend(&(struct eng_attention_args){.q = q,
                                             .heads = c->heads,
                                             .dim = c->dim,
                                             .scale = 1.0f / sqrtf((float)c->dim),
                                             .sink = sink,
                                             .window = window,
                                             .window_first = first,
                                             .window_valid = c->valid,
                                             .window_columns = c->window,
                                             .list = c->list == 0 ? NULL : list,
                                             .list_count = c->list,
                                             .o = o},
                scratch);
    free(scratch);
}

static void check(const struct setting *c, enum eng_row_kind window_kind,
                  enum eng_row_kind list_kind)
{
    struct store w = make(window_kind, c->dim, WINDOW_MAX), l = make(list_kind, c->dim, LIST_MAX);
    const size_t values = (size_t)c->heads * c->dim, bytes = values * sizeof(float);
    float *q = take(bytes), *o = take(bytes), *again = take(bytes), *fp32 = NULL;
    float sink[64];

    for (size_t i = 0; i < values; i++)
        q[i] = eng_bf16_round(3 * draw_float());
    for (uint32_t h = 0; h < c->heads; h++)
        sink[h] = 2 * draw_float();
    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        const struct eng_kernel_set *set = eng_kernels_of((enum eng_isa)isa, false);
        if (set == NULL) continue;
        const struct eng_attend_ops *ops = set->attend;
        struct eng_rows window = prepare(ops, &w, 0, WINDOW_MAX, true, WINDOW_MAX);
        struct eng_rows list = prepare(ops, &l, 0, c->list, c->window % 2 == 1, LIST_MAX);
        run(ops, c, &window, c->first, &list, q, sink, o);
        /* Rounded probabilities cost up to 2^-9 each. */
        EXPECT(reference(c, &w, &l, q, sink, o) <= 4e-3);
        if (isa != ENG_ISA_AMX) {
            if (fp32 == NULL) {
                fp32 = take(bytes);
                memcpy(fp32, o, bytes);
            }
            EXPECT_EQ_MEM(o, fp32, bytes);
        }
        /* Only this token's rows, given in small steps: same bits. */
        struct eng_rows own = prepare(ops, &w, c->first, c->valid, true, 3);
        run(ops, c, &own, 0, &list, q, sink, again);
        EXPECT_EQ_MEM(again, o, bytes);
        free(own.memory);
        free(window.memory);
        free(list.memory);
    }
    /* The comparison sees a row that is missing. */
    if (c->valid > 1 && c->valid + c->list < 40) {
        struct setting less = *c;
        less.valid--;
        EXPECT(reference(&less, &w, &l, q, sink, fp32) > 1e-3);
    }
    free(q);
    free(o);
    free(again);
    free(fp32);
    drop(&w);
    drop(&l);
}

static void test_attend(void)
{
    const struct setting settings[] = {
        {4, 64, 16, 0, 16, 16},      {4, 64, 16, 3, 16, 0},     {4, 64, 16, 0, 5, 3},
        {8, 512, 128, 17, 128, 100}, {8, 512, 128, 0, 77, 130}, {64, 512, 128, 72, 128, 64},
        {20, 96, 100, 1, 99, 61},    {2, 32, 16, 0, 1, 0},      {17, 128, 65, 10, 65, 65},
        {4, 64, 16, 7, 2, 0},
    };
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        check(&settings[i], ENG_ROW_WINDOW, ENG_ROW_MAIN);
        check(&settings[i], ENG_ROW_PLAIN, ENG_ROW_PLAIN);
    }
}

static void check_scores(uint32_t tokens, uint32_t heads, uint32_t dim, uint32_t keys,
                         enum eng_row_kind kind)
{
    struct store q = make(ENG_ROW_INDEX, dim, tokens * heads), k = make(kind, dim, keys);
    const size_t count = (size_t)tokens * keys;
    float *weights = take((size_t)tokens * heads * sizeof(float));
    float *scores = take(count * sizeof(float)), *first = take(count * sizeof(float));
    void *queries = take(eng_queries_bytes(tokens, heads, dim));
    void *scratch = take(ENG_ATTEND_SCRATCH);
    bool have = false;

    for (uint32_t i = 0; i < tokens * heads; i++)
        weights[i] = draw_float();
    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        const struct eng_kernel_set *set = eng_kernels_of((enum eng_isa)isa, false);
        if (set == NULL) continue;
        const struct eng_attend_ops *ops = set->attend;
        ops->pack_queries(q.values, tokens, heads, dim, queries);
        ops->score(&(struct eng_score_args){.queries = queries,
                                            .tokens = tokens,
                                            .heads = heads,
                                            .dim = dim,
                                            .weights = weights,
                                            .weights_stride = heads,
                                            .kind = kind,
                                            .keys = k.rows,
                                            .key_count = keys,
                                            .scores = scores,
                                            .scores_stride = keys},
                   scratch);
        /* Products of FP4 values are exact, and so are these sums: one result in both families. */
        if (kind == ENG_ROW_INDEX || isa < ENG_ISA_AMX) {
            if (!have) memcpy(first, scores, count * sizeof(float));
            have = true;
            EXPECT_EQ_MEM(scores, first, count * sizeof(float));
        }
        for (size_t at = 0; at < count; at++) {
            double want = 0, size = 0;
            for (uint32_t h = 0; h < heads; h++) {
                const size_t query = at / keys * heads + h;
                double dot = 0;
                for (uint32_t d = 0; d < dim; d++)
                    dot +=
                        (double)q.values[query * dim + d] * (double)k.values[at % keys * dim + d];
                want += (double)weights[query] * fmax(dot, 0);
                size += fabs((double)weights[query] * dot);
            }
            EXPECT(fabs(want - (double)scores[at]) <= 1e-5 * size);
        }
    }
    free(weights);
    free(scores);
    free(first);
    free(queries);
    free(scratch);
    drop(&q);
    drop(&k);
}

static void test_scores(void)
{
    check_scores(1, 2, 32, 1, ENG_ROW_INDEX);
    check_scores(7, 2, 32, 45, ENG_ROW_INDEX);
    check_scores(5, 8, 128, 100, ENG_ROW_INDEX);
    check_scores(3, 32, 128, 64, ENG_ROW_INDEX);
    check_scores(1, 70, 64, 17, ENG_ROW_INDEX);
    check_scores(4, 8, 128, 33, ENG_ROW_PLAIN);
}

int main(void)
{
    test_attend();
    test_scores();
    HARNESS_END();
}
