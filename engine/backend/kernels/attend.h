#pragma once

/*
 * Attention of one token over its window and its list, and the scores of index keys (the model's
 * specification, sections 2.3 and 2.5).
 *
 * Packed rows (engine/model/quant.h) are prepared once, in the form the family reads, and then used
 * by every token or layer that sees them.  One query goes over its columns in blocks of 64, window
 * first in position order, empty window columns left out, then the list; the softmax is online,
 * probabilities are rounded to bf16 for the values and summed unrounded, the sink enters only the
 * denominator.  A result depends on the rows and the numbers of columns alone.
 *
 * Pure; any thread; memory is the caller's and 64 B aligned.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a row is stored.  WINDOW, MAIN and INDEX as in quant.h; PLAIN is bf16, two bytes a value; F32
 * is for the fp32 family only. */
enum eng_row_kind { ENG_ROW_WINDOW, ENG_ROW_MAIN, ENG_ROW_INDEX, ENG_ROW_PLAIN, ENG_ROW_F32 };

/* Rows that can be attended to.  With `sliding`, a token may begin at any row (a window); without,
 * only at row 0 (a list), which takes a third less memory. */
struct eng_rows {
    void *memory; /* eng_rows_bytes() */
    uint32_t capacity;
    uint32_t dim; /* A multiple of 32, at most ENG_ATTEND_DIM_MAX. */
    bool sliding;
};

#define ENG_ATTEND_DIM_MAX 512u
/* What one thread needs for attend or score. */
#define ENG_ATTEND_SCRATCH (256u * 1024u)

/* The same size for every family. */
size_t eng_rows_bytes(uint32_t capacity, uint32_t dim, bool sliding);

struct eng_attention_args {
    const float *q; /* [heads][dim], bf16 values */
    uint32_t heads;
    uint32_t dim;
    float scale;
    const float *sink;             /* heads */
    const struct eng_rows *window; /* sliding */
    uint32_t window_first;         /* Row of column 0. */
    uint32_t window_valid;
    uint32_t window_columns;     /* The list begins at this column. */
    const struct eng_rows *list; /* NULL: none.  Sliding if window_columns is odd. */
    uint32_t list_count;
    float *o; /* [heads][dim], fp32 */
};

struct eng_score_args {
    const void *queries; /* eng_attend_ops.pack_queries */
    uint32_t tokens, heads;
    uint32_t dim;         /* A multiple of 32, at most ENG_ATTEND_DIM_MAX. */
    const float *weights; /* [tokens], weights_stride apart, one per head */
    size_t weights_stride;
    enum eng_row_kind kind; /* INDEX, PLAIN or F32. */
    const uint8_t *const *keys;
    uint32_t key_count;
    float *scores; /* [tokens][key_count] */
    size_t scores_stride;
};

size_t eng_queries_bytes(uint32_t tokens, uint32_t heads, uint32_t dim);

struct eng_attend_ops {
    /* Rows [first, first + count) of `to` from packed rows of `kind` (not INDEX).  Rows are given
     * in ascending order; those beyond the last one given are not part of `to`. */
    void (*prepare)(const struct eng_rows *to, enum eng_row_kind kind, uint32_t first,
                    const uint8_t *const *rows, uint32_t count);
    void (*attend)(const struct eng_attention_args *args, void *scratch);
    /* iq: [tokens][heads][dim], bf16 values. */
    void (*pack_queries)(const float *iq, uint32_t tokens, uint32_t heads, uint32_t dim,
                         void *queries);
    /* scores[t][j] = sum over heads, ascending, of weight x max(0, query . key j), all fp32. */
    void (*score)(const struct eng_score_args *args, void *scratch);
};

extern const struct eng_attend_ops eng_attend_amx;
extern const struct eng_attend_ops eng_attend_avx512;
extern const struct eng_attend_ops eng_attend_avx2;
extern const struct eng_attend_ops eng_attend_base;
/* The fp32 family without the rounding of probabilities, on rows of any kind: the reference mode.
 */
extern const struct eng_attend_ops eng_attend_unrounded_avx512;
extern const struct eng_attend_ops eng_attend_unrounded_avx2;
extern const struct eng_attend_ops eng_attend_unrounded_base;
