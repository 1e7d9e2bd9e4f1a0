/*
 * Inputs that are not bf16 values, for the reference mode in which activations are not rounded.
 *
 * A number is split into the upper, middle and lower 8 bits of its significand: three bf16 that sum
 * to it exactly.  Each third is packed and multiplied as ever, and the three products are added in
 * fp32, smallest first.  The blocks of 16 rows of a buffer hold their thirds one behind the other.
 * Slow, and for comparisons only.
 */

#include "engine/backend/kernels/gemm_amx_split.h"

#include "engine/backend/kernels/amx.h"
#include "engine/backend/kernels/gemm_amx.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

#define COLUMNS (8u * ENG_GEMM_UNIT)

/* Upper half of x to `part`, the rest stays in x. */
static void split(float x[ENG_PACK_ROWS][AMX_STEP], float part[ENG_PACK_ROWS][AMX_STEP])
{
    for (uint32_t r = 0; r < ENG_PACK_ROWS; r++)
        for (uint32_t i = 0; i < AMX_STEP; i++) {
            part[r][i] = eng_float_of(eng_bits_of(x[r][i]) & 0xffff0000u);
            x[r][i] -= part[r][i];
        }
}

static void pack_step(const struct eng_pack_args *a, uint32_t block, uint32_t step, uint8_t *tiles)
{
    float x[ENG_PACK_ROWS][AMX_STEP] = {{0}}, part[ENG_PACK_ROWS][AMX_STEP];
    const uint32_t count = KV_MIN(ENG_PACK_ROWS, a->rows - ENG_PACK_ROWS * block);
    const uint32_t columns = KV_MIN(AMX_STEP, a->k - AMX_STEP * step);

    for (uint32_t r = 0; r < count; r++) {
        const uint32_t row = ENG_PACK_ROWS * block + r;
        const float *from = a->x + (a->index == NULL ? row : a->index[row]) * a->x_stride;
        for (uint32_t i = 0; i < columns; i++)
            x[r][i] = from[AMX_STEP * step + i];
    }
    for (uint32_t p = 0; p < AMX_SPLIT_PARTS; p++) {
        split(x, part);
        eng_gemm_amx.pack(
            &(struct eng_pack_args){.x = part[0],
                                    .x_stride = AMX_STEP,
                                    .rows = ENG_PACK_ROWS,
                                    .k = AMX_STEP,
                                    .packed = tiles + ((size_t)p * amx_steps(a->k) + step) *
                                                          AMX_TILE_BYTES},
            0, 1);
    }
}

static void pack(const struct eng_pack_args *a, uint32_t first, uint32_t last)
{
    const size_t block_bytes = (size_t)AMX_SPLIT_PARTS * amx_steps(a->k) * AMX_TILE_BYTES;

    assert(!a->quantize);
    for (uint32_t block = first; block < last && block < eng_pack_blocks(a->rows); block++)
        for (uint32_t step = 0; step < amx_steps(a->k); step++)
            pack_step(a, block, step, (uint8_t *)a->packed + block * block_bytes);
}

/* COLUMNS outputs of one block of rows. */
static void gemm_block(const struct eng_gemm_args *a, const struct eng_matrix *part, uint32_t n,
                       uint32_t block, void *scratch)
{
    const size_t part_bytes = (size_t)amx_steps(a->matrix->k) * AMX_TILE_BYTES;
    const uint8_t *packed = (const uint8_t *)a->packed + AMX_SPLIT_PARTS * block * part_bytes;
    const uint32_t row = block * ENG_PACK_ROWS, rows = KV_MIN(ENG_PACK_ROWS, a->rows - row);
    float sums[ENG_PACK_ROWS][COLUMNS], y[ENG_PACK_ROWS][COLUMNS];

    for (uint32_t p = AMX_SPLIT_PARTS; p-- > 0;) {
        eng_gemm_amx.gemm(&(struct eng_gemm_args){.matrix = part,
                                                  .packed = packed + p * part_bytes,
                                                  .rows = rows,
                                                  .y = y[0],
                                                  .y_stride = COLUMNS},
                          0, eng_gemm_units(part->n), scratch);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < part->n; i++)
                sums[r][i] = p + 1 == AMX_SPLIT_PARTS ? y[r][i] : sums[r][i] + y[r][i];
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < part->n; i++)
            a->y[(row + r) * a->y_stride + n + i] =
                a->round_bf16 ? eng_bf16_round(sums[r][i]) : sums[r][i];
}

static void gemm(const struct eng_gemm_args *a, uint32_t first, uint32_t last, void *scratch)
{
    const uint32_t units = KV_MIN(last, eng_gemm_units(a->matrix->n));
    const uint32_t end = KV_MIN(a->matrix->n, units * ENG_GEMM_UNIT);

    for (uint32_t n = first * ENG_GEMM_UNIT; n < end; n += COLUMNS) {
        const struct eng_matrix part = eng_matrix_rows(a->matrix, n, KV_MIN(COLUMNS, end - n));
        for (uint32_t block = 0; block < eng_pack_blocks(a->rows); block++)
            gemm_block(a, &part, n, block, scratch);
    }
}

const struct eng_gemm_ops eng_gemm_amx_split = {.pack = pack, .gemm = gemm};
