#pragma once

/*
 * The tile unit in plain terms.  Private to the *_amx.c files.
 *
 * Eight tiles of 16 rows of 64 bytes.  AMX_DOT(c, a, b): c[m][n] += sum over 32 values, a being
 * [16][32] bf16 and b [16][16] pairs of bf16.  The compilers' own intrinsics do not tell the
 * optimizer that a tile load reads memory, so these do: stores before a load stay before it.
 */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define AMX_TARGET                                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,amx-tile,amx-bf16")))
#define AMX_TILE_BYTES 1024u

#define AMX_LOAD(tile, address, stride)                                                            \
    __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm" #tile                                        \
                         :                                                                         \
                         : "r"((const void *)(address)), "r"((long)(stride))                       \
                         : "memory")
#define AMX_STORE(tile, address, stride)                                                           \
    __asm__ __volatile__("tilestored %%tmm" #tile ", (%0,%1,1)"                                    \
                         :                                                                         \
                         : "r"((void *)(address)), "r"((long)(stride))                             \
                         : "memory")
#define AMX_ZERO(tile) __asm__ __volatile__("tilezero %%tmm" #tile ::)
#define AMX_DOT(c, a, b) __asm__ __volatile__("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
};

/* Whole tiles.  Between begin and end the thread owns its tiles; no call in between may use them
 * for something else. */
AMX_TARGET static inline void amx_begin(void)
{
    static const struct amx_config whole = {
        .palette = 1,
        .colsb = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    __asm__ __volatile__("ldtilecfg %0" : : "m"(whole));
}

AMX_TARGET static inline void amx_end(void)
{
    __asm__ __volatile__("tilerelease" ::);
}

/* Nearest even, bits of the result in the upper half. */
AMX_TARGET static inline __m512i amx_round(__m512 v)
{
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

/* 16 x 16 values of 32 bits; in[i] becomes out column i. */
AMX_TARGET static inline void amx_transpose(const void *from, size_t stride, __m512i out[16])
{
    const uint8_t *p = from;
    __m512i a[16], b[16];
#define AMX_LANE(r, lane) _mm_loadu_si128((const __m128i *)(p + (size_t)(r)*stride + 16 * (lane)))
    /* a[4 j + r]: column block j of rows r, r + 4, r + 8, r + 12, one per 128-bit lane. */
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)
        _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++)
    {
        __m512i v = _mm512_castsi128_si512(AMX_LANE(r, j));
        v = _mm512_inserti32x4(v, AMX_LANE(r + 4, j), 1);
        v = _mm512_inserti32x4(v, AMX_LANE(r + 8, j), 2);
        a[4 * j + r] = _mm512_inserti32x4(v, AMX_LANE(r + 12, j), 3);
    }
#undef AMX_LANE
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)
    {
        b[4 * j] = _mm512_unpacklo_epi32(a[4 * j], a[4 * j + 1]);
        b[4 * j + 1] = _mm512_unpackhi_epi32(a[4 * j], a[4 * j + 1]);
        b[4 * j + 2] = _mm512_unpacklo_epi32(a[4 * j + 2], a[4 * j + 3]);
        b[4 * j + 3] = _mm512_unpackhi_epi32(a[4 * j + 2], a[4 * j + 3]);
        out[4 * j] = _mm512_unpacklo_epi64(b[4 * j], b[4 * j + 2]);
        out[4 * j + 1] = _mm512_unpackhi_epi64(b[4 * j], b[4 * j + 2]);
        out[4 * j + 2] = _mm512_unpacklo_epi64(b[4 * j + 1], b[4 * j + 3]);
        out[4 * j + 3] = _mm512_unpackhi_epi64(b[4 * j + 1], b[4 * j + 3]);
    }
}

/* The upper halves of 32 fp32, in order. */
AMX_TARGET static inline __m512i amx_upper_halves(__m512i low, __m512i high)
{
    static const uint16_t odd[32] __attribute__((aligned(64))) = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63,
    };
    return _mm512_permutex2var_epi16(low, _mm512_load_si512(odd), high);
}
