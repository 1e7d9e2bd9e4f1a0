/*
 * How values become rows of pages and rings: packed by the kernels, or, with quant_off, the values
 * themselves; the layout says how long a row is.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"

#include <assert.h>

enum eng_row_kind cpu_row_kind(const struct cpu_batch *batch, enum eng_row_kind kind)
{
    return batch->owner->quant_off ? ENG_ROW_F32 : kind;
}

void cpu_key_round(const struct cpu_batch *batch, float *values)
{
    const uint32_t dim = batch->config->index_dim;
    uint8_t row[512];
    assert(eng_index_row_bytes(dim) <= sizeof(row));

    if (batch->owner->quant_off) return;
    batch->kernels->index_row(values, dim, row);
    eng_index_row_decode(row, dim, values);
}
