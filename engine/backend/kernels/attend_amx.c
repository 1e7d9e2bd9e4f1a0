/*
 * Attention on the tile unit.
 *
 * Heads stand in the 16 columns of a result: scores are keys (first operand, rows as they lie) by
 * queries (second operand, packed once per token), so that the softmax of 16 heads is arithmetic
 * between vectors, in the order of the keys.  Probabilities are then turned around to be the first
 * operand, [head][key], and the second is pairs of rows interleaved.  A block's values are summed
 * by the tile unit and added to the running output in fp32.
 *
 * A window may begin at any row: pairs exist for each row, and a token takes every second one from
 * its first, so which rows are paired depends on its columns alone and not on where they lie.
 */

#include "engine/backend/kernels/attend_amx.h"

#include "engine/backend/kernels/amx_expand.h"
#include "engine/backend/kernels/attend.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define BLOCK 64u
#define DIM_MAX ENG_ATTEND_DIM_MAX
#define STEPS_MAX (DIM_MAX / 32)

/* Columns of one block that lie in one set of rows. */
struct run {
    const struct eng_rows *rows;
    uint32_t first, count;
};

struct scratch {
    uint8_t queries[STEPS_MAX][AMX_TILE_BYTES]; /* Of 16 heads. */
    float scores[BLOCK + 32][16];               /* [key][head] */
    uint8_t probabilities[6][AMX_TILE_BYTES];   /* [head][key], 32 keys a tile */
    float block[16][DIM_MAX];
    float sum[16][DIM_MAX];
};
_Static_assert(sizeof(struct scratch) <= ENG_ATTEND_SCRATCH, "scratch");

/* ---- Rows ---- */

/* 16 scales of main rows: eng_e4m3_decode() in every lane. */
AMX_TARGET static inline __m512 main_scales(const uint8_t *codes, __mmask16 here)
{
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, codes));
    const __m512i size = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x7f)), 20);
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(0x1p120f));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
}

