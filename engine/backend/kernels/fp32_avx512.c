/*
 * The fp32 family for AVX-512: one vector register per 16 outputs.
 *
 * Same source, same order of every sum, no fused multiply-add: the same bits as the other variants
 * (unit test), so a session may move between machines.
 */

#define ENG_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define ENG_NAME(x) x##_avx512
#define ENG_ELEMENTWISE eng_elementwise_avx512
#define ENG_ELEMENTWISE_UNROUNDED eng_elementwise_avx512_unrounded

#include <immintrin.h>
#include <stdint.h>

/* Half precision has one bit more of the exponent and all of e4m3's small numbers. */
ENG_TARGET static inline void e4m3_values(const uint8_t data[16], void *out)
{
    const __m128i raw = _mm_loadu_si128((const __m128i *)(const void *)data);
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff));
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f)));
}
#define ENG_E4M3 e4m3_values

/* By table: a permutation looks at the low four bits only. */
ENG_TARGET static inline void e2m1_values(const void *codes, void *out)
{
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                         -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(_mm512_loadu_si512(codes), values));
}
#define ENG_E2M1 e2m1_values

#include "engine/backend/kernels/fp32_body.inc"
