/*
 * One word says which run there is, whether it can still be joined, and how many helpers are in it;
 * it is also the futex everybody sleeps on.
 *
 * A helper joins by counting itself in, and leaves by counting itself out.  The caller closes the
 * run when no part is left and waits for those inside only: a helper that has not woken up yet, on
 * a busy machine perhaps for a long time, is not missed.  The fields of a run are written while
 * nobody is inside and read after joining.  Parts are drawn from a counter, which costs one atomic
 * operation a part and evens out what threads are delayed by.
 *
 * Spinning only pays while each thread has a processor; with more threads than processors everyone
 * sleeps at once.
 */

#include "engine/backend/kernels/pool.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

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

/* The word: helpers inside, CLOSED, and the number of the run from bit RUN_SHIFT on. */
#define INSIDE 0x3ffu
#define CLOSED 0x400u
#define RUN_SHIFT 11u
_Static_assert(KV_ENGINE_THREADS_MAX <= INSIDE, "everyone can be inside");

struct eng_pool {
    uint32_t threads;
    uint32_t spins;
    /* Of the run; written by its caller while nobody is inside. */
    eng_pool_fn *fn;
    void *arg;
    uint32_t parts;
    _Alignas(64) _Atomic uint32_t word;
    _Atomic uint32_t sleepers;
    atomic_bool is_over;
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

/* After a change of the word. */
static void wake(struct eng_pool *pool)
{
    if (atomic_load(&pool->sleepers) > 0)
        (void)syscall(SYS_futex, &pool->word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void sleep_while(struct eng_pool *pool, uint32_t value)
{
    (void)atomic_fetch_add(&pool->sleepers, 1);
    if (atomic_load(&pool->word) == value) futex_wait(&pool->word, value);
    (void)atomic_fetch_sub(&pool->sleepers, 1);
}

static void take_parts(struct eng_pool *pool, uint32_t thread)
{
    for (;;) {
        const uint32_t part = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (part >= pool->parts) return;
        pool->fn(pool->arg, part, thread);
    }
}

/* Counts the caller into a run other than `last`; returns its number, or `last` when the pool is
 * over. */
static uint32_t join_run(struct eng_pool *pool, uint32_t last)
{
    for (uint32_t spins = 0;;) {
        uint32_t word = atomic_load(&pool->word);
        if (atomic_load(&pool->is_over)) return last;
        if ((word & CLOSED) == 0 && word >> RUN_SHIFT != last) {
            if (atomic_compare_exchange_weak(&pool->word, &word, word + 1))
                return word >> RUN_SHIFT;
        } else if (spins < pool->spins) {
            spins++;
            relax();
        } else {
            sleep_while(pool, word);
        }
    }
}

static void help(void *arg)
{
    struct helper *helper = arg;
    struct eng_pool *pool = helper->pool;

    kv_thread_be_nice(KV_COMPUTE_NICE);
    for (uint32_t run = 0, last = 0;; last = run) {
        run = join_run(pool, last);
        if (run == last) return;
        take_parts(pool, helper->number);
        const uint32_t word = atomic_fetch_sub(&pool->word, 1) - 1;
        if ((word & (CLOSED | INSIDE)) == CLOSED) wake(pool);
    }
}

/* Numbers go round, and 0 is never one: a helper begins with it. */
static uint32_t run_after(uint32_t word)
{
    const uint32_t run = ((word >> RUN_SHIFT) + 1) << RUN_SHIFT;
    return run != 0 ? run : 1u << RUN_SHIFT;
}

/* No more helpers; returns when those inside have left. */
static void close_run(struct eng_pool *pool)
{
    uint32_t word = atomic_fetch_or(&pool->word, CLOSED) | CLOSED;

    for (uint32_t spins = 0; (word & INSIDE) != 0; word = atomic_load(&pool->word))
        if (spins < pool->spins) {
            spins++;
            relax();
        } else {
            sleep_while(pool, word);
        }
}

void eng_pool_run_alone(uint32_t parts, eng_pool_fn *fn, void *arg)
{
    for (uint32_t part = 0; part < parts; part++)
        fn(arg, part, 0);
}

void eng_pool_run(struct eng_pool *pool, uint32_t parts, eng_pool_fn *fn, void *arg)
{
    if (pool->threads == 1 || parts <= 1) {
        eng_pool_run_alone(parts, fn, arg);
        return;
    }
    /* The counter of parts passes the last one once per thread. */
    assert(parts <= UINT32_MAX - pool->threads);
    pool->fn = fn;
    pool->arg = arg;
    pool->parts = parts;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store(&pool->word, run_after(atomic_load(&pool->word)));
    wake(pool);
    take_parts(pool, 0);
    close_run(pool);
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
    threads = KV_MIN(threads, KV_ENGINE_THREADS_MAX);

    const size_t bytes = sizeof(struct eng_pool) + (threads - 1) * sizeof(struct helper);
    struct eng_pool *pool = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (pool == NULL) return KV_FAIL(err, KV_NOMEM, "start %u engine threads", threads);
    *pool = (struct eng_pool){.threads = 1, .spins = threads <= here ? SPINS : 0, .word = CLOSED};
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
    atomic_store(&pool->is_over, true);
    atomic_store(&pool->word, run_after(atomic_load(&pool->word)) | CLOSED);
    wake(pool);
    for (uint32_t i = 0; i + 1 < pool->threads; i++)
        kv_thread_join(&pool->helpers[i].thread);
    free(pool);
}

uint32_t eng_pool_threads(const struct eng_pool *pool)
{
    return pool->threads;
}
