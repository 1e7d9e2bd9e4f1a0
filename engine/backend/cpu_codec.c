/*
 * How values become rows of pages and rings, and back.
 *
 * With quant_off a row is its bf16 values and nothing is rounded; the layout says how long it is.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

static void plain_encode(const float *values, size_t count, uint8_t *row)
{
    for (size_t i = 0; i < count; i++)
        kv_store16(row + 2 * i, eng_bf16_encode(values[i]));
}

static void plain_decode(const uint8_t *row, size_t count, float *values)
{
    for (size_t i = 0; i < count; i++)
        values[i] = eng_bf16_decode(kv_load16(row + 2 * i));
}

void cpu_window_encode(const struct cpu_batch *batch, const float *values, uint8_t *row)
{
    if (batch->owner->quant_off)
        plain_encode(values, batch->config->head_dim, row);
    else
        eng_window_row_encode(values, batch->config->head_dim, row);
}

void cpu_window_decode(const struct cpu_batch *batch, const uint8_t *row, float *values)
{
    if (batch->owner->quant_off)
        plain_decode(row, batch->config->head_dim, values);
    else
        eng_window_row_decode(row, batch->config->head_dim, values);
}

void cpu_main_encode(const struct cpu_batch *batch, const float *values, uint8_t *row)
{
    if (batch->owner->quant_off)
        plain_encode(values, batch->config->head_dim, row);
    else
        eng_main_row_encode(values, batch->config->head_dim, row);
}

void cpu_main_decode(const struct cpu_batch *batch, const uint8_t *row, float *values)
{
    if (batch->owner->quant_off)
        plain_decode(row, batch->config->head_dim, values);
    else
        eng_main_row_decode(row, batch->config->head_dim, values);
}

void cpu_key_encode(const struct cpu_batch *batch, const float *values, uint8_t *row)
{
    if (batch->owner->quant_off)
        plain_encode(values, batch->config->index_dim, row);
    else
        eng_index_row_encode(values, batch->config->index_dim, row);
}

void cpu_key_round(const struct cpu_batch *batch, float *values)
{
    const uint32_t dim = batch->config->index_dim;
    uint8_t row[512];
    assert(eng_index_row_bytes(dim) <= sizeof(row));

    if (batch->owner->quant_off) return;
    eng_index_row_encode(values, dim, row);
    eng_index_row_decode(row, dim, values);
}

void cpu_key_unpack(const struct cpu_batch *batch, const uint8_t *const rows[ENG_LANES],
                    float *block)
{
    const uint32_t dim = batch->config->index_dim;
    if (!batch->owner->quant_off) {
        batch->kernels->unpack_keys(rows, dim, block);
        return;
    }
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t lane = 0; lane < ENG_LANES; lane++)
            block[(size_t)i * ENG_LANES + lane] = eng_bf16_decode(kv_load16(rows[lane] + 2 * i));
}
