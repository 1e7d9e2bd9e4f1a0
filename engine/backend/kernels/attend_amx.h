#pragma once

/* Private to attend.c and attend_amx.c: rows in the form the tile unit reads.
 *
 *   plain  [capacity + 32][dim] bf16: keys as the first operand of a score
 *   pairs  [row or row / 2][dim][2] bf16: rows r and r + 1 interleaved, values as the second
 *          operand; for each r when a token may begin anywhere, else for even r
 *
 * The 32 rows behind the last one given are zero in both: tiles are whole. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AMX_ROWS_PAD 32u

static inline size_t amx_rows_plain_bytes(uint32_t capacity, uint32_t dim)
{
    return ((size_t)capacity + AMX_ROWS_PAD) * dim * 2;
}

static inline size_t amx_rows_pairs_bytes(uint32_t capacity, uint32_t dim, bool sliding)
{
    const size_t rows = (size_t)capacity + AMX_ROWS_PAD;
    return (sliding ? rows : (rows + 1) / 2) * dim * 4;
}
