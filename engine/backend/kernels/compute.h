#pragma once

/*
 * The kernels of one instruction set together with the threads that run them: what a backend opens
 * once.
 *
 * Owned by: the worker thread; one caller at a time.  No result depends on the number of threads.
 */

#include "engine/backend/kernels/attend.h"
#include "engine/backend/kernels/gemm.h"
#include "engine/backend/kernels/isa.h"
#include "engine/backend/kernels/pool.h"

struct eng_elementwise_ops;

/* What one instruction set computes with. */
struct eng_kernel_set {
    const struct eng_gemm_ops *gemm;
    const struct eng_attend_ops *attend;
    const struct eng_elementwise_ops *elementwise;
};

struct eng_compute {
    enum eng_isa isa;   /* Never AUTO. */
    bool unrounded;     /* Inputs are any fp32 numbers. */
    const char *family; /* eng_isa_family() */
    const struct eng_kernel_set *kernels;
    struct eng_pool *pool;
    uint8_t *scratch; /* ENG_KERNEL_SCRATCH per thread */
};

/* KV_INVALID: the machine or the process may not use `isa`; the error says why. */
kv_status eng_compute_open(enum eng_isa isa, uint32_t threads, enum kv_thread_role role,
                           struct eng_compute *ret_compute, struct kv_error *err) KV_MUST_CHECK;
void eng_compute_close(struct eng_compute *compute);

/* The reference mode: no kernel rounds an activation, inputs of products are any fp32 numbers, rows
 * to attend to are fp32.  Before anything is packed. */
void eng_compute_unround(struct eng_compute *compute);

/* What packed inputs take here, never more than eng_packed_bytes() unless unrounded; rows from a
 * block of ENG_PACK_ROWS on are eng_compute_packed_bytes() of the rows before behind the first. */
size_t eng_compute_packed_bytes(const struct eng_compute *compute, uint32_t rows, uint32_t k);

/* The operations alone, for calls inside a run of the pool; unrounded: of the reference mode. NULL:
 * not on this machine. */
const struct eng_kernel_set *eng_kernels_of(enum eng_isa isa, bool unrounded);

/* Scratch of one thread, for attend, score and the parts of a gemm. */
static inline void *eng_compute_scratch(const struct eng_compute *compute, uint32_t thread)
{
    return compute->scratch + (size_t)thread * ENG_KERNEL_SCRATCH;
}

/* All inputs, then all products; the items of one call do not depend on each other. */
void eng_compute_pack(const struct eng_compute *compute, const struct eng_pack_args *items,
                      uint32_t count);
void eng_compute_gemm(const struct eng_compute *compute, const struct eng_gemm_args *items,
                      uint32_t count);
