/*
 * Threads with a role.
 *
 * The role is the one mutable variable outside a struct in this code base: it is thread-local, is
 * written once before the thread's function runs, and costs one load to check.  Signals are blocked
 * in the creator around pthread_create, so that a new thread never has an instant in which it could
 * receive one: the daemon's main thread reads them by signalfd.  SIGBUS stays open: a thread's own
 * fault cannot wait, and mapped files that shrink are handled (engine/model/mapping.c).
 */

#include "kvstore/base/thread.h"

#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static _Thread_local enum kv_thread_role current_role = KV_THREAD_ANY;

struct start {
    enum kv_thread_role role;
    kv_thread_fn *fn;
    void *arg;
    char name[16]; /* The kernel keeps 15 characters. */
};

static void *thread_main(void *context)
{
    const struct start start = *(struct start *)context;
    free(context);
    current_role = start.role;
    (void)pthread_setname_np(pthread_self(), start.name);
    start.fn(start.arg);
    return NULL;
}

kv_status kv_thread_start(struct kv_thread *thread, enum kv_thread_role role, const char *name,
                          kv_thread_fn *fn, void *arg, struct kv_error *err)
{
    assert(!thread->started);
    assert(fn != NULL);

    struct start *start = malloc(sizeof(*start));
    if (start == NULL) return KV_FAIL(err, KV_NOMEM, "start thread '%s'", name);
    *start = (struct start){.role = role, .fn = fn, .arg = arg};
    (void)snprintf(start->name, sizeof(start->name), "%.15s", name);

    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)sigdelset(&all, SIGBUS);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&thread->handle, NULL, thread_main, start);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        free(start);
        errno = rc;
        return KV_FAIL_ERRNO(err, rc == ENOMEM ? KV_NOMEM : KV_BUSY, "start thread '%s'", name);
    }
    thread->started = true;
    return KV_OK;
}

void kv_thread_join(struct kv_thread *thread)
{
    if (!thread->started) return;
    const int rc = pthread_join(thread->handle, NULL);
    assert(rc == 0);
    thread->started = false;
}

bool kv_thread_join_within(struct kv_thread *thread, uint32_t ms)
{
    struct timespec until;
    if (!thread->started) return true;
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    const uint64_t ns = (uint64_t)until.tv_nsec + (uint64_t)(ms % 1000) * 1000000u;
    until.tv_sec += (time_t)(ms / 1000 + ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    const int rc = pthread_clockjoin_np(thread->handle, NULL, CLOCK_MONOTONIC, &until);
    assert(rc == 0 || rc == ETIMEDOUT);
    thread->started = rc != 0;
    return rc == 0;
}

enum kv_thread_role kv_thread_role(void)
{
    return current_role;
}

void kv_thread_assert(enum kv_thread_role role)
{
    assert(current_role == role || current_role == KV_THREAD_ANY);
}

void kv_thread_be_nice(int nice_value)
{
    /* On Linux the nice value belongs to the thread; `who` is its id and not the process's. */
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), nice_value);
}
