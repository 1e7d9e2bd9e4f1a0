#pragma once

/* Thread roles.  Each thread names its role once; entry points assert it, so every test run
 * proves who owns what.  In programs that never call kv_thread_start (unit tests, tools) the role
 * is KV_THREAD_ANY and every assertion passes. */

#include "kvstore/base/status.h"

#include <pthread.h>
#include <stdint.h>

enum kv_thread_role {
    KV_THREAD_ANY = 0,
    KV_THREAD_MAIN,
    KV_THREAD_RPC,
    KV_THREAD_ACCEPT,
    KV_THREAD_SHARD,
    KV_THREAD_WORKER,
    KV_THREAD_MANIFEST,
    KV_THREAD_LOG,
    KV_THREAD_WATCH,
};

typedef void kv_thread_fn(void *arg);

struct kv_thread {
    pthread_t handle;
    bool started;
};

/* Starts fn(arg) with all signals blocked, the role set and the thread named. */
kv_status kv_thread_start(struct kv_thread *thread, enum kv_thread_role role, const char *name,
                          kv_thread_fn *fn, void *arg, struct kv_error *err) KV_MUST_CHECK;

/* Waits for it.  A thread that was never started is fine. */
void kv_thread_join(struct kv_thread *thread);
/* Waits that long at most.  false: it still runs, and what it uses must stay. */
bool kv_thread_join_within(struct kv_thread *thread, uint32_t ms) KV_MUST_CHECK;

enum kv_thread_role kv_thread_role(void);
void kv_thread_assert(enum kv_thread_role role);

/* Of threads that compute: calls go first. */
#define KV_COMPUTE_NICE 5

/* Lowers the calling thread's scheduling priority (nice value); best effort. */
void kv_thread_be_nice(int nice_value);
