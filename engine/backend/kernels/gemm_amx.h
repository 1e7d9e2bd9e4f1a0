#pragma once

/* Private to gemm_amx*.c: tiles of weights. */

#include "engine/backend/kernels/gemm.h"

/* Columns of one tile. */
#define AMX_STEP 32u

static inline uint32_t amx_steps(uint32_t k)
{
    return (k + AMX_STEP - 1) / AMX_STEP;
}

/* Tiles that make up 32 columns; their sum is the weight. */
static inline uint32_t amx_parts(enum eng_format format)
{
    return format == ENG_FORMAT_F32 ? 3 : 1;
}

/* Rows that are decoded at once, between two steps of a product. */
#define AMX_JOB_ROWS 8u

/* Rows [n, n + 8) and one or two steps. */
struct amx_job {
    const struct eng_matrix *matrix;
    uint32_t n;
    uint32_t step, steps;
    size_t ahead; /* Bytes from here to what a later job reads. */
    bool is_wild; /* amx_is_wild of the unit it belongs to. */
};

/* To out, [steps][parts] tiles of which these are rows; rows and columns beyond the matrix are
 * zero. */
void amx_decode(const struct amx_job *job, uint8_t *out);

/* The unit from row n on has a scale that needs the slow way. */
bool amx_is_wild(const struct eng_matrix *matrix, uint32_t n);