/* A main row, which has a scale for each 16 values. */
AMX_TARGET static void expand_main(const uint8_t *row, uint32_t dim, uint16_t *out)
{
    static const float e2m1[16]
        __attribute__((aligned(64))) = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const __m512 table = _mm512_load_ps(e2m1);
    const uint32_t groups = dim / 16;
    float scales[DIM_MAX / 16] __attribute__((aligned(64)));

    for (uint32_t g = 0; g < groups; g += 16) {
        const __mmask16 here = groups - g >= 16 ? 0xffff : (__mmask16)((1u << (groups - g)) - 1);
        _mm512_store_ps(scales + g, main_scales(row + dim / 2 + g, here));
    }
    for (uint32_t i = 0; i < dim; i += 32) {
        const __m128i data = _mm_loadu_si128((const __m128i *)(row + i / 2));
        const __m128i low = _mm_and_si128(data, _mm_set1_epi8(15));
        const __m128i high = _mm_and_si128(_mm_srli_epi16(data, 4), _mm_set1_epi8(15));
        const __m512i left = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
        const __m512i right = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(low, high));
        const __m512 a =
            _mm512_mul_ps(_mm512_permutexvar_ps(left, table), _mm512_set1_ps(scales[i / 16]));
        const __m512 b =
            _mm512_mul_ps(_mm512_permutexvar_ps(right, table), _mm512_set1_ps(scales[i / 16 + 1]));
        _mm512_store_si512(out + i,
                           amx_upper_halves(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }
}

/* 32 values from column i on; not of a main row. */
AMX_TARGET static inline __m512i expand_row(enum eng_row_kind kind, const uint8_t *row,
                                            uint32_t dim, uint32_t i)
{
    if (kind == ENG_ROW_PLAIN) return _mm512_loadu_si512(row + 2 * i);
    const bool is_window = kind == ENG_ROW_WINDOW;
    const uint8_t scale = row[(is_window ? dim : dim / 2) + i / 32];
    if (is_window && scale >= AMX_FP8_SCALE_MIN && scale <= AMX_FP8_SCALE_MAX)
        return amx_expand_fp8(_mm256_loadu_si256((const __m256i *)(row + i)), amx_fp8_bias(scale),
                              amx_fp8_tiny(scale));
    if (!is_window && scale >= AMX_FP4_SCALE_MIN && scale <= AMX_FP4_SCALE_MAX)
        return amx_expand_fp4(row + i / 2, scale);
    float values[32];
    const float factor = eng_ue8m0_decode(scale);
    for (uint32_t j = 0; j < 32; j++)
        values[j] = is_window
                        ? eng_e4m3_decode(row[i + j]) * factor
                        : eng_fp4_decode((uint8_t)(row[(i + j) / 2] >> (4 * (j % 2)))) * factor;
    return amx_upper_halves(_mm512_loadu_si512(values), _mm512_loadu_si512(values + 16));
}

static uint16_t *plain_row(const struct eng_rows *rows, uint32_t row)
{
    return (uint16_t *)rows->memory + (size_t)row * rows->dim;
}

/* Rows `row` and row + 1. */
static uint32_t *pair_row(const struct eng_rows *rows, uint32_t row)
{
    uint8_t *pairs = (uint8_t *)rows->memory + amx_rows_plain_bytes(rows->capacity, rows->dim);
    return (uint32_t *)(void *)pairs + (size_t)(rows->sliding ? row : row / 2) * rows->dim;
}

AMX_TARGET static void interleave(const struct eng_rows *rows, uint32_t row)
{
    const uint16_t *a = plain_row(rows, row), *b = plain_row(rows, row + 1);
    uint32_t *out = pair_row(rows, row);

    for (uint32_t i = 0; i < rows->dim; i += 16) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(a + i)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(b + i)));
        _mm512_store_si512(out + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

AMX_TARGET static void prepare(const struct eng_rows *to, enum eng_row_kind kind, uint32_t first,
                               const uint8_t *const *rows, uint32_t count)
{
    const uint32_t end = first + count, step = to->sliding ? 1 : 2;

    assert(end <= to->capacity && kind != ENG_ROW_INDEX);
    for (uint32_t r = 0; r < count; r++) {
        uint16_t *out = plain_row(to, first + r);
        if (kind == ENG_ROW_MAIN) expand_main(rows[r], to->dim, out);
        for (uint32_t i = 0; kind != ENG_ROW_MAIN && i < to->dim; i += 32)
            _mm512_store_si512(out + i, expand_row(kind, rows[r], to->dim, i));
    }
    memset(plain_row(to, end), 0, (size_t)AMX_ROWS_PAD * to->dim * 2);
    /* The row before the first was paired with a row of zeros. */
    uint32_t row = first > 0 ? first - 1 : 0;
    if (!to->sliding) row &= ~1u;
    for (; row < end; row += step)
        interleave(to, row);
    const uint32_t pad = to->sliding ? AMX_ROWS_PAD : (to->capacity + AMX_ROWS_PAD - row) / 2;
    memset(pair_row(to, row), 0, (size_t)KV_MIN(AMX_ROWS_PAD, pad) * to->dim * 4);
}

/* ---- Attend ---- */

/* 16 heads of q from `head` on to tiles; heads beyond the last are zero. */
AMX_TARGET static void pack_heads(const struct eng_attention_args *a, uint32_t head,
                                  struct scratch *s)
{
    uint32_t rows[16][16] __attribute__((aligned(64)));
    __m512i out[16];

    for (uint32_t step = 0; step < a->dim / 32; step++) {
        for (uint32_t h = 0; h < 16; h++) {
            __m512i low = _mm512_setzero_si512(), high = low;
            if (head + h < a->heads) {
                const float *q = a->q + (size_t)(head + h) * a->dim + 32 * step;
                low = _mm512_loadu_si512(q);
                high = _mm512_loadu_si512(q + 16);
            }
            _mm512_store_si512(rows[h], amx_upper_halves(low, high));
        }
        amx_transpose(rows, 64, out);
        for (uint32_t i = 0; i < 16; i++)
            _mm512_store_si512(s->queries[step] + 64 * i, out[i]);
    }
}

/* Scores of a run to out; up to 31 rows behind them are overwritten. */
AMX_TARGET static void score_run(const struct run *run, const struct scratch *s, float (*out)[16])
{
    const size_t stride = (size_t)run->rows->dim * 2;

    for (uint32_t key = 0; key < run->count; key += 32) {
        const uint8_t *rows = (const uint8_t *)plain_row(run->rows, run->first + key);
        AMX_ZERO(0);
        AMX_ZERO(1);
        for (uint32_t step = 0; step < run->rows->dim / 32; step++) {
            AMX_LOAD(4, s->queries[step], 64);
            AMX_LOAD(5, rows + 64 * step, stride);
            AMX_DOT(0, 5, 4);
            if (run->count - key > 16) {
                AMX_LOAD(6, rows + 16 * stride + 64 * step, stride);
                AMX_DOT(1, 6, 4);
            }
        }
        AMX_STORE(0, out[key], 64);
        AMX_STORE(1, out[key + 16], 64);
    }
}

/* eng_exp for 16 lanes, with fused multiply-add. */
AMX_TARGET static inline __m512 exp_lanes(__m512 x)
{
    const __m512 low = _mm512_set1_ps(-87.0f);
    const __m512 clamped = _mm512_min_ps(_mm512_max_ps(x, low), _mm512_set1_ps(88.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(0x1.715476p0f)),
                                          _MM_FROUND_TO_NEAREST_INT | 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), clamped);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
    __m512 p = _mm512_set1_ps(0x1.6c16c2p-10f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.111112p-7f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555556p-5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555556p-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), p, n);
}

