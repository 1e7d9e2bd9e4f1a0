/*
 * What this machine and this process may use.
 *
 * Tiles need three yeses: the processor, the operating system that saves their 8 KiB on a switch
 * (XCR0), and, on Linux, a permission asked for by the process, because a signal frame grows by as
 * much.  The kernel refuses it when a thread's alternative signal stack is too small; the text says
 * so.
 */

#include "engine/backend/kernels/isa.h"

#include <assert.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const char *const names[ENG_ISA_COUNT] = {"auto", "portable", "avx2", "avx512", "amx"};

const char *eng_isa_name(enum eng_isa isa)
{
    assert((unsigned)isa < ENG_ISA_COUNT);
    return names[isa];
}

bool eng_isa_parse(const char *text, enum eng_isa *ret_isa)
{
    for (unsigned i = 0; i < ENG_ISA_COUNT; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *ret_isa = (enum eng_isa)i;
        return true;
    }
    return false;
}

const char *eng_isa_family(enum eng_isa isa)
{
    return eng_isa_resolve(isa) == ENG_ISA_AMX ? "amx" : "fp32";
}

#if defined(__x86_64__)

#define TILE_DATA 18u /* XFEATURE_XTILEDATA */
#define REQUEST_PERMISSION 0x1023

static void cpuid(uint32_t leaf, uint32_t sub, uint32_t out[4])
{
    __asm__ __volatile__("cpuid"
                         : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3])
                         : "a"(leaf), "c"(sub));
}

static uint64_t enabled_state(void)
{
    uint32_t low, high, out[4];
    cpuid(1, 0, out);
    if ((out[2] & 1u << 27) == 0) return 0; /* OSXSAVE */
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static const char *missing_avx512(void)
{
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return "the processor has no AVX-512 F, BW, VL and DQ";
    return NULL;
}

static const char *missing_amx(void)
{
    uint32_t top[4], out[4];

    if (missing_avx512() != NULL || !__builtin_cpu_supports("avx512vbmi"))
        return "the processor has no AVX-512 with VBMI";
    cpuid(0, 0, top);
    if (top[0] < 0x1d) return "the processor has no AMX";
    cpuid(7, 0, out);
    if ((out[3] & 1u << 24) == 0 || (out[3] & 1u << 22) == 0)
        return "the processor has no AMX with BF16";
    if ((enabled_state() & 3u << 17) != 3u << 17) return "the system does not save AMX tiles";
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) return NULL;
    if (errno == ENOSPC) return "an alternative signal stack is too small for AMX tiles";
    return "the kernel gives no permission for AMX tiles";
}

const char *eng_isa_missing(enum eng_isa isa)
{
    switch (isa) {
    case ENG_ISA_AVX2:
        return __builtin_cpu_supports("avx2") ? NULL : "the processor has no AVX2";
    case ENG_ISA_AVX512:
        return missing_avx512();
    case ENG_ISA_AMX:
        return missing_amx();
    default:
        return NULL;
    }
}

#else

const char *eng_isa_missing(enum eng_isa isa)
{
    return isa <= ENG_ISA_PORTABLE ? NULL : "the processor is not an x86-64";
}

#endif

enum eng_isa eng_isa_best(void)
{
    for (unsigned isa = ENG_ISA_AMX; isa > ENG_ISA_PORTABLE; isa--)
        if (eng_isa_missing((enum eng_isa)isa) == NULL) return (enum eng_isa)isa;
    return ENG_ISA_PORTABLE;
}
