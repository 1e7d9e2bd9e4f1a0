/*
 * Quantizers and their inverses.
 *
 * Each follows the reference's definition bit for bit: scales come from the IEEE exponent (a power
 * of two does not round up), codes round to nearest even on the code, zero keeps its sign.  Ties
 * and edges are what the unit test walks through, so clarity comes before speed here; the hot round
 * trip of activations is a kernel of its own (backend/kernels/elementwise_*.c) and is compared with
 * this file.
 */

#include "engine/model/quant.h"

#include <assert.h>
#include <math.h>

static const float fp4_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

uint8_t eng_ue8m0_ceil(float value)
{
    assert(value > 0);
    const uint32_t bits = eng_bits_of(value);
    uint32_t code = bits >> 23;
    if ((bits & 0x7fffffu) != 0) code++;
    if (code < 1) code = 1;
    if (code > 254) code = 254;
    return (uint8_t)code;
}

float eng_e4m3_decode(uint8_t code)
{
    /* As fp32 bits the magnitude is the right number times 2^-120, subnormals included. */
    const float magnitude = eng_float_of((uint32_t)(code & 0x7f) << 20) * 0x1p120f;
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

uint8_t eng_e4m3_encode(float value)
{
    const uint8_t sign = (uint8_t)(eng_bits_of(value) >> 24 & 0x80);
    float magnitude = fabsf(value);
    if (magnitude > 448.0f) magnitude = 448.0f;
    if (magnitude < 0x1p-6f) {
        /* Steps of 2^-9; eight of them are the smallest normal number, whose code is 8. */
        const float steps = (magnitude * 512.0f + 0x1.8p23f) - 0x1.8p23f;
        return (uint8_t)(sign | (uint8_t)steps);
    }
    const uint32_t bits = eng_bits_of(magnitude);
    const uint32_t rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);
    return (uint8_t)(sign | (uint8_t)((rounded >> 20) - (120u << 3)));
}

float eng_fp4_decode(uint8_t code)
{
    return fp4_values[code & 15];
}

uint8_t eng_fp4_encode(float value)
{
    const uint8_t sign = (uint8_t)(eng_bits_of(value) >> 28 & 8);
    const float x = fabsf(value);
    uint8_t code;
    /* A midpoint goes to the even code: <= where the lower code is even. */
    if (x <= 0.25f)
        code = 0;
    else if (x < 0.75f)
        code = 1;
    else if (x <= 1.25f)
        code = 2;
    else if (x < 1.75f)
        code = 3;
    else if (x <= 2.5f)
        code = 4;
    else if (x < 3.5f)
        code = 5;
    else if (x <= 5.0f)
        code = 6;
    else
        code = 7;
    return sign | code;
}

static float largest(const float *values, size_t count, float least)
{
    float amax = least;
    for (size_t i = 0; i < count; i++)
        amax = fmaxf(amax, fabsf(values[i]));
    return amax;
}

uint8_t eng_fp8_scale(const float *values, size_t count)
{
    return eng_ue8m0_ceil(largest(values, count, 1e-4f) / 448.0f);
}

uint8_t eng_fp4_index_scale(const float *values, size_t count)
{
    return eng_ue8m0_ceil(largest(values, count, 6.0f * 0x1p-126f) / 6.0f);
}

uint8_t eng_fp4_main_scale(const float *values, size_t count)
{
    return eng_e4m3_encode(largest(values, count, 6.0f * 0x1p-9f) / 6.0f);
}

void eng_window_row_encode(const float *values, size_t count, uint8_t *row)
{
    for (size_t group = 0; group < count / 32; group++) {
        const uint8_t code = eng_fp8_scale(values + 32 * group, 32);
        const float scale = eng_ue8m0_decode(code);
        for (size_t i = 32 * group; i < 32 * group + 32; i++)
            row[i] = eng_e4m3_encode(values[i] / scale);
        row[count + group] = code;
    }
}

void eng_window_row_decode(const uint8_t *row, size_t count, float *values)
{
    for (size_t group = 0; group < count / 32; group++) {
        const float scale = eng_ue8m0_decode(row[count + group]);
        for (size_t i = 32 * group; i < 32 * group + 32; i++)
            values[i] = eng_e4m3_decode(row[i]) * scale;
    }
}

static void fp4_pack(const float *values, size_t count, float scale, uint8_t *packed)
{
    for (size_t i = 0; i < count; i += 2) {
        const unsigned low = eng_fp4_encode(values[i] / scale);
        const unsigned high = eng_fp4_encode(values[i + 1] / scale);
        packed[i / 2] = (uint8_t)(low | high << 4);
    }
}

static void fp4_unpack(const uint8_t *packed, size_t count, float scale, float *values)
{
    for (size_t i = 0; i < count; i += 2) {
        values[i] = fp4_values[packed[i / 2] & 15] * scale;
        values[i + 1] = fp4_values[packed[i / 2] >> 4] * scale;
    }
}

void eng_main_row_encode(const float *values, size_t count, uint8_t *row)
{
    for (size_t group = 0; group < count / 16; group++) {
        const uint8_t code = eng_fp4_main_scale(values + 16 * group, 16);
        fp4_pack(values + 16 * group, 16, eng_e4m3_decode(code), row + 8 * group);
        row[count / 2 + group] = code;
    }
}

void eng_main_row_decode(const uint8_t *row, size_t count, float *values)
{
    for (size_t group = 0; group < count / 16; group++) {
        const float scale = eng_e4m3_decode(row[count / 2 + group]);
        fp4_unpack(row + 8 * group, 16, scale, values + 16 * group);
    }
}

void eng_index_row_encode(const float *values, size_t count, uint8_t *row)
{
    for (size_t group = 0; group < count / 32; group++) {
        const uint8_t code = eng_fp4_index_scale(values + 32 * group, 32);
        fp4_pack(values + 32 * group, 32, eng_ue8m0_decode(code), row + 16 * group);
        row[count / 2 + group] = code;
    }
}

void eng_index_row_decode(const uint8_t *row, size_t count, float *values)
{
    for (size_t group = 0; group < count / 32; group++) {
        const float scale = eng_ue8m0_decode(row[count / 2 + group]);
        fp4_unpack(row + 16 * group, 32, scale, values + 32 * group);
    }
}
