#pragma once

/*
 * Threads that share one loop.
 *
 * A run hands out the numbers 0 .. parts - 1, each once, to the caller and the pool's own threads,
 * and returns when all are done.  Which thread takes which part is open: work must not depend on
 * it, and what it writes must not overlap.  Threads spin for some microseconds after a run, because
 * the next one follows soon, and then sleep.
 *
 * Owned by: whoever created it, who is also the only thread that may call run.
 */

#include "kvstore/base/status.h"
#include "kvstore/base/thread.h"

#include <stdint.h>

struct eng_pool;

/* thread: 0 for the caller of run, 1 .. threads - 1 for the others; for scratch memory. */
typedef void eng_pool_fn(void *arg, uint32_t part, uint32_t thread);

/* threads: with the caller; 0 is one per processor this process may use.  At most
 * KV_ENGINE_THREADS_MAX.  The pool's own threads have `role`. */
kv_status eng_pool_create(uint32_t threads, enum kv_thread_role role, struct eng_pool **ret_pool,
                          struct kv_error *err) KV_MUST_CHECK;
void eng_pool_destroy(struct eng_pool *pool);

uint32_t eng_pool_threads(const struct eng_pool *pool);
void eng_pool_run(struct eng_pool *pool, uint32_t parts, eng_pool_fn *fn, void *arg);
/* All parts on the calling thread: for work that is done before anybody has woken up. */
void eng_pool_run_alone(uint32_t parts, eng_pool_fn *fn, void *arg);
