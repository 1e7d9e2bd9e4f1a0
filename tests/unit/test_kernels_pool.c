/*
 * The pool hands out each part once, returns when all are done, and ends cleanly, with more threads
 * than processors as well.
 */

#include "engine/backend/kernels/pool.h"
#include "tests/harness.h"

#include <unistd.h>

#define PARTS_MAX 1000u

struct work {
    _Atomic uint32_t done[PARTS_MAX];
    uint32_t thread[PARTS_MAX];
    uint32_t threads;
};

static void mark(void *arg, uint32_t part, uint32_t thread)
{
    struct work *work = arg;
    (void)atomic_fetch_add(&work->done[part], 1);
    EXPECT(thread < work->threads);
    /* Unprotected on purpose: what a run wrote is there after it. */
    work->thread[part] = thread + 1;
}

static void test_each_part_once(void)
{
    static struct work work;

    for (uint32_t threads = 1; threads <= 6; threads++) {
        struct eng_pool *pool = NULL;
        EXPECT(eng_pool_create(threads, KV_THREAD_ANY, &pool, NULL) == KV_OK);
        EXPECT_EQ_U32(eng_pool_threads(pool), threads);
        work.threads = threads;
        for (uint32_t round = 0; round < harness_count(300); round++) {
            const uint32_t parts = round * 7 % PARTS_MAX;
            memset(&work.thread, 0, sizeof(work.thread));
            for (uint32_t i = 0; i < PARTS_MAX; i++)
                atomic_store(&work.done[i], 0);
            eng_pool_run(pool, parts, mark, &work);
            for (uint32_t i = 0; i < PARTS_MAX; i++) {
                EXPECT_EQ_U32(atomic_load(&work.done[i]), i < parts ? 1 : 0);
                EXPECT((work.thread[i] != 0) == (i < parts));
            }
            /* Long enough for helpers to fall asleep. */
            if (round % 50 == 0) (void)usleep(2000);
        }
        eng_pool_destroy(pool);
    }
}

static void test_default_and_unused(void)
{
    struct eng_pool *pool = NULL;

    EXPECT(eng_pool_create(0, KV_THREAD_ANY, &pool, NULL) == KV_OK);
    EXPECT(eng_pool_threads(pool) >= 1);
    eng_pool_destroy(pool);
    eng_pool_destroy(NULL);
}

int main(void)
{
    test_each_part_once();
    test_default_and_unused();
    HARNESS_END();
}
