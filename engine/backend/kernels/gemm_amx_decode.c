/*
 * Weights as stored to tiles of bf16, exact.
 *
 * A tile is 16 rows of W by 32 columns: the first operand of a dot as it lies in memory, so the
 * order of bytes never changes, only their width.  FP8 and FP4 codes become bf16 by integer
 * arithmetic on the exponent, which holds as long as the scale keeps every value a normal number;
 * scales beyond that (none in a sane checkpoint) take a slow way through fp32.  F32 is split into
 * three bf16 that sum to it exactly: upper, middle and lower 8 bits of the significand.
 */

#include "engine/backend/kernels/amx.h"
#include "engine/backend/kernels/amx_expand.h"
#include "engine/backend/kernels/gemm_amx.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <string.h>

#define ROWS AMX_JOB_ROWS

static uint16_t upper_half(float value)
{
    return (uint16_t)(eng_bits_of(value) >> 16);
}

AMX_TARGET static void decode_fp8(const struct amx_job *job, uint8_t *out)
{
    const struct eng_matrix *m = job->matrix;
    const size_t k = m->k;
    const uint8_t *scale = m->scale + (size_t)(job->n / 32) * (k / 32) + job->step;
    const uint8_t *data = m->data + job->n * k + (size_t)job->step * 32;
    const __m512i bias0 = amx_fp8_bias(scale[0]), tiny0 = amx_fp8_tiny(scale[0]);

    if (job->steps == 1) {
        for (uint32_t r = 0; r < ROWS; r++) {
            const __m256i codes = _mm256_loadu_si256((const __m256i *)(data + r * k));
            _mm512_store_si512(out + 64 * r, amx_expand_fp8(codes, bias0, tiny0));
        }
        return;
    }
    const __m512i bias1 = amx_fp8_bias(scale[1]), tiny1 = amx_fp8_tiny(scale[1]);
    _Pragma("GCC unroll 8") for (uint32_t r = 0; r < ROWS; r++)
    {
        const uint8_t *row = data + r * k;
        _mm_prefetch((const char *)row + job->ahead, _MM_HINT_T1);
        const __m256i left = _mm256_loadu_si256((const __m256i *)row);
        const __m256i right = _mm256_loadu_si256((const __m256i *)(row + 32));
        _mm512_store_si512(out + 64 * r, amx_expand_fp8(left, bias0, tiny0));
        _mm512_store_si512(out + AMX_TILE_BYTES + 64 * r, amx_expand_fp8(right, bias1, tiny1));
    }
}

AMX_TARGET static void decode_fp4(const struct amx_job *job, uint8_t *out)
{
    const struct eng_matrix *m = job->matrix;
    const size_t row_bytes = m->k / 2, groups = m->k / 32;
    const uint8_t *scale = m->scale + job->n * groups + job->step;
    const uint8_t *data = m->data + job->n * row_bytes + (size_t)job->step * 16;

    if (job->steps == 1) {
        for (uint32_t r = 0; r < ROWS; r++)
            _mm512_store_si512(out + 64 * r,
                               amx_expand_fp4(data + r * row_bytes, scale[r * groups]));
        return;
    }
    _Pragma("GCC unroll 8") for (uint32_t r = 0; r < ROWS; r++)
    {
        const uint8_t *row = data + r * row_bytes;
        _mm_prefetch((const char *)row + job->ahead, _MM_HINT_T1);
        _mm512_store_si512(out + 64 * r, amx_expand_fp4(row, scale[r * groups]));
        _mm512_store_si512(out + AMX_TILE_BYTES + 64 * r,
                           amx_expand_fp4(row + 16, scale[r * groups + 1]));
    }
}

AMX_TARGET static void decode_bf16(const struct amx_job *job, uint8_t *out)
{
    const struct eng_matrix *m = job->matrix;
    const size_t row_bytes = (size_t)m->k * 2;
    const uint8_t *data = m->data + job->n * row_bytes + (size_t)job->step * 64;

    for (uint32_t s = 0; s < job->steps; s++) {
        const bool half = (job->step + s + 1) * 32 > m->k;
        const __mmask32 here = half ? 0xffff : 0xffffffff;
        uint8_t *tile = out + (size_t)s * AMX_TILE_BYTES;
        _Pragma("GCC unroll 8") for (uint32_t r = 0; r < ROWS; r++)
        {
            const uint8_t *row = data + r * row_bytes + 64 * s;
            _mm_prefetch((const char *)row + job->ahead, _MM_HINT_T1);
            _mm512_store_si512(tile + 64 * r, _mm512_maskz_loadu_epi16(here, row));
        }
    }
}

