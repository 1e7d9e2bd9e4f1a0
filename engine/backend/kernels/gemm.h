#pragma once

/*
 * y = W x on weights exactly as a checkpoint stores them: nothing is expanded or repacked in
 * memory, a block at a time is decoded into cache.
 *
 *   format  data                        scale (ue8m0, value 2^(code - 127))
 *   FP8     [n][k] e4m3                 [ceil(n/32)][k/32], one per 32 x 32 tile
 *   FP4     [n][k/2], two e2m1 a byte,  [n][k/32], one per 32 columns of a row
 *           even column in the low half
 *   BF16    [n][k]                      none
 *   F32     [n][k]                      none
 *
 * (The model's specification, section 7.1.)  n is any number from 1, k a multiple of 32 for FP8 and
 * FP4, of 16 for the others.  Data may be read at any alignment and is never read beyond its end.
 *
 * Inputs are fp32 arrays [rows][k] of bf16 values.  They are packed once, in the form the family
 * reads, and then used for as many matrices as one likes.  Every output is one sum in one fixed
 * order: it depends neither on the number of rows, nor on a row's place among them, nor on threads.
 *
 * Pure; any thread; memory is the caller's.  Packed buffers and scratch are 64 B aligned.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Packed rows come in blocks of this many. */
#define ENG_PACK_ROWS 16u
/* Outputs are divided among threads in units of this many. */
#define ENG_GEMM_UNIT 32u
/* What one thread needs at most, for any shape and any number of rows. */
#define ENG_KERNEL_SCRATCH (1024u * 1024u)

enum eng_format { ENG_FORMAT_FP8, ENG_FORMAT_FP4, ENG_FORMAT_BF16, ENG_FORMAT_F32 };

/* Borrowed: the mapped file owns the bytes. */
struct eng_matrix {
    enum eng_format format;
    uint32_t n, k;
    const uint8_t *data;
    const uint8_t *scale; /* NULL for BF16 and F32. */
};

/* Bytes as stored; what a pass over the matrix must read. */
size_t eng_matrix_bytes(const struct eng_matrix *matrix);
/* Rows [first, first + n) as a matrix of its own; `first` is a multiple of 32 for FP8. */
struct eng_matrix eng_matrix_rows(const struct eng_matrix *matrix, uint32_t first, uint32_t n);

/* One weight, by the book: for tests and for what happens rarely. */
float eng_matrix_value(const struct eng_matrix *matrix, uint32_t n, uint32_t k);

struct eng_pack_args {
    const float *x;
    size_t x_stride;
    const uint32_t *index; /* NULL, or the `rows` numbers of the rows of x to take. */
    uint32_t rows;
    uint32_t k;
    bool quantize; /* FP8 and back in groups of 32 on the way; k is a multiple of 32. */
    void *packed;  /* eng_packed_bytes(rows, k) */
};

struct eng_gemm_args {
    const struct eng_matrix *matrix;
    const void *packed; /* Of `rows` rows of matrix->k. */
    uint32_t rows;
    float *y; /* [rows][n] */
    size_t y_stride;
    bool round_bf16; /* Nearest even. */
};

/* The same size for every family, so that buffers can be laid out before one is chosen. */
size_t eng_packed_bytes(uint32_t rows, uint32_t k);

/* The operations of one instruction set.  A part is a range of blocks of ENG_PACK_ROWS rows, or of
 * ENG_GEMM_UNIT outputs; parts may run on different threads at the same time.  `last` is clipped.
 */
struct eng_gemm_ops {
    void (*pack)(const struct eng_pack_args *args, uint32_t first, uint32_t last);
    void (*gemm)(const struct eng_gemm_args *args, uint32_t first, uint32_t last, void *scratch);
};

static inline uint32_t eng_pack_blocks(uint32_t rows)
{
    return rows / ENG_PACK_ROWS + (rows % ENG_PACK_ROWS != 0);
}

static inline uint32_t eng_gemm_units(uint32_t n)
{
    return n / ENG_GEMM_UNIT + (n % ENG_GEMM_UNIT != 0);
}

extern const struct eng_gemm_ops eng_gemm_amx;
extern const struct eng_gemm_ops eng_gemm_avx512;
extern const struct eng_gemm_ops eng_gemm_avx2;
extern const struct eng_gemm_ops eng_gemm_base;
