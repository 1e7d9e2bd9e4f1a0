/*
 * Threads with roles.
 *
 * Goal: a started thread has its role, its name and no signal to receive; the starter keeps its own
 * role and mask; a thread never started can be joined; a join may have a limit.
 */

#include "kvstore/base/thread.h"
#include "tests/harness.h"

#include <signal.h>
#include <unistd.h>

struct seen {
    enum kv_thread_role role;
    char name[16];
    bool blocked;
};

static void look(void *arg)
{
    struct seen *seen = arg;
    sigset_t mask;
    seen->role = kv_thread_role();
    (void)pthread_getname_np(pthread_self(), seen->name, sizeof(seen->name));
    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    seen->blocked = sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGUSR1) == 1;
    kv_thread_assert(KV_THREAD_SHARD);
    kv_thread_be_nice(5);
}

static void wait_for_byte(void *arg)
{
    char byte;
    (void)!read(*(const int *)arg, &byte, 1);
}

/* One that does not end is not waited for, and can be joined later. */
static void test_join_within(void)
{
    struct kv_thread thread = {0};
    int ends[2];
    EXPECT(kv_thread_join_within(&thread, 0)); /* Never started. */
    EXPECT(pipe(ends) == 0);
    EXPECT(kv_thread_start(&thread, KV_THREAD_LOG, "waits", wait_for_byte, &ends[0], NULL) ==
           KV_OK);
    EXPECT(!kv_thread_join_within(&thread, 20));
    EXPECT(thread.started);
    EXPECT(write(ends[1], "x", 1) == 1);
    EXPECT(kv_thread_join_within(&thread, 10000));
    EXPECT(!thread.started);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

int main(void)
{
    struct seen seen = {0};
    struct kv_thread thread = {0};
    sigset_t mask;

    kv_thread_join(&thread);
    kv_thread_assert(KV_THREAD_LOG); /* No role: every assertion passes. */
    EXPECT(kv_thread_start(&thread, KV_THREAD_SHARD, "a-name-that-is-too-long", look, &seen,
                           NULL) == KV_OK);
    EXPECT(thread.started);
    kv_thread_join(&thread);
    EXPECT(!thread.started);
    EXPECT(seen.role == KV_THREAD_SHARD);
    EXPECT_EQ_STR(seen.name, "a-name-that-is-");
    EXPECT(seen.blocked);
    EXPECT(kv_thread_role() == KV_THREAD_ANY);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    EXPECT(sigismember(&mask, SIGTERM) == 0);
    test_join_within();
    HARNESS_END();
}
