/*
 * Quantizers over every code, and over every input near a boundary.
 *
 * The expected values come from a second definition, written as arithmetic on doubles: a code is
 * right when no other code is nearer, and a tie belongs to the even code.
 */

#include "engine/model/quant.h"
#include "engine/backend/kernels/compute.h"
#include "engine/backend/kernels/elementwise.h"
#include "tests/harness.h"

#include <math.h>

static double e4m3_value(unsigned code)
{
    const unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude = exponent == 0 ? ldexp((double)mantissa, -9)
                                           : ldexp(1.0 + (double)mantissa / 8.0, (int)exponent - 7);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

static void test_e4m3_codes(void)
{
    for (unsigned code = 0; code < 256; code++) {
        if ((code & 0x7f) == 0x7f) continue; /* NaN. */
        EXPECT((double)eng_e4m3_decode((uint8_t)code) == e4m3_value(code));
        EXPECT_EQ_U32(eng_e4m3_encode(eng_e4m3_decode((uint8_t)code)), code);
    }
    EXPECT_EQ_U32(eng_e4m3_encode(1e30f), 0x7e);
    EXPECT_EQ_U32(eng_e4m3_encode(-1e30f), 0xfe);
    EXPECT_EQ_U32(eng_e4m3_encode(-0.0f), 0x80);
}

static void test_e4m3_rounding(void)
{
    for (unsigned code = 0; code < 0x7e; code++) {
        const double low = e4m3_value(code), high = e4m3_value(code + 1);
        const float middle = (float)((low + high) / 2);
        const unsigned even = code % 2 == 0 ? code : code + 1;
        EXPECT_EQ_U32(eng_e4m3_encode(middle), even);
        EXPECT_EQ_U32(eng_e4m3_encode(-middle), even | 0x80);
        EXPECT_EQ_U32(eng_e4m3_encode(nextafterf(middle, 0.0f)), code);
        EXPECT_EQ_U32(eng_e4m3_encode(nextafterf(middle, 1e9f)), code + 1);
    }
}

static void test_fp4(void)
{
    static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (unsigned code = 0; code < 16; code++) {
        const float want = code < 8 ? values[code] : -values[code - 8];
        EXPECT(eng_fp4_decode((uint8_t)code) == want);
        EXPECT_EQ_U32(eng_bits_of(eng_fp4_decode((uint8_t)code)), eng_bits_of(want));
        EXPECT_EQ_U32(eng_fp4_encode(want), code);
    }
    for (unsigned code = 0; code < 7; code++) {
        const float middle = (values[code] + values[code + 1]) / 2;
        const unsigned even = code % 2 == 0 ? code : code + 1;
        EXPECT_EQ_U32(eng_fp4_encode(middle), even);
        EXPECT_EQ_U32(eng_fp4_encode(-middle), even | 8);
        EXPECT_EQ_U32(eng_fp4_encode(nextafterf(middle, 0.0f)), code);
        EXPECT_EQ_U32(eng_fp4_encode(nextafterf(middle, 9.0f)), code + 1);
    }
    EXPECT_EQ_U32(eng_fp4_encode(100.0f), 7);
    EXPECT_EQ_U32(eng_fp4_encode(-100.0f), 15);
}

static void test_ue8m0(void)
{
    for (int exponent = -126; exponent <= 127; exponent++) {
        const float power = ldexpf(1.0f, exponent);
        const uint8_t code = (uint8_t)(exponent + 127);
        EXPECT(eng_ue8m0_decode(code) == power);
        EXPECT_EQ_U32(eng_ue8m0_ceil(power), code);
        if (exponent == 127) continue;
        EXPECT_EQ_U32(eng_ue8m0_ceil(nextafterf(power, INFINITY)), code + 1u);
        EXPECT_EQ_U32(eng_ue8m0_ceil(power * 1.5f), code + 1u);
    }
}

/* The smallest power of two that keeps amax within reach, for every positive bf16 amax. */
static void test_scales(void)
{
    for (uint32_t high = 1; high < 0x7f80; high++) {
        float group[32] = {0};
        const float amax = eng_bf16_decode((uint16_t)high);
        group[7] = high % 2 == 0 ? amax : -amax;
        if (amax < 1e30f) {
            const double scale = (double)eng_ue8m0_decode(eng_fp8_scale(group, 32));
            const double least = fmax((double)amax, (double)1e-4f);
            EXPECT(least <= 448.0 * scale * (1 + 1e-7));
            EXPECT(least > 448.0 * scale / 2);
        }
        const double index = (double)eng_ue8m0_decode(eng_fp4_index_scale(group, 32));
        EXPECT(fmax((double)amax, ldexp(6.0, -126)) <= 6.0 * index * (1 + 1e-7));
        const float main = eng_e4m3_decode(eng_fp4_main_scale(group, 16));
        const double want = fmin(fmax((double)amax / 6.0, 0x1p-9), 448.0);
        EXPECT(fabs((double)main - want) <= fmax(want / 16.0, 0x1p-10) * (1 + 1e-6));
    }
}

static void test_bf16(void)
{
    for (uint32_t high = 0; high < 0x7f80; high++) {
        const float value = eng_bf16_decode((uint16_t)high);
        EXPECT_EQ_U32(eng_bf16_encode(value), high);
        if (high == 0x7f7f) continue;
        const float middle = eng_float_of(high << 16 | 0x8000u);
        EXPECT_EQ_U32(eng_bf16_encode(middle), high % 2 == 0 ? high : high + 1);
    }
}

static uint64_t random_next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void random_bf16(uint64_t *state, float *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const int exponent = (int)(random_next(state) % 24) - 16;
        const float mantissa = (float)(random_next(state) % 256) / 128.0f - 1.0f;
        values[i] = eng_bf16_round(ldexpf(mantissa, exponent));
    }
}

