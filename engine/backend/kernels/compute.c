/*
 * Divides packing and products among threads.
 *
 * The parts of several items form one sequence, so that the many small products of a mixture of
 * experts cost one meeting of the threads and not one each.  A part is a run of outputs long enough
 * to pay for reading the packed inputs once more.
 */

#include "engine/backend/kernels/compute.h"

#include "engine/backend/kernels/elementwise.h"
#include "engine/backend/kernels/gemm_amx_split.h"
#include "kvstore/base/bytes.h"

#include <stdlib.h>

/* Units of outputs, and blocks of rows, in one part. */
#define GEMM_PART 8u
#define PACK_PART 1u
/* Rows in one part when there are few outputs to divide. */
#define GEMM_PART_ROWS 64u

struct item_run {
    const struct eng_compute *compute;
    const struct eng_pack_args *packs;
    const struct eng_gemm_args *gemms;
    uint32_t part_rows;
};

/* AVX-512, AVX2 and portable code are the fp32 family; tiles need AVX-512 for all but products and
 * attention.  The reference mode has products of fp32 inputs: the fp32 family's take any. */
#define SET(gemm_ops, attend_ops, elementwise_ops)                                                 \
    {                                                                                              \
        .gemm = &(gemm_ops), .attend = &(attend_ops), .elementwise = &(elementwise_ops),           \
    }

/* Rounded, and unrounded. */
static const struct eng_kernel_set sets[ENG_ISA_COUNT][2] = {
    [ENG_ISA_PORTABLE] = {SET(eng_gemm_base, eng_attend_base, eng_elementwise_base),
                          SET(eng_gemm_base, eng_attend_unrounded_base,
                              eng_elementwise_base_unrounded)},
#if defined(__x86_64__)
    [ENG_ISA_AVX2] = {SET(eng_gemm_avx2, eng_attend_avx2, eng_elementwise_avx2),
                      SET(eng_gemm_avx2, eng_attend_unrounded_avx2,
                          eng_elementwise_avx2_unrounded)},
    [ENG_ISA_AVX512] = {SET(eng_gemm_avx512, eng_attend_avx512, eng_elementwise_avx512),
                        SET(eng_gemm_avx512, eng_attend_unrounded_avx512,
                            eng_elementwise_avx512_unrounded)},
    [ENG_ISA_AMX] = {SET(eng_gemm_amx, eng_attend_amx, eng_elementwise_avx512),
                     SET(eng_gemm_amx_split, eng_attend_unrounded_avx512,
                         eng_elementwise_avx512_unrounded)},
#endif
};

const struct eng_kernel_set *eng_kernels_of(enum eng_isa isa, bool unrounded)
{
    isa = eng_isa_resolve(isa);
    return eng_isa_missing(isa) == NULL ? &sets[isa][unrounded] : NULL;
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
    compute.kernels = eng_kernels_of(compute.isa, false);
    const kv_status status = eng_pool_create(threads, role, &compute.pool, err);
    if (status != KV_OK) return status;
    const size_t bytes = (size_t)eng_pool_threads(compute.pool) * ENG_KERNEL_SCRATCH;
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

void eng_compute_unround(struct eng_compute *compute)
{
    compute->unrounded = true;
    compute->kernels = eng_kernels_of(compute->isa, true);
}

size_t eng_compute_packed_bytes(const struct eng_compute *compute, uint32_t rows, uint32_t k)
{
    const size_t values = (size_t)eng_pack_blocks(rows) * ENG_PACK_ROWS;
    if (compute->isa != ENG_ISA_AMX) return values * k * sizeof(float);
    return values * kv_round_up(k, 32) * 2 * (compute->unrounded ? AMX_SPLIT_PARTS : 1);
}

static uint32_t output_parts(const struct eng_gemm_args *item)
{
    return (eng_gemm_units(item->matrix->n) + GEMM_PART - 1) / GEMM_PART;
}

static uint32_t row_parts(const struct eng_gemm_args *item, uint32_t part_rows)
{
    return (item->rows + part_rows - 1) / part_rows;
}

static uint32_t gemm_parts(const struct eng_gemm_args *item, uint32_t part_rows)
{
    return output_parts(item) * row_parts(item, part_rows);
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
    run->compute->kernels->gemm->pack(item, part * PACK_PART, (part + 1) * PACK_PART);
}

static void run_gemm(void *arg, uint32_t part, uint32_t thread)
{
    const struct item_run *run = arg;
    const struct eng_gemm_args *item = run->gemms;

    for (; part >= gemm_parts(item, run->part_rows); item++)
        part -= gemm_parts(item, run->part_rows);
    const uint32_t outputs = part % output_parts(item);
    const uint32_t row = part / output_parts(item) * run->part_rows;
    struct eng_gemm_args some = *item;
    some.rows = KV_MIN(run->part_rows, item->rows - row);
    some.packed = (const uint8_t *)item->packed +
                  eng_compute_packed_bytes(run->compute, row, item->matrix->k);
    some.y += row * item->y_stride;
    run->compute->kernels->gemm->gemm(&some, outputs * GEMM_PART, (outputs + 1) * GEMM_PART,
                                      eng_compute_scratch(run->compute, thread));
}

/* Waking a thread takes as long as this many values packed, or weights used. */
#define ALONE_VALUES 32768u
#define ALONE_WEIGHTS 262144u

static void run_parts(const struct eng_compute *compute, bool alone, uint32_t parts,
                      eng_pool_fn *fn, struct item_run *run)
{
    if (alone)
        eng_pool_run_alone(parts, fn, run);
    else
        eng_pool_run(compute->pool, parts, fn, run);
}

void eng_compute_pack(const struct eng_compute *compute, const struct eng_pack_args *items,
                      uint32_t count)
{
    struct item_run run = {.compute = compute, .packs = items};
    uint64_t values = 0;
    uint32_t parts = 0;

    for (uint32_t i = 0; i < count; i++) {
        parts += pack_parts(&items[i]);
        values += (uint64_t)items[i].rows * items[i].k;
    }
    run_parts(compute, values < ALONE_VALUES, parts, run_pack, &run);
}

void eng_compute_gemm(const struct eng_compute *compute, const struct eng_gemm_args *items,
                      uint32_t count)
{
    const uint32_t threads = eng_pool_threads(compute->pool);
    struct item_run run = {.compute = compute, .gemms = items, .part_rows = UINT32_MAX / 2};
    uint32_t parts = 0, outputs = 0;
    uint64_t weights = 0; /* Decoded once, and used by every fourth row at the same price. */

    for (uint32_t i = 0; i < count; i++) {
        outputs += output_parts(&items[i]);
        weights += (uint64_t)items[i].matrix->n * items[i].matrix->k * (4 + items[i].rows) / 4;
    }
    /* Too few to go round: rows are divided as well, and weights decoded more than once. */
    if (threads > 1 && outputs < 4 * threads) run.part_rows = GEMM_PART_ROWS;
    for (uint32_t i = 0; i < count; i++)
        parts += gemm_parts(&items[i], run.part_rows);
    run_parts(compute, weights < ALONE_WEIGHTS, parts, run_gemm, &run);
}
