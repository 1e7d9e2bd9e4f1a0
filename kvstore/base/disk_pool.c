/*
 * A disk where the kernel refuses io_uring: four threads.
 *
 * A thread makes one try of an op, notes its result in it and puts it on the list of those done;
 * what the result means is found out on the owner's thread, inside run, as with io_uring.
 */

#include "kvstore/base/disk_pool.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/disk_queue.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define POOL_THREADS 4u

struct pool {
    struct kv_disk disk;
    struct kv_disk_queue started; /* Not yet handed over. */
    struct kv_thread threads[POOL_THREADS];
    int done_fd;

    pthread_mutex_t lock; /* Guards what follows. */
    pthread_cond_t work;
    struct kv_disk_queue todo;
    struct kv_disk_queue done;
    bool signalled; /* done_fd is readable. */
    bool stop;
};

static struct pool *pool_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct pool, disk);
}

static void pool_main(void *arg)
{
    struct pool *pool = arg;
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct kv_disk_op *op = kv_disk_queue_pop(&pool->todo);
        if (op == NULL) {
            if (pool->stop) break;
            (void)pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        (void)pthread_mutex_unlock(&pool->lock);
        op->result = kv_disk_kernel(&op->rest);
        (void)pthread_mutex_lock(&pool->lock);
        kv_disk_queue_push(&pool->done, op);
        if (!pool->signalled) {
            pool->signalled = true;
            const int rc = eventfd_write(pool->done_fd, 1);
            assert(rc == 0); /* 0 to 1 never blocks. */
        }
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

static void pool_destroy(struct kv_disk *disk)
{
    struct pool *pool = pool_of(disk);
    (void)pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    (void)pthread_cond_broadcast(&pool->work);
    (void)pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < POOL_THREADS; i++)
        kv_thread_join(&pool->threads[i]);
    if (pool->done_fd >= 0) (void)close(pool->done_fd);
    (void)pthread_cond_destroy(&pool->work);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static void pool_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    kv_disk_queue_push(&pool_of(disk)->started, op);
}

static uint32_t pool_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    struct pool *pool = pool_of(disk);
    if (pool->started.head != NULL) {
        (void)pthread_mutex_lock(&pool->lock);
        kv_disk_queue_append(&pool->todo, &pool->started);
        (void)pthread_cond_broadcast(&pool->work);
        (void)pthread_mutex_unlock(&pool->lock);
    }

    /* poll() skips negative descriptors. */
    struct pollfd fds[2] = {{.fd = pool->done_fd, .events = POLLIN},
                            {.fd = wake_fd, .events = POLLIN}};
    (void)poll(fds, 2, timeout_ms); /* Interrupted: the caller's loop comes again. */

    struct kv_disk_queue done;
    (void)pthread_mutex_lock(&pool->lock);
    done = pool->done;
    pool->done = (struct kv_disk_queue){0};
    if (pool->signalled) {
        eventfd_t drained;
        const int rc = eventfd_read(pool->done_fd, &drained);
        assert(rc == 0);
        pool->signalled = false;
    }
    (void)pthread_mutex_unlock(&pool->lock);

    uint32_t count = 0;
    for (struct kv_disk_op *op; (op = kv_disk_queue_pop(&done)) != NULL;)
        count += kv_disk_result(op, op->result);
    return count;
}

static int64_t pool_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    (void)disk;
    return kv_disk_kernel(call);
}

static const struct kv_disk_ops pool_ops = {
    .name = "pool",
    .destroy = pool_destroy,
    .start = pool_start,
    .run = pool_run,
    .call = pool_call,
};

kv_status kv_disk_pool_create(struct kv_disk **ret_disk, struct kv_error *err)
{
    struct pool *pool = calloc(1, sizeof(*pool));
    if (pool == NULL) return KV_FAIL(err, KV_NOMEM, "create the I/O threads");
    pool->disk.ops = &pool_ops;
    (void)pthread_mutex_init(&pool->lock, NULL); /* Neither fails with default attributes. */
    (void)pthread_cond_init(&pool->work, NULL);

    kv_status status = KV_OK;
    pool->done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (pool->done_fd < 0) status = KV_FAIL_ERRNO(err, KV_IO, "create the I/O threads' eventfd");
    for (uint32_t i = 0; i < POOL_THREADS && status == KV_OK; i++)
        status = kv_thread_start(&pool->threads[i], KV_THREAD_ANY, "kv-io", pool_main, pool, err);
    if (status != KV_OK) goto fail;
    *ret_disk = &pool->disk;
    return KV_OK;

fail:
    pool_destroy(&pool->disk);
    return status;
}