/* The kernels that make rows are the functions of quant.h. */
static void check_row_kernels(const struct eng_elementwise_ops *kernels, const float in[64])
{
    uint8_t want[80] = {0}, got[80] = {0};

    eng_window_row_encode(in, 64, want);
    kernels->window_row(in, 64, got);
    EXPECT_EQ_MEM(got, want, sizeof(want));
    eng_main_row_encode(in, 64, want);
    kernels->main_row(in, 64, got);
    EXPECT_EQ_MEM(got, want, sizeof(want));
    eng_index_row_encode(in, 64, want);
    kernels->index_row(in, 64, got);
    EXPECT_EQ_MEM(got, want, sizeof(want));
}

static void test_rows(void)
{
    uint64_t state = 5;
    float in[64], out[64], kernel[64];
    uint8_t row[80], again[80];

    EXPECT_EQ_U64(eng_window_row_bytes(64), 66);
    EXPECT_EQ_U64(eng_main_row_bytes(64), 36);
    EXPECT_EQ_U64(eng_index_row_bytes(32), 17);
    EXPECT_EQ_U64(eng_window_row_bytes(512), 528);
    EXPECT_EQ_U64(eng_main_row_bytes(512), 288);
    EXPECT_EQ_U64(eng_index_row_bytes(128), 68);
    for (int n = 0; n < 2000; n++) {
        random_bf16(&state, in, 64);
        eng_window_row_encode(in, 64, row);
        eng_window_row_decode(row, 64, out);
        for (int i = 0; i < 64; i++) {
            const float scale = eng_ue8m0_decode(row[64 + i / 32]);
            EXPECT(fabsf(out[i] - in[i]) <= fmaxf(fabsf(in[i]) / 16, scale * 0x1p-10f));
        }
        /* The kernel's round trip of activations is the same function. */
        for (enum eng_isa isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
            const struct eng_kernel_set *set = eng_kernels_of(isa, false);
            if (set == NULL) continue;
            set->elementwise->quantize(in, 64, kernel);
            EXPECT_EQ_MEM(kernel, out, sizeof(out));
            check_row_kernels(set->elementwise, in);
        }
        eng_index_row_encode(in, 32, row);
        eng_index_row_decode(row, 32, out);
        /* Values survive a second trip although codes may not. */
        eng_index_row_encode(out, 32, again);
        eng_index_row_decode(again, 32, kernel);
        for (int i = 0; i < 32; i++)
            EXPECT(kernel[i] == out[i]);
        eng_main_row_encode(in, 64, row);
        eng_main_row_decode(row, 64, out);
        for (int i = 0; i < 64; i++) {
            const float scale = eng_e4m3_decode(row[32 + i / 16]);
            EXPECT(fabsf(out[i] - in[i]) <= scale * 1.5f || fabsf(in[i]) > 6 * scale);
        }
    }
}

static void test_even_element_is_low_nibble(void)
{
    float in[32] = {6.0f, 1.0f};
    uint8_t row[17];
    eng_index_row_encode(in, 32, row);
    EXPECT_EQ_U32(row[16], 127); /* 6 / 6 = 2^0. */
    EXPECT_EQ_U32(row[0], 0x27);
}

int main(void)
{
    test_e4m3_codes();
    test_e4m3_rounding();
    test_fp4();
    test_ue8m0();
    test_scales();
    test_bf16();
    test_rows();
    test_even_element_is_low_nibble();
    HARNESS_END();
}
