#pragma once

/*
 * Codes to bf16, 32 at a time and exact, by integer arithmetic on the exponent.  Private to the
 * *_amx*.c files.  A scale is a ue8m0 code within the bounds below; beyond them some value is not a
 * normal bf16, and the caller goes through fp32.
 */

#include "engine/backend/kernels/amx.h"

/* Scale codes for which every non-zero value is a normal bf16. */
#define AMX_FP8_SCALE_MIN 10u
#define AMX_FP8_SCALE_MAX 246u
#define AMX_FP4_SCALE_MIN 2u
#define AMX_FP4_SCALE_MAX 251u

/* (code - 127) x 2^7 in both halves: what a scale adds to the exponents of a pair of bf16. */
#define POWER(c) ((uint32_t)(((c)-127) & 0x1ff) << 23 | (uint32_t)((((c)-127) * 128) & 0xffff))
#define POWER4(c) POWER(c), POWER((c) + 1), POWER((c) + 2), POWER((c) + 3)
#define POWER16(c) POWER4(c), POWER4((c) + 4), POWER4((c) + 8), POWER4((c) + 12)
#define POWER64(c) POWER16(c), POWER16((c) + 16), POWER16((c) + 32), POWER16((c) + 48)
static const uint32_t amx_powers[256] = {POWER64(0), POWER64(64), POWER64(128), POWER64(192)};

/* 32 codes; bias moves the exponent, tiny holds the eight values below the smallest normal one. */
AMX_TARGET static inline __m512i amx_expand_fp8(__m256i codes, __m512i bias, __m512i tiny)
{
    const __m512i code = _mm512_cvtepi8_epi16(codes);
    const __m512i wide = _mm512_slli_epi16(code, 4);
    const __m512i normal = _mm512_add_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f0)), bias);
    const __mmask32 is_tiny = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    const __m512i size = _mm512_mask_permutexvar_epi16(normal, is_tiny, code, tiny);
    /* size | (wide & sign) */
    return _mm512_ternarylogic_epi64(size, wide, _mm512_set1_epi16((short)0x8000), 0xf8);
}

AMX_TARGET static inline __m512i amx_fp8_bias(uint8_t scale)
{
    return _mm512_add_epi16(_mm512_set1_epi32((int)amx_powers[scale]),
                            _mm512_set1_epi16(120 * 128));
}

/* Code c below 8 is c x 2^-9. */
AMX_TARGET static inline __m512i amx_fp8_tiny(uint8_t scale)
{
    static const uint16_t values[32] __attribute__((aligned(64))) = {
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
    };
    return _mm512_mask_add_epi16(_mm512_load_si512(values), 0xfe, _mm512_load_si512(values),
                                 _mm512_set1_epi32((int)amx_powers[scale]));
}

/* The sixteen values of e2m1 stand in a table twice, because a look-up reads five bits and the
 * fifth is somebody else's. */
static const uint16_t amx_fp4_table[32] __attribute__((aligned(64))) = {
    0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
};

/* 16 bytes to 32 values; the scale is added to the table and not to the values, never to zero. */
AMX_TARGET static inline __m512i amx_expand_fp4(const uint8_t *data, uint8_t scale)
{
    const __m512i table = _mm512_load_si512(amx_fp4_table);
    const __m512i scaled =
        _mm512_mask_add_epi16(table, 0xfefefefe, table, _mm512_set1_epi32((int)amx_powers[scale]));
    const __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)data));
    const __m512i index = _mm512_or_si512(pair, _mm512_slli_epi32(pair, 12));
    return _mm512_permutexvar_epi16(index, scaled);
}
