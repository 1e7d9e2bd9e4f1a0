#pragma once

/* Little-endian loads and stores, and arithmetic that cannot wrap.  Pure; any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct kv_bytes {
    const uint8_t *data;
    size_t count;
};

static inline uint16_t kv_load16(const uint8_t *p)
{
    return (uint16_t)(p[0] | (unsigned)p[1] << 8);
}

static inline uint32_t kv_load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t kv_load64(const uint8_t *p)
{
    return (uint64_t)kv_load32(p) | (uint64_t)kv_load32(p + 4) << 32;
}

static inline void kv_store16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void kv_store32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static inline void kv_store64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

/* *ret is written only when the result fits. */
static inline bool kv_add_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    return !__builtin_add_overflow(a, b, ret);
}

static inline bool kv_mul_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    return !__builtin_mul_overflow(a, b, ret);
}

static inline uint64_t kv_round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

#define KV_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))
#define KV_ARRAY_COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define KV_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KV_MAX(a, b) ((a) > (b) ? (a) : (b))