AMX_TARGET static inline __m512 without_upper(__m512 v)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper)));
}

/* Smallest parts first: three tiles per step. */
AMX_TARGET static void decode_f32(const struct amx_job *job, uint8_t *out)
{
    const struct eng_matrix *m = job->matrix;
    const size_t row_bytes = (size_t)m->k * 4;

    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t s = 0; s < job->steps; s++) {
            const uint8_t *from =
                m->data + (job->n + r) * row_bytes + (size_t)(job->step + s) * 128;
            const bool half = (job->step + s + 1) * 32 > m->k;
            uint8_t *to = out + (size_t)s * 3 * AMX_TILE_BYTES + 64 * r;
            __m512 low = _mm512_loadu_ps(from);
            __m512 high = half ? _mm512_setzero_ps() : _mm512_loadu_ps(from + 64);
            for (int part = 2; part >= 0; part--) {
                _mm512_store_si512(
                    to + (size_t)part * AMX_TILE_BYTES,
                    amx_upper_halves(_mm512_castps_si512(low), _mm512_castps_si512(high)));
                low = without_upper(low);
                high = without_upper(high);
            }
        }
}

/* Any format, any number of rows, any scale: value by value. */
static void decode_slow(const struct amx_job *job, uint8_t *out)
{
    const struct eng_matrix *m = job->matrix;
    const uint32_t parts = amx_parts(m->format);

    for (uint32_t s = 0; s < job->steps * parts; s++)
        memset(out + (size_t)s * AMX_TILE_BYTES, 0, ROWS * 64);
    for (uint32_t r = 0; r < ROWS && job->n + r < m->n; r++)
        for (uint32_t i = 0; i < job->steps * 32 && job->step * 32 + i < m->k; i++) {
            float rest = eng_matrix_value(m, job->n + r, job->step * 32 + i);
            uint8_t *to = out + (size_t)(i / 32) * parts * AMX_TILE_BYTES + 64 * r + 2 * (i % 32);
            for (uint32_t part = parts; part-- > 0;) {
                const uint16_t upper = upper_half(rest);
                memcpy(to + (size_t)part * AMX_TILE_BYTES, &upper, sizeof(upper));
                rest -= eng_bf16_decode(upper);
            }
        }
}

void amx_decode(const struct amx_job *job, uint8_t *out)
{
    if (job->is_wild || job->n + ROWS > job->matrix->n) {
        decode_slow(job, out);
        return;
    }
    switch (job->matrix->format) {
    case ENG_FORMAT_FP8:
        decode_fp8(job, out);
        return;
    case ENG_FORMAT_FP4:
        decode_fp4(job, out);
        return;
    case ENG_FORMAT_BF16:
        decode_bf16(job, out);
        return;
    case ENG_FORMAT_F32:
        decode_f32(job, out);
        return;
    }
}

/* Scales of rows that belong together are one run of bytes. */
AMX_TARGET bool amx_is_wild(const struct eng_matrix *m, uint32_t n)
{
    const size_t groups = m->k / 32;
    const bool fp4 = m->format == ENG_FORMAT_FP4;
    if (m->format != ENG_FORMAT_FP8 && !fp4) return false;

    const uint8_t *scale = m->scale + (fp4 ? n : n / 32) * groups;
    const size_t count = fp4 ? KV_MIN(ENG_GEMM_UNIT, m->n - n) * groups : groups;
    const uint8_t least = fp4 ? AMX_FP4_SCALE_MIN : AMX_FP8_SCALE_MIN;
    const uint8_t most = fp4 ? AMX_FP4_SCALE_MAX : AMX_FP8_SCALE_MAX;
    const __m512i low = _mm512_set1_epi8((char)least), high = _mm512_set1_epi8((char)most);
    __mmask64 wild = 0;

    for (size_t i = 0; i < count; i += 64) {
        const __mmask64 here = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
        const __m512i codes = _mm512_maskz_loadu_epi8(here, scale + i);
        wild |= _mm512_mask_cmplt_epu8_mask(here, codes, low) |
                _mm512_mask_cmpgt_epu8_mask(here, codes, high);
    }
    return wild != 0;
}
