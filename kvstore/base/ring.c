/*
 * File I/O for a shard: io_uring, or four threads where the kernel refuses it.
 *
 * Both backends share one life of an op: queued by start, handed over by the next run, advanced by
 * each result until its bytes are complete, finished inside run.  A result never touches the op's
 * owner from another thread: pool threads only move bytes and put the op on the done list.
 *
 * io_uring: setup flags are asked for and dropped, because kernels of the same version differ in
 * what seccomp and sysctl leave of them.  The wake descriptor is watched by a one-shot poll inside
 * the ring, so the loop sleeps in one place.  A submit that fails for good breaks the ring: the ops
 * it did not take fail, and the kernel is not entered again, because waiting for completions of
 * work that was never accepted hangs for ever.
 */

#include "kvstore/base/ring.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <inttypes.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define POOL_THREADS 4u
#define PIECE_BYTES_MAX (1ull << 30) /* The kernel's limit for one registered buffer. */
#define PIECES_MAX 256u
#define DEPTH_MAX 4096u

struct queue {
    struct kv_ring_op *head;
    struct kv_ring_op *tail;
};

struct pool {
    struct kv_thread threads[POOL_THREADS];
    int done_fd;

    pthread_mutex_t lock; /* Guards what follows. */
    pthread_cond_t work;
    struct queue todo;
    struct queue done;
    bool signalled; /* done_fd is readable. */
    bool stop;
};

/* Owned by: the thread that created it. */
struct kv_ring {
    uint32_t depth;
    uint32_t inflight;   /* Started, done() not yet run. */
    uint32_t in_kernel;  /* Of these, with io_uring: at most depth. */
    struct queue queue;  /* Started, not yet handed over. */
    struct queue failed; /* Refused by a broken ring, done() not yet run. */

    struct pool *pool; /* NULL: io_uring. */

    struct io_uring uring;
    bool uring_made;
    int broken_errno; /* 0: healthy. */
    int wake_fd;      /* Watched by the outstanding poll. */
    bool wake_armed;
    uint64_t wake_tag; /* user_data of that poll: odd, and so never an op's address. */
    struct iovec pieces[PIECES_MAX];
    uint32_t piece_count;
};

static void queue_push(struct queue *queue, struct kv_ring_op *op)
{
    op->next = NULL;
    if (queue->tail == NULL) {
        queue->head = op;
    } else {
        queue->tail->next = op;
    }
    queue->tail = op;
}

static struct kv_ring_op *queue_pop(struct queue *queue)
{
    struct kv_ring_op *op = queue->head;
    if (op == NULL) return NULL;
    queue->head = op->next;
    if (queue->head == NULL) queue->tail = NULL;
    op->next = NULL;
    return op;
}

static void queue_append(struct queue *queue, struct queue *more)
{
    if (more->head == NULL) return;
    if (queue->tail == NULL) {
        queue->head = more->head;
    } else {
        queue->tail->next = more->head;
    }
    queue->tail = more->tail;
    *more = (struct queue){0};
}

static void op_fail(struct kv_ring_op *op, int sys_errno)
{
    op->status = KV_IO;
    op->sys_errno = sys_errno;
}

/* Takes one result (bytes, or minus errno).  False: go on with the rest. */
static bool op_advance(struct kv_ring_op *op, int64_t result)
{
    if (result == -EINTR) return false;
    if (result < 0) {
        /* A read that ended inside a block met the end of the file; O_DIRECT then calls the rest
         * misaligned.  The file is short, and that is what the owner should hear. */
        const bool is_short = result == -EINVAL && op->bytes_done % 512 != 0;
        op_fail(op, is_short ? 0 : (int)-result);
        return true;
    }
    op->bytes_done += (uint32_t)result;
    if (op->verb == KV_RING_SYNC || op->bytes_done == op->bytes) {
        op->status = KV_OK;
        return true;
    }
    if (result == 0) op_fail(op, 0);
    return result == 0;
}

