#pragma once

/*
 * The number formats of the model (the model's specification, sections 2.11 and 4.1) and the packed
 * rows made of them.
 *
 *   window row   n e4m3 codes, then n/32 ue8m0 scales          (66 B at n = 64, 528 B at 512)
 *   main row     n/2 bytes of e2m1 pairs, then n/16 e4m3 scales (36 B, 288 B)
 *   index key    n/2 bytes of e2m1 pairs, then n/32 ue8m0 scales (17 B at n = 32, 68 B at 128)
 *
 * In a pair the even element is the low nibble.  Inputs are bf16 values held in floats.  Packed
 * rows are the state: they are moved, never re-quantized.  Pure; any thread.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t eng_bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float eng_float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Nearest even.  Finite inputs only, which is all the engine ever produces. */
static inline float eng_bf16_round(float value)
{
    const uint32_t bits = eng_bits_of(value);
    return eng_float_of((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

static inline float eng_bf16_decode(uint16_t code)
{
    return eng_float_of((uint32_t)code << 16);
}

static inline uint16_t eng_bf16_encode(float value)
{
    return (uint16_t)(eng_bits_of(eng_bf16_round(value)) >> 16);
}

/* 2^(code - 127) for codes 1..254; what a scale can be. */
static inline float eng_ue8m0_decode(uint8_t code)
{
    return code == 0 ? eng_float_of(0x00400000u) : eng_float_of((uint32_t)code << 23);
}

/* Code of 2^ceil(log2(value)), on the IEEE exponent: a power of two stays itself. */
uint8_t eng_ue8m0_ceil(float value);

/* The code of S1E4M3 without infinity; 0x7f and 0xff (NaN) decode to +-480 and are never made. */
float eng_e4m3_decode(uint8_t code);
/* Clamped to +-448, nearest even, sign of zero kept. */
uint8_t eng_e4m3_encode(float value);

float eng_fp4_decode(uint8_t code); /* Low 4 bits. */
/* Clamped to +-6, nearest even on the code, sign of zero kept. */
uint8_t eng_fp4_encode(float value);

/* Scale codes of one group of values (32 for the first two, 16 for the third). */
uint8_t eng_fp8_scale(const float *values, size_t count);
uint8_t eng_fp4_index_scale(const float *values, size_t count);
uint8_t eng_fp4_main_scale(const float *values, size_t count);

static inline size_t eng_window_row_bytes(size_t count)
{
    return count + count / 32;
}
static inline size_t eng_main_row_bytes(size_t count)
{
    return count / 2 + count / 16;
}
static inline size_t eng_index_row_bytes(size_t count)
{
    return count / 2 + count / 32;
}

void eng_window_row_encode(const float *values, size_t count, uint8_t *row);
void eng_window_row_decode(const uint8_t *row, size_t count, float *values);
void eng_main_row_encode(const float *values, size_t count, uint8_t *row);
void eng_main_row_decode(const uint8_t *row, size_t count, float *values);
void eng_index_row_encode(const float *values, size_t count, uint8_t *row);
void eng_index_row_decode(const uint8_t *row, size_t count, float *values);
