/*
 * Divides packing and products among threads.
 *
 * The parts of several items form one sequence, so that the many small products of a mixture of
 * experts cost one meeting of the threads and not one each.  A part is a run of outputs long enough
 * to pay for reading the packed inputs once more.
 */

#include "engine/backend/kernels/compute.h"

#include "engine/backend/kernels.h"
#include "kvstore/base/bytes.h"

#include <stdlib.h>

/* Units of outputs, and blocks of rows, in one part. */
#define GEMM_PART 8u
#define PACK_PART 1u

struct item_run {
    const struct eng_compute *compute;
    const struct eng_pack_args *packs;
    const struct eng_gemm_args *gemms;
};

const struct eng_gemm_ops *eng_gemm_of(enum eng_isa isa)
{
    isa = eng_isa_resolve(isa);
    if (eng_isa_missing(isa) != NULL) return NULL;
#if defined(__x86_64__)
    if (isa == ENG_ISA_AMX) return &eng_gemm_amx;
    if (isa == ENG_ISA_AVX512) return &eng_gemm_avx512;
    if (isa == ENG_ISA_AVX2) return &eng_gemm_avx2;
#endif
    return &eng_gemm_base;
}

const struct eng_attend_ops *eng_attend_of(enum eng_isa isa)
{
    isa = eng_isa_resolve(isa);
    if (eng_isa_missing(isa) != NULL) return NULL;
#if defined(__x86_64__)
    if (isa == ENG_ISA_AMX) return &eng_attend_amx;
    if (isa == ENG_ISA_AVX512) return &eng_attend_avx512;
    if (isa == ENG_ISA_AVX2) return &eng_attend_avx2;
#endif
    return &eng_attend_base;
}

const struct eng_kernels *eng_elementwise_of(enum eng_isa isa)
{
    isa = eng_isa_resolve(isa);
    if (eng_isa_missing(isa) != NULL) return NULL;
#if defined(__x86_64__)
    if (isa == ENG_ISA_AMX || isa == ENG_ISA_AVX512) return &eng_kernels_avx512;
    if (isa == ENG_ISA_AVX2) return &eng_kernels_avx2;
#endif
    return &eng_kernels_base;
}

kv_status eng_compute_open(enum eng_isa isa, uint32_t threads, enum kv_thread_role role,
                           struct eng_compute *ret_compute, struct kv_error *err)
{
    struct eng_compute compute = {.isa = eng_isa_resolve(isa)};
    const char *missing = eng_isa_missing(compute.isa);

    if (missing != NULL)
        return KV_FAIL(err, KV_INVALID, "kernels '%s' cannot be used: %s",
                       eng_isa_name(compute.isa), missing);
    compute.family = eng_isa_family(compute.isa);
    compute.gemm = eng_gemm_of(compute.isa);
    compute.attend = eng_attend_of(compute.isa);
    compute.elementwise = eng_elementwise_of(compute.isa);
    const kv_status status = eng_pool_create(threads, role, &compute.pool, err);
    if (status != KV_OK) return status;
    const size_t bytes = (size_t)eng_pool_threads(compute.pool) * ENG_COMPUTE_SCRATCH;
    compute.scratch = aligned_alloc(4096, bytes);
    if (compute.scratch == NULL) {
        eng_pool_destroy(compute.pool);
        return KV_FAIL(err, KV_NOMEM, "%zu bytes of scratch for kernels", bytes);
    }
    *ret_compute = compute;
    return KV_OK;
}

void eng_compute_close(struct eng_compute *compute)
{
    eng_pool_destroy(compute->pool);
    free(compute->scratch);
    *compute = (struct eng_compute){.isa = ENG_ISA_AUTO};
}

static uint32_t gemm_parts(const struct eng_gemm_args *item)
{
    return (eng_gemm_units(item->matrix->n) + GEMM_PART - 1) / GEMM_PART;
}

static uint32_t pack_parts(const struct eng_pack_args *item)
{
    return (eng_pack_blocks(item->rows) + PACK_PART - 1) / PACK_PART;
}

static void run_pack(void *arg, uint32_t part, uint32_t thread)
{
    const struct item_run *run = arg;
    const struct eng_pack_args *item = run->packs;

    (void)thread;
    for (; part >= pack_parts(item); item++)
        part -= pack_parts(item);
    run->compute->gemm->pack(item, part * PACK_PART, (part + 1) * PACK_PART);
}

static void run_gemm(void *arg, uint32_t part, uint32_t thread)
{
    const struct item_run *run = arg;
    const struct eng_gemm_args *item = run->gemms;

    for (; part >= gemm_parts(item); item++)
        part -= gemm_parts(item);
    run->compute->gemm->gemm(item, part * GEMM_PART, (part + 1) * GEMM_PART,
                             eng_compute_scratch(run->compute, thread));
}

void eng_compute_pack(const struct eng_compute *compute, const struct eng_pack_args *items,
                      uint32_t count)
{
    struct item_run run = {.compute = compute, .packs = items};
    uint32_t parts = 0;

    for (uint32_t i = 0; i < count; i++)
        parts += pack_parts(&items[i]);
    eng_pool_run(compute->pool, parts, run_pack, &run);
}

void eng_compute_gemm(const struct eng_compute *compute, const struct eng_gemm_args *items,
                      uint32_t count)
{
    struct item_run run = {.compute = compute, .gemms = items};
    uint32_t parts = 0;

    for (uint32_t i = 0; i < count; i++)
        parts += gemm_parts(&items[i]);
    eng_pool_run(compute->pool, parts, run_gemm, &run);
}
