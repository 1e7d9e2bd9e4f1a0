/*
 * A generation counter starts a run, a count of busy threads ends it; both are futexes.
 *
 * Every thread takes part in every run, so nobody can read a run that is over, and the fields of a
 * run need no protection beyond the two counters: they are written before the generation is
 * published and read after it was seen.  Parts are drawn from a counter, which costs one atomic
 * operation a part and evens out what threads are delayed by.
 *
 * Spinning only pays while each thread has a processor; with more threads than processors everyone
 * sleeps at once.
 */

#include "engine/backend/kernels/pool.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 4000u

struct helper {
    struct eng_pool *pool;
    struct kv_thread thread;
    uint32_t number;
};

struct eng_pool {
    uint32_t threads;
    uint32_t spins;
    /* Of the run; written by its caller while nobody is busy. */
    eng_pool_fn *fn;
    void *arg;
    uint32_t parts;
    bool is_over; /* The run that ends the pool. */
    _Alignas(64) _Atomic uint32_t generation;
    _Alignas(64) _Atomic uint32_t busy; /* Helpers that have not finished this run. */
    _Alignas(64) _Atomic uint32_t next;
    struct helper helpers[];
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Until *word is no longer `value`; returns what it is then. */
static uint32_t wait_change(const struct eng_pool *pool, _Atomic uint32_t *word, uint32_t value)
{
    uint32_t now = value;

    for (uint32_t i = 0; i < pool->spins; i++) {
        now = atomic_load_explicit(word, memory_order_acquire);
        if (now != value) return now;
        relax();
    }
    for (;;) {
        now = atomic_load_explicit(word, memory_order_acquire);
        if (now != value) return now;
        futex_wait(word, value);
    }
}

static void take_parts(struct eng_pool *pool, uint32_t thread)
{
    for (;;) {
        const uint32_t part = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (part >= pool->parts) return;
        pool->fn(pool->arg, part, thread);
    }
}

static void help(void *arg)
{
    struct helper *helper = arg;
    struct eng_pool *pool = helper->pool;

    for (uint32_t generation = 0;;) {
        generation = wait_change(pool, &pool->generation, generation);
        const bool is_over = pool->is_over;
        if (!is_over) take_parts(pool, helper->number);
        if (atomic_fetch_sub_explicit(&pool->busy, 1, memory_order_acq_rel) == 1)
            futex_wake(&pool->busy);
        if (is_over) return;
    }
}

/* Fields of the run are set. */
static void begin(struct eng_pool *pool)
{
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->busy, pool->threads - 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
    futex_wake(&pool->generation);
}

void eng_pool_run(struct eng_pool *pool, uint32_t parts, eng_pool_fn *fn, void *arg)
{
    if (pool->threads == 1 || parts <= 1) {
        for (uint32_t part = 0; part < parts; part++)
            fn(arg, part, 0);
        return;
    }
    /* The counter of parts passes the last one once per thread. */
    assert(parts <= UINT32_MAX - pool->threads);
    pool->fn = fn;
    pool->arg = arg;
    pool->parts = parts;
    begin(pool);
    take_parts(pool, 0);
    for (uint32_t busy; (busy = atomic_load_explicit(&pool->busy, memory_order_acquire)) != 0;)
        (void)wait_change(pool, &pool->busy, busy);
}

static uint32_t processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
    return (uint32_t)KV_MAX(1, CPU_COUNT(&set));
}

kv_status eng_pool_create(uint32_t threads, enum kv_thread_role role, struct eng_pool **ret_pool,
                          struct kv_error *err)
{
    const uint32_t here = processors();
    if (threads == 0) threads = here;
    threads = KV_MIN(threads, ENG_POOL_THREADS_MAX);

    const size_t bytes = sizeof(struct eng_pool) + (threads - 1) * sizeof(struct helper);
    struct eng_pool *pool = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (pool == NULL) return KV_FAIL(err, KV_NOMEM, "start %u engine threads", threads);
    *pool = (struct eng_pool){.threads = 1, .spins = threads <= here ? SPINS : 0};
    while (pool->threads < threads) {
        struct helper *helper = &pool->helpers[pool->threads - 1];
        char name[16];
        *helper = (struct helper){.pool = pool, .number = pool->threads};
        (void)snprintf(name, sizeof(name), "engine-%u", helper->number);
        const kv_status status = kv_thread_start(&helper->thread, role, name, help, helper, err);
        if (status != KV_OK) {
            eng_pool_destroy(pool);
            return status;
        }
        pool->threads++;
    }
    *ret_pool = pool;
    return KV_OK;
}

void eng_pool_destroy(struct eng_pool *pool)
{
    if (pool == NULL) return;
    pool->is_over = true;
    begin(pool);
    for (uint32_t i = 0; i + 1 < pool->threads; i++)
        kv_thread_join(&pool->helpers[i].thread);
    free(pool);
}

uint32_t eng_pool_threads(const struct eng_pool *pool)
{
    return pool->threads;
}