/* Probabilities of a run, keys [0, count) of `scores`, to whole tiles of 32 keys. */
AMX_TARGET static void turn_run(const float (*scores)[16], uint32_t count, uint8_t *tiles)
{
    __m512i pairs[16] __attribute__((aligned(64))), out[16];

    for (uint32_t key = 0; key < count; key += 32, tiles += AMX_TILE_BYTES) {
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t k = key + 2 * i;
            __m512i low = _mm512_setzero_si512(), high = low;
            if (k < count) low = amx_round(_mm512_load_ps(scores[k]));
            if (k + 1 < count) high = amx_round(_mm512_load_ps(scores[k + 1]));
            pairs[i] = _mm512_or_si512(_mm512_srli_epi32(low, 16),
                                       _mm512_and_si512(high, _mm512_set1_epi32((int)0xffff0000u)));
        }
        amx_transpose(pairs, 64, out);
        for (uint32_t i = 0; i < 16; i++)
            _mm512_store_si512(tiles + 64 * i, out[i]);
    }
}

/* One softmax step over `count` keys for 16 heads; returns what the sums so far shrink by. */
AMX_TARGET static __m512 soften(struct scratch *s, uint32_t count, float scale, __m512 *max,
                                __m512 *den)
{
    __m512 top = *max, sum = _mm512_setzero_ps();

    for (uint32_t c = 0; c < count; c++) {
        const __m512 v = _mm512_mul_ps(_mm512_load_ps(s->scores[c]), _mm512_set1_ps(scale));
        _mm512_store_ps(s->scores[c], v);
        top = _mm512_max_ps(top, v);
    }
    for (uint32_t c = 0; c < count; c++) {
        const __m512 p = exp_lanes(_mm512_sub_ps(_mm512_load_ps(s->scores[c]), top));
        sum = _mm512_add_ps(sum, p);
        _mm512_store_ps(s->scores[c], p);
    }
    const __m512 shrink = exp_lanes(_mm512_sub_ps(*max, top));
    *den = _mm512_fmadd_ps(*den, shrink, sum);
    *max = top;
    return shrink;
}

/* s->block = probabilities x values of the runs, for 16 heads. */
AMX_TARGET static void weigh(const struct run *runs, uint32_t run_count, uint32_t dim,
                             struct scratch *s)
{
    for (uint32_t column = 0; column < dim; column += 32) {
        const uint8_t *tile = s->probabilities[0];
        AMX_ZERO(0);
        AMX_ZERO(1);
        for (uint32_t i = 0; i < run_count; i++) {
            const struct eng_rows *rows = runs[i].rows;
            const size_t stride = (size_t)dim * (rows->sliding ? 8 : 4);
            for (uint32_t key = 0; key < runs[i].count; key += 32, tile += AMX_TILE_BYTES) {
                const uint32_t *values = pair_row(rows, runs[i].first + key) + column;
                AMX_LOAD(4, tile, 64);
                AMX_LOAD(5, values, stride);
                AMX_LOAD(6, values + 16, stride);
                AMX_DOT(0, 4, 5);
                AMX_DOT(1, 4, 6);
            }
        }
        AMX_STORE(0, &s->block[0][column], sizeof(s->block[0]));
        AMX_STORE(1, &s->block[0][column + 16], sizeof(s->block[0]));
    }
}

AMX_TARGET static void accumulate(struct scratch *s, uint32_t heads, uint32_t dim, __m512 shrink)
{
    float factor[16] __attribute__((aligned(64)));

    _mm512_store_ps(factor, shrink);
    for (uint32_t h = 0; h < heads; h++) {
        const __m512 f = _mm512_set1_ps(factor[h]);
        for (uint32_t i = 0; i < dim; i += 16)
            _mm512_store_ps(&s->sum[h][i], _mm512_fmadd_ps(_mm512_load_ps(&s->sum[h][i]), f,
                                                           _mm512_load_ps(&s->block[h][i])));
    }
}

