#pragma once

/*
 * Which instructions the kernels may use, found out at run time.
 *
 * Two families of numbers exist: "amx" (products of bf16 pairs summed by the tile unit) and "fp32"
 * (one sum per output, ascending, without fused multiply-add); AVX-512, AVX2 and portable code
 * belong to the second and give the same bits.  Pure but for the kernel's permission to use tiles,
 * which is asked for once per call and is never taken back; any thread.
 */

#include <stdbool.h>
#include <stddef.h>

enum eng_isa {
    ENG_ISA_AUTO = 0,
    ENG_ISA_PORTABLE,
    ENG_ISA_AVX2,
    ENG_ISA_AVX512,
    ENG_ISA_AMX,
    ENG_ISA_COUNT,
};

/* "auto", "portable", "avx2", "avx512", "amx". */
const char *eng_isa_name(enum eng_isa isa);
bool eng_isa_parse(const char *text, enum eng_isa *ret_isa);

/* NULL: this process may use it; otherwise the reason, a sentence for doctor and status. */
const char *eng_isa_missing(enum eng_isa isa);

/* The best that is here; PORTABLE always is. */
enum eng_isa eng_isa_best(void);

/* AUTO becomes the best; anything else stays itself. */
static inline enum eng_isa eng_isa_resolve(enum eng_isa isa)
{
    return isa == ENG_ISA_AUTO ? eng_isa_best() : isa;
}

/* "amx" or "fp32": results of one family are the same bits. */
const char *eng_isa_family(enum eng_isa isa);
