/*
 * The variants of the inner loops that this machine has.
 */

#include "engine/backend/kernels.h"

static bool is_here(unsigned variant)
{
#if defined(__x86_64__)
    if (variant == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (variant == 1) return __builtin_cpu_supports("avx2");
    return true;
#else
    return variant == 2;
#endif
}

const struct eng_kernels *eng_kernels_at(unsigned index)
{
    static const struct eng_kernels *const variants[] = {
#if defined(__x86_64__)
        &eng_kernels_avx512,
        &eng_kernels_avx2,
#else
        NULL,
        NULL,
#endif
        &eng_kernels_base
    };
    unsigned at = 0;
    for (unsigned variant = 0; variant < 3; variant++)
        if (is_here(variant) && at++ == index) return variants[variant];
    return NULL;
}
