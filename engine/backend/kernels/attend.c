/*
 * Sizes: the larger of what the families need, so that memory can be laid out before one is chosen.
 */

#include "engine/backend/kernels/attend.h"

#include "engine/backend/kernels/attend_amx.h"

size_t eng_rows_bytes(uint32_t capacity, uint32_t dim, bool sliding)
{
    /* fp32 rows are never larger: 4 bytes a value against 2 + 2 or 2 + 4, and the padding. */
    return amx_rows_plain_bytes(capacity, dim) + amx_rows_pairs_bytes(capacity, dim, sliding);
}

size_t eng_queries_bytes(uint32_t tokens, uint32_t heads, uint32_t dim)
{
    return ((size_t)tokens * heads + 32) * dim * sizeof(float);
}