static void op_finish(struct kv_ring *ring, struct kv_ring_op *op)
{
    assert(ring->inflight > 0);
    ring->inflight--;
    op->done(op); /* May start ops, this one included, or free the owner. */
}

/* Where the op goes on; a sync has no buffer. */
static uint8_t *op_rest(const struct kv_ring_op *op)
{
    return op->buf == NULL ? NULL : op->buf + op->bytes_done;
}

/* ---- pool ---- */

static int64_t pool_call(const struct kv_ring_op *op)
{
    uint8_t *buf = op_rest(op);
    const size_t left = op->bytes - op->bytes_done;
    const off_t offset = (off_t)(op->offset + op->bytes_done);
    int64_t result = -EINVAL;
    switch (op->verb) {
    case KV_RING_READ:
        result = pread(op->fd, buf, left, offset);
        break;
    case KV_RING_WRITE:
        result = pwrite(op->fd, buf, left, offset);
        break;
    case KV_RING_SYNC:
        result = fdatasync(op->fd);
        break;
    }
    return result < 0 ? -errno : result;
}

static void pool_main(void *arg)
{
    struct pool *pool = arg;
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct kv_ring_op *op = queue_pop(&pool->todo);
        if (op == NULL) {
            if (pool->stop) break;
            (void)pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        (void)pthread_mutex_unlock(&pool->lock);
        while (!op_advance(op, pool_call(op)))
            continue;
        (void)pthread_mutex_lock(&pool->lock);
        queue_push(&pool->done, op);
        if (!pool->signalled) {
            pool->signalled = true;
            const int rc = eventfd_write(pool->done_fd, 1);
            assert(rc == 0); /* 0 to 1 never blocks. */
        }
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

static void pool_destroy(struct pool *pool)
{
    if (pool == NULL) return;
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

static kv_status pool_create(struct pool **ret_pool, struct kv_error *err)
{
    struct pool *pool = calloc(1, sizeof(*pool));
    if (pool == NULL) return KV_FAIL(err, KV_NOMEM, "create the I/O threads");
    (void)pthread_mutex_init(&pool->lock, NULL); /* Neither fails with default attributes. */
    (void)pthread_cond_init(&pool->work, NULL);

    kv_status status = KV_OK;
    pool->done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (pool->done_fd < 0) status = KV_FAIL_ERRNO(err, KV_IO, "create the I/O threads' eventfd");
    for (uint32_t i = 0; i < POOL_THREADS && status == KV_OK; i++)
        status = kv_thread_start(&pool->threads[i], KV_THREAD_ANY, "kv-io", pool_main, pool, err);
    if (status != KV_OK) goto fail;
    *ret_pool = pool;
    return KV_OK;

fail:
    pool_destroy(pool);
    return status;
}

static uint32_t pool_run(struct kv_ring *ring, int wake_fd, int timeout_ms)
{
    struct pool *pool = ring->pool;
    if (ring->queue.head != NULL) {
        (void)pthread_mutex_lock(&pool->lock);
        queue_append(&pool->todo, &ring->queue);
        (void)pthread_cond_broadcast(&pool->work);
        (void)pthread_mutex_unlock(&pool->lock);
    }

    /* poll() skips negative descriptors. */
    struct pollfd fds[2] = {{.fd = pool->done_fd, .events = POLLIN},
                            {.fd = wake_fd, .events = POLLIN}};
    (void)poll(fds, 2, timeout_ms); /* Interrupted: the caller's loop comes again. */

    struct queue done;
    (void)pthread_mutex_lock(&pool->lock);
    done = pool->done;
    pool->done = (struct queue){0};
    if (pool->signalled) {
        eventfd_t drained;
        const int rc = eventfd_read(pool->done_fd, &drained);
        assert(rc == 0);
        pool->signalled = false;
    }
    (void)pthread_mutex_unlock(&pool->lock);

    uint32_t count = 0;
    for (struct kv_ring_op *op; (op = queue_pop(&done)) != NULL; count++)
        op_finish(ring, op);
    return count;
}

/* ---- io_uring ---- */

/* Index of the registered buffer that holds all of it; -1: none. */
static int piece_find(const struct kv_ring *ring, const uint8_t *buf, uint64_t bytes)
{
    for (uint32_t i = 0; i < ring->piece_count; i++) {
        const uint8_t *base = ring->pieces[i].iov_base;
        if (buf >= base && buf + bytes <= base + ring->pieces[i].iov_len) return (int)i;
    }
    return -1;
}

static void uring_prepare(struct kv_ring *ring, struct io_uring_sqe *sqe, struct kv_ring_op *op)
{
    uint8_t *buf = op_rest(op);
    const uint32_t left = op->bytes - op->bytes_done;
    const uint64_t offset = op->offset + op->bytes_done;
    const int piece = op->verb == KV_RING_SYNC ? -1 : piece_find(ring, buf, left);
    switch (op->verb) {
    case KV_RING_READ:
        if (piece >= 0) {
            io_uring_prep_read_fixed(sqe, op->fd, buf, left, offset, piece);
        } else {
            io_uring_prep_read(sqe, op->fd, buf, left, offset);
        }
        break;
    case KV_RING_WRITE:
        if (piece >= 0) {
            io_uring_prep_write_fixed(sqe, op->fd, buf, left, offset, piece);
        } else {
            io_uring_prep_write(sqe, op->fd, buf, left, offset);
        }
        break;
    case KV_RING_SYNC:
        io_uring_prep_fsync(sqe, op->fd, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data(sqe, op);
}

/* Watches wake_fd, if it is not watched already.  False: no room, so do not sleep this time. */
static bool uring_arm(struct kv_ring *ring, int wake_fd)
{
    if (wake_fd < 0 || (ring->wake_armed && ring->wake_fd == wake_fd)) return true;
    if (io_uring_sq_space_left(&ring->uring) < 2) return false;
    if (ring->wake_armed) {
        /* Its completions carry tags nobody waits for any more. */
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
        io_uring_prep_poll_remove(sqe, ring->wake_tag);
        io_uring_sqe_set_data64(sqe, 1);
    }
    ring->wake_tag += 2;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    io_uring_prep_poll_add(sqe, wake_fd, POLLIN);
    io_uring_sqe_set_data64(sqe, ring->wake_tag);
    ring->wake_fd = wake_fd;
    ring->wake_armed = true;
    return true;
}

/* Fails what the kernel did not take: the entries between its head and our tail. */
static void uring_break(struct kv_ring *ring, int sys_errno)
{
    const struct io_uring_sq *sq = &ring->uring.sq;
    ring->broken_errno = sys_errno;
    for (unsigned i = *sq->khead; i != sq->sqe_tail; i++) {
        const uint64_t data = sq->sqes[i & sq->ring_mask].user_data;
        if (data & 1) continue;
        struct kv_ring_op *op = (struct kv_ring_op *)(uintptr_t)data;
        op_fail(op, sys_errno);
        queue_push(&ring->failed, op);
        ring->in_kernel--;
    }
}

static void uring_submit(struct kv_ring *ring)
{
    while (ring->queue.head != NULL && ring->in_kernel < ring->depth) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
        if (sqe == NULL) break; /* Full of entries a busy kernel has not taken yet. */
        uring_prepare(ring, sqe, queue_pop(&ring->queue));
        ring->in_kernel++;
    }
    while (io_uring_sq_ready(&ring->uring) > 0) {
        const int rc = io_uring_submit(&ring->uring);
        if (rc > 0 || rc == -EINTR) continue;
        /* Out of memory or of room for completions: reap, and the next run submits again. */
        if (rc == 0 || rc == -EAGAIN || rc == -EBUSY) break;
        uring_break(ring, -rc);
        break;
    }
}

static void uring_wait(struct kv_ring *ring, int wake_fd, int timeout_ms)
{
    if (timeout_ms == 0 || io_uring_cq_ready(&ring->uring) > 0) return;
    if (ring->broken_errno != 0) {
        struct pollfd fds[2] = {{.fd = ring->uring.ring_fd, .events = POLLIN},
                                {.fd = wake_fd, .events = POLLIN}};
        (void)poll(fds, 2, timeout_ms);
        return;
    }
    /* Results are ignored: timed out, interrupted or there is one, reaping finds out. */
    struct io_uring_cqe *cqe;
    if (timeout_ms < 0) {
        (void)io_uring_wait_cqe(&ring->uring, &cqe);
    } else {
        struct __kernel_timespec limit = {.tv_sec = timeout_ms / 1000,
                                          .tv_nsec = timeout_ms % 1000 * 1000000ll};
        (void)io_uring_wait_cqe_timeout(&ring->uring, &cqe, &limit);
    }
}

static uint32_t uring_reap(struct kv_ring *ring)
{
    /* What the done functions start is not submitted in here, so this ends. */
    uint32_t count = 0;
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&ring->uring, &cqe) == 0) {
        const uint64_t data = cqe->user_data;
        const int result = cqe->res;
        io_uring_cqe_seen(&ring->uring, cqe);
        if (data & 1) {
            if (data == ring->wake_tag) ring->wake_armed = false;
            continue;
        }
        struct kv_ring_op *op = (struct kv_ring_op *)(uintptr_t)data;
        ring->in_kernel--;
        if (!op_advance(op, result)) {
            queue_push(&ring->queue, op);
            continue;
        }
        op_finish(ring, op);
        count++;
    }
    return count;
}

static uint32_t uring_run(struct kv_ring *ring, int wake_fd, int timeout_ms)
{
    if (ring->broken_errno == 0) {
        if (timeout_ms != 0 && !uring_arm(ring, wake_fd)) timeout_ms = 0;
        uring_submit(ring);
    }
    if (ring->broken_errno != 0) {
        for (struct kv_ring_op *op; (op = queue_pop(&ring->queue)) != NULL;) {
            op_fail(op, ring->broken_errno);
            queue_push(&ring->failed, op);
        }
    }
    uring_wait(ring, wake_fd, ring->failed.head != NULL ? 0 : timeout_ms);

    uint32_t count = uring_reap(ring);
    struct queue failed = ring->failed;
    ring->failed = (struct queue){0};
    for (struct kv_ring_op *op; (op = queue_pop(&failed)) != NULL; count++)
        op_finish(ring, op);
    return count;
}

static bool uring_has_verbs(struct io_uring *uring)
{
    struct io_uring_probe *probe = io_uring_get_probe_ring(uring);
    if (probe == NULL) return false;
    const bool has = io_uring_opcode_supported(probe, IORING_OP_READ) &&
                     io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                     io_uring_opcode_supported(probe, IORING_OP_FSYNC) &&
                     io_uring_opcode_supported(probe, IORING_OP_POLL_ADD);
    io_uring_free_probe(probe);
    return has;
}

static kv_status uring_create(struct kv_ring *ring, struct kv_error *err)
{
    /* TASKRUN_FLAG lets a peek see that completions wait for us to enter the kernel.  Not
     * SINGLE_ISSUER: the main thread makes the ring, the shard runs it. */
    static const unsigned flags[] = {
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        0,
    };
    int rc = -EINVAL;
    for (size_t i = 0; i < KV_ARRAY_COUNT(flags) && rc == -EINVAL; i++)
        rc = io_uring_queue_init(ring->depth + 2, &ring->uring, flags[i]); /* 2: the wake poll. */
    if (rc < 0) {
        errno = -rc;
        return KV_FAIL_ERRNO(err, KV_IO, "set up io_uring with %" PRIu32 " entries", ring->depth);
    }
    ring->uring_made = true;
    if (!uring_has_verbs(&ring->uring))
        return KV_FAIL(err, KV_IO, "this kernel's io_uring cannot read, write and sync files");
    return KV_OK;
}

static void uring_destroy(struct kv_ring *ring)
{
    if (ring->uring_made) io_uring_queue_exit(&ring->uring);
    ring->uring_made = false;
}

/* ---- both ---- */

kv_status kv_ring_create(uint32_t depth, enum kv_ring_choice choice, struct kv_ring **ret_ring,
                         struct kv_error *err)
{
    assert(depth > 0);
    assert(depth <= DEPTH_MAX);

    struct kv_ring *ring = calloc(1, sizeof(*ring));
    if (ring == NULL) return KV_FAIL(err, KV_NOMEM, "create a ring");
    ring->depth = depth;
    ring->wake_fd = -1;
    ring->wake_tag = 1;

    kv_status status = KV_IO;
    if (choice != KV_RING_POOL) status = uring_create(ring, err);
    if (status != KV_OK && choice == KV_RING_URING) goto fail;
    if (status != KV_OK) {
        uring_destroy(ring);
        status = pool_create(&ring->pool, err);
        if (status != KV_OK) goto fail;
    }
    *ret_ring = ring;
    return KV_OK;

fail:
    kv_ring_destroy(ring);
    return status;
}

void kv_ring_destroy(struct kv_ring *ring)
{
    if (ring == NULL) return;
    assert(ring->inflight == 0);
    uring_destroy(ring);
    pool_destroy(ring->pool);
    free(ring);
}

const char *kv_ring_backend(const struct kv_ring *ring)
{
    return ring->pool != NULL ? "pool" : "io_uring";
}

void kv_ring_start(struct kv_ring *ring, struct kv_ring_op *op)
{
    assert(op->done != NULL);
    assert(op->fd >= 0);
    if (op->verb != KV_RING_SYNC) assert(op->buf != NULL && op->bytes > 0);

    op->status = KV_OK;
    op->sys_errno = 0;
    op->bytes_done = 0;
    queue_push(&ring->queue, op);
    ring->inflight++;
}

uint32_t kv_ring_run(struct kv_ring *ring, int wake_fd, int timeout_ms)
{
    /* Nothing could ever wake it. */
    if (ring->inflight == 0 && wake_fd < 0 && timeout_ms < 0) return 0;
    return ring->pool != NULL ? pool_run(ring, wake_fd, timeout_ms)
                              : uring_run(ring, wake_fd, timeout_ms);
}

uint32_t kv_ring_inflight(const struct kv_ring *ring)
{
    return ring->inflight;
}

kv_status kv_ring_register(struct kv_ring *ring, uint8_t *buf, uint64_t bytes, struct kv_error *err)
{
    assert(ring->inflight == 0);
    assert(bytes > 0);
    if (ring->pool != NULL) return KV_OK;

    uint32_t count = ring->piece_count;
    const uint64_t pieces = (bytes + PIECE_BYTES_MAX - 1) / PIECE_BYTES_MAX;
    if (pieces > PIECES_MAX - count)
        return KV_FAIL(err, KV_INVALID, "%" PRIu64 " B are too many to register with io_uring",
                       bytes);
    for (uint64_t at = 0; at < bytes; at += PIECE_BYTES_MAX)
        ring->pieces[count++] = (struct iovec){
            .iov_base = buf + at, .iov_len = (size_t)KV_MIN(bytes - at, PIECE_BYTES_MAX)};

    /* The kernel knows one table: what was registered before goes in again. */
    if (ring->piece_count > 0) (void)io_uring_unregister_buffers(&ring->uring);
    ring->piece_count = 0;
    const int rc = io_uring_register_buffers(&ring->uring, ring->pieces, count);
    if (rc < 0) {
        errno = -rc;
        return KV_FAIL_ERRNO(err, rc == -ENOMEM ? KV_NOMEM : KV_IO,
                             "register %" PRIu64 " B with io_uring (ulimit -l?)", bytes);
    }
    ring->piece_count = count;
    return KV_OK;
}