/* The runs of the block of columns from `first` on. */
static uint32_t find_runs(const struct eng_attention_args *a, uint32_t first, struct run runs[2])
{
    const uint32_t list = a->list == NULL ? 0 : a->list_count;
    const uint32_t end = KV_MIN(first + BLOCK, a->window_columns + list);
    uint32_t count = 0;

    if (first < a->window_valid)
        runs[count++] =
            (struct run){a->window, a->window_first + first, KV_MIN(end, a->window_valid) - first};
    if (end > a->window_columns) {
        const uint32_t from = KV_MAX(first, a->window_columns);
        runs[count++] = (struct run){a->list, from - a->window_columns, end - from};
    }
    return count;
}

AMX_TARGET static void finish_heads(const struct eng_attention_args *a, uint32_t head,
                                    struct scratch *s, __m512 max, __m512 den)
{
    const uint32_t heads = KV_MIN(16u, a->heads - head);
    const __mmask16 here = (__mmask16)((1u << heads) - 1);
    float divisor[16] __attribute__((aligned(64)));

    den = _mm512_add_ps(den,
                        exp_lanes(_mm512_sub_ps(_mm512_maskz_loadu_ps(here, a->sink + head), max)));
    _mm512_store_ps(divisor, den);
    for (uint32_t h = 0; h < heads; h++) {
        float *o = a->o + (size_t)(head + h) * a->dim;
        for (uint32_t i = 0; i < a->dim; i += 16)
            _mm512_storeu_ps(
                o + i, _mm512_div_ps(_mm512_load_ps(&s->sum[h][i]), _mm512_set1_ps(divisor[h])));
    }
}

AMX_TARGET static void attend_heads(const struct eng_attention_args *a, uint32_t head,
                                    struct scratch *s)
{
    const uint32_t columns = a->window_columns + (a->list == NULL ? 0 : a->list_count);
    const uint32_t heads = KV_MIN(16u, a->heads - head);
    __m512 max = _mm512_set1_ps(-1e30f), den = _mm512_setzero_ps();
    struct run runs[2];

    for (uint32_t h = 0; h < heads; h++)
        memset(s->sum[h], 0, a->dim * sizeof(float));
    pack_heads(a, head, s);
    for (uint32_t first = 0; first < columns; first += BLOCK) {
        const uint32_t run_count = find_runs(a, first, runs);
        uint32_t count = 0, tiles = 0;
        if (run_count == 0) continue;
        for (uint32_t i = 0; i < run_count; i++) {
            score_run(&runs[i], s, s->scores + count);
            count += runs[i].count;
        }
        const __m512 shrink = soften(s, count, a->scale, &max, &den);
        count = 0;
        for (uint32_t i = 0; i < run_count; i++) {
            turn_run((const float(*)[16])(s->scores + count), runs[i].count,
                     s->probabilities[tiles]);
            count += runs[i].count;
            tiles += (runs[i].count + 31) / 32;
        }
        weigh(runs, run_count, a->dim, s);
        accumulate(s, heads, a->dim, shrink);
    }
    finish_heads(a, head, s, max, den);
}

static void attend(const struct eng_attention_args *a, void *scratch)
{
    assert(a->dim % 32 == 0 && a->dim <= DIM_MAX);
    assert(a->window->sliding && (uintptr_t)scratch % 64 == 0);
    /* Blocks of the list begin at even rows, or pairs must exist for each. */
    assert(a->list == NULL || a->list->sliding || a->window_columns % 2 == 0);
    amx_begin();
    for (uint32_t head = 0; head < a->heads; head += 16)
        attend_heads(a, head, scratch);
    amx_end();
}

/* ---- Scores ---- */

/* 32 keys as the second operand, and the dots of 32 queries with them. */
struct score_scratch {
    uint8_t keys[2][STEPS_MAX][AMX_TILE_BYTES];
    float dots[2][2][16][16]; /* [keys][queries] */
};
_Static_assert(sizeof(struct score_scratch) <= ENG_ATTEND_SCRATCH, "scratch");

AMX_TARGET static void pack_queries(const float *iq, uint32_t tokens, uint32_t heads, uint32_t dim,
                                    void *queries)
{
    const size_t values = (size_t)tokens * heads * dim;
    uint16_t *out = queries;

    for (size_t i = 0; i < values; i += 32)
        _mm512_store_si512(
            out + i, amx_upper_halves(_mm512_loadu_si512(iq + i), _mm512_loadu_si512(iq + i + 16)));
    memset(out + values, 0, (size_t)32 * dim * 2);
}

