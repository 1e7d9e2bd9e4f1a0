/*
 * Sizes and views: what every instruction set shares.
 */

#include "engine/backend/kernels/gemm.h"

#include "engine/model/quant.h"

#include <assert.h>
#include <string.h>

size_t eng_matrix_bytes(const struct eng_matrix *matrix)
{
    const size_t values = (size_t)matrix->n * matrix->k;
    switch (matrix->format) {
    case ENG_FORMAT_FP8:
        return values + (size_t)((matrix->n + 31) / 32) * (matrix->k / 32);
    case ENG_FORMAT_FP4:
        return values / 2 + values / 32;
    case ENG_FORMAT_BF16:
        return values * 2;
    case ENG_FORMAT_F32:
        return values * 4;
    }
    return 0;
}

struct eng_matrix eng_matrix_rows(const struct eng_matrix *matrix, uint32_t first, uint32_t n)
{
    struct eng_matrix part = *matrix;

    assert(first <= matrix->n && n <= matrix->n - first);
    part.n = n;
    switch (matrix->format) {
    case ENG_FORMAT_FP8:
        assert(first % 32 == 0);
        part.data += (size_t)first * matrix->k;
        part.scale += (size_t)(first / 32) * (matrix->k / 32);
        break;
    case ENG_FORMAT_FP4:
        part.data += (size_t)first * (matrix->k / 2);
        part.scale += (size_t)first * (matrix->k / 32);
        break;
    case ENG_FORMAT_BF16:
        part.data += (size_t)first * matrix->k * 2;
        break;
    case ENG_FORMAT_F32:
        part.data += (size_t)first * matrix->k * 4;
        break;
    }
    return part;
}

size_t eng_packed_bytes(uint32_t rows, uint32_t k)
{
    /* fp32 rows, or bf16 pairs in whole tiles of 16 x 32: never more than this. */
    return (size_t)eng_pack_blocks(rows) * ENG_PACK_ROWS * ((k + 31) / 32 * 32) * sizeof(float);
}

float eng_matrix_value(const struct eng_matrix *matrix, uint32_t n, uint32_t k)
{
    const size_t at = (size_t)n * matrix->k + k, groups = matrix->k / 32;
    uint16_t half;
    float value;

    switch (matrix->format) {
    case ENG_FORMAT_FP8:
        return eng_e4m3_decode(matrix->data[at]) *
               eng_ue8m0_decode(matrix->scale[n / 32 * groups + k / 32]);
    case ENG_FORMAT_FP4:
        return eng_fp4_decode((uint8_t)(matrix->data[at / 2] >> (4 * (k % 2)))) *
               eng_ue8m0_decode(matrix->scale[n * groups + k / 32]);
    case ENG_FORMAT_BF16:
        memcpy(&half, matrix->data + 2 * at, sizeof(half));
        return eng_bf16_decode(half);
    case ENG_FORMAT_F32:
        memcpy(&value, matrix->data + 4 * at, sizeof(value));
        return value;
    }
    return 0;
}
