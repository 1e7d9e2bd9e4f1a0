#pragma once

/* Random numbers of the exactness test: a function of the seed alone, on every machine. */

#include <stdbool.h>
#include <stdint.h>

struct ex_random {
    uint64_t state;
};

static inline uint64_t ex_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t ex_random_next(struct ex_random *random)
{
    random->state += 0x9e3779b97f4a7c15u;
    return ex_mix(random->state);
}

/* 0 .. count - 1; count > 0. */
static inline uint32_t ex_random_below(struct ex_random *random, uint32_t count)
{
    return (uint32_t)((ex_random_next(random) >> 32) * count >> 32);
}

/* first .. last, both included. */
static inline uint32_t ex_random_between(struct ex_random *random, uint32_t first, uint32_t last)
{
    return first + ex_random_below(random, last - first + 1);
}

static inline bool ex_random_percent(struct ex_random *random, uint32_t percent)
{
    return ex_random_below(random, 100) < percent;
}