AMX_TARGET static void pack_keys(const struct eng_score_args *a, uint32_t first, uint32_t side,
                                 struct score_scratch *s)
{
    uint32_t rows[16][16] __attribute__((aligned(64)));
    __m512i out[16];

    for (uint32_t step = 0; step < a->dim / 32; step++) {
        for (uint32_t k = 0; k < 16; k++)
            _mm512_store_si512(rows[k],
                               first + k < a->key_count
                                   ? expand_row(a->kind, a->keys[first + k], a->dim, 32 * step)
                                   : _mm512_setzero_si512());
        amx_transpose(rows, 64, out);
        for (uint32_t i = 0; i < 16; i++)
            _mm512_store_si512(s->keys[side][step] + 64 * i, out[i]);
    }
}

/* Dots of queries [query, query + 32) with the 32 keys. */
AMX_TARGET static void dot_queries(const struct eng_score_args *a, size_t query,
                                   struct score_scratch *s)
{
    const size_t stride = (size_t)a->dim * 2;
    const uint8_t *rows = (const uint8_t *)a->queries + query * stride;

    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (uint32_t step = 0; step < a->dim / 32; step++) {
        AMX_LOAD(4, rows + 64 * step, stride);
        AMX_LOAD(5, rows + 16 * stride + 64 * step, stride);
        AMX_LOAD(6, s->keys[0][step], 64);
        AMX_LOAD(7, s->keys[1][step], 64);
        AMX_DOT(0, 4, 6);
        AMX_DOT(1, 5, 6);
        AMX_DOT(2, 4, 7);
        AMX_DOT(3, 5, 7);
    }
    AMX_STORE(0, s->dots[0][0], 64);
    AMX_STORE(1, s->dots[0][1], 64);
    AMX_STORE(2, s->dots[1][0], 64);
    AMX_STORE(3, s->dots[1][1], 64);
}

/* Adds the heads of 32 queries to the scores of their tokens: same order, same operations as the
 * other family. */
AMX_TARGET static void add_heads(const struct eng_score_args *a, size_t query, uint32_t first,
                                 const struct score_scratch *s, __m512 sum[2])
{
    const uint32_t keys = a->key_count - first;
    const __mmask16 left = keys >= 16 ? 0xffff : (__mmask16)((1u << keys) - 1);
    const __mmask16 right = keys >= 32   ? 0xffff
                            : keys <= 16 ? 0
                                         : (__mmask16)((1u << (keys - 16)) - 1);
    const size_t total = (size_t)a->tokens * a->heads;

    for (uint32_t i = 0; i < 32 && query + i < total; i++) {
        const size_t token = (query + i) / a->heads, head = (query + i) % a->heads;
        const __m512 w = _mm512_set1_ps(a->weights[token * a->weights_stride + head]);
        for (uint32_t side = 0; side < 2; side++) {
            const __m512 dot = _mm512_load_ps(s->dots[side][i / 16][i % 16]);
            const __m512 part = _mm512_mul_ps(w, _mm512_max_ps(dot, _mm512_setzero_ps()));
            sum[side] = head == 0 ? part : _mm512_add_ps(sum[side], part);
        }
        if (head + 1 < a->heads) continue;
        float *out = a->scores + token * a->scores_stride + first;
        _mm512_mask_storeu_ps(out, left, sum[0]);
        _mm512_mask_storeu_ps(out + 16, right, sum[1]);
    }
}

AMX_TARGET static void score(const struct eng_score_args *a, void *scratch)
{
    struct score_scratch *s = scratch;
    const size_t total = (size_t)a->tokens * a->heads;

    assert(a->dim % 32 == 0 && a->dim <= DIM_MAX && (uintptr_t)scratch % 64 == 0);
    amx_begin();
    for (uint32_t first = 0; first < a->key_count; first += 32) {
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        pack_keys(a, first, 0, s);
        pack_keys(a, first + 16, 1, s);
        for (size_t query = 0; query < total; query += 32) {
            dot_queries(a, query, s);
            add_heads(a, query, first, s, sum);
        }
    }
    amx_end();
}

const struct eng_attend_ops eng_attend_amx = {
    .prepare = prepare,
    .attend = attend,
    .pack_queries = pack_queries,
    .score = score,
};
