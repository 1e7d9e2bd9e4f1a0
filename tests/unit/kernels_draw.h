#pragma once

/* Numbers and memory for the tests of the kernels: the same sequence in every run.  Private to
 * tests/unit/test_kernels_*.c; one thread. */

#include "tests/harness.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;

static inline uint32_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static inline float draw_float(void)
{
    return (float)(int32_t)draw() * 0x1p-31f;
}

static inline void *take(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    EXPECT(memory != NULL);
    memset(memory, 0, (bytes + 63) / 64 * 64);
    return memory;
}
