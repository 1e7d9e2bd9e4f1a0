/*
 * The daemon's disk: io_uring, or threads (disk_pool.c) where the kernel refuses it.
 *
 * Setup flags are asked for and dropped, because kernels of the same version differ in what seccomp
 * and sysctl leave of them.  The wake descriptor is watched by a one-shot poll inside the ring, so
 * the loop sleeps in one place.  A submit that fails for good breaks the ring: the ops it did not
 * take fail, and the kernel is not entered again, because waiting for completions of work that was
 * never accepted hangs for ever.
 */

#include "kvstore/base/ring.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/disk_pool.h"
#include "kvstore/base/disk_queue.h"

#include <assert.h>
#include <inttypes.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>

#define PIECE_BYTES_MAX (1ull << 30) /* The kernel's limit for one registered buffer. */
#define PIECES_MAX 256u
#define DEPTH_MAX 4096u

struct ring {
    struct kv_disk disk;
    uint32_t depth;
    uint32_t in_kernel;          /* At most depth. */
    struct kv_disk_queue queue;  /* Started, not yet handed over. */
    struct kv_disk_queue failed; /* Refused by a broken ring. */

    struct io_uring uring;
    bool uring_made;
    int broken_errno; /* 0: healthy. */
    int wake_fd;      /* Watched by the outstanding poll. */
    bool wake_armed;
    uint64_t wake_tag; /* user_data of that poll: odd, and so never an op's address. */
    struct iovec pieces[PIECES_MAX];
    uint32_t piece_count;
};

static struct ring *ring_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct ring, disk);
}

/* Index of the registered buffer that holds all of it; -1: none. */
static int piece_find(const struct ring *ring, const uint8_t *buf, uint64_t bytes)
{
    for (uint32_t i = 0; i < ring->piece_count; i++) {
        const uint8_t *base = ring->pieces[i].iov_base;
        if (buf >= base && buf + bytes <= base + ring->pieces[i].iov_len) return (int)i;
    }
    return -1;
}

static void uring_prepare(struct ring *ring, struct io_uring_sqe *sqe, struct kv_disk_op *op)
{
    const struct kv_disk_call *rest = &op->rest;
    const uint32_t bytes = (uint32_t)KV_MIN(rest->bytes, PIECE_BYTES_MAX);
    const int piece = rest->verb == KV_DISK_SYNC ? -1 : piece_find(ring, rest->buf, bytes);
    if (rest->verb == KV_DISK_SYNC) {
        io_uring_prep_fsync(sqe, rest->fd, IORING_FSYNC_DATASYNC);
    } else if (rest->verb == KV_DISK_READ && piece >= 0) {
        io_uring_prep_read_fixed(sqe, rest->fd, rest->buf, bytes, rest->offset, piece);
    } else if (rest->verb == KV_DISK_READ) {
        io_uring_prep_read(sqe, rest->fd, rest->buf, bytes, rest->offset);
    } else if (piece >= 0) {
        io_uring_prep_write_fixed(sqe, rest->fd, rest->buf, bytes, rest->offset, piece);
    } else {
        io_uring_prep_write(sqe, rest->fd, rest->buf, bytes, rest->offset);
    }
    io_uring_sqe_set_data(sqe, op);
}

/* Watches wake_fd, if it is not watched already.  False: no room, so do not sleep this time. */
static bool uring_arm(struct ring *ring, int wake_fd)
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
static void uring_break(struct ring *ring, int sys_errno)
{
    const struct io_uring_sq *sq = &ring->uring.sq;
    ring->broken_errno = sys_errno;
    for (unsigned i = *sq->khead; i != sq->sqe_tail; i++) {
        const uint64_t data = sq->sqes[i & sq->ring_mask].user_data;
        if (data & 1) continue;
        struct kv_disk_op *op = (struct kv_disk_op *)(uintptr_t)data;
        kv_disk_queue_push(&ring->failed, op);
        ring->in_kernel--;
    }
}

static void uring_submit(struct ring *ring)
{
    while (ring->queue.head != NULL && ring->in_kernel < ring->depth) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
        if (sqe == NULL) break; /* Full of entries a busy kernel has not taken yet. */
        uring_prepare(ring, sqe, kv_disk_queue_pop(&ring->queue));
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

static void uring_wait(struct ring *ring, int wake_fd, int timeout_ms)
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

static uint32_t uring_reap(struct ring *ring)
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
        struct kv_disk_op *op = (struct kv_disk_op *)(uintptr_t)data;
        ring->in_kernel--;
        count += kv_disk_result(op, result);
    }
    return count;
}

static void ring_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    kv_disk_queue_push(&ring_of(disk)->queue, op);
}

static uint32_t ring_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    struct ring *ring = ring_of(disk);
    if (ring->broken_errno == 0) {
        if (timeout_ms != 0 && !uring_arm(ring, wake_fd)) timeout_ms = 0;
        uring_submit(ring);
    }
    if (ring->broken_errno != 0) kv_disk_queue_append(&ring->failed, &ring->queue);
    uring_wait(ring, wake_fd, ring->failed.head != NULL ? 0 : timeout_ms);

    uint32_t count = uring_reap(ring);
    struct kv_disk_queue failed = ring->failed;
    ring->failed = (struct kv_disk_queue){0};
    for (struct kv_disk_op *op; (op = kv_disk_queue_pop(&failed)) != NULL;)
        count += kv_disk_result(op, -ring->broken_errno);
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

static kv_status uring_create(struct ring *ring, struct kv_error *err)
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

static void ring_destroy(struct kv_disk *disk)
{
    struct ring *ring = ring_of(disk);
    if (ring->uring_made) io_uring_queue_exit(&ring->uring);
    free(ring);
}

static int64_t ring_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    (void)disk;
    return kv_disk_kernel(call);
}

static kv_status ring_register(struct kv_disk *disk, uint8_t *buf, uint64_t bytes,
                               struct kv_error *err)
{
    struct ring *ring = ring_of(disk);
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

static const struct kv_disk_ops ring_ops = {
    .name = "io_uring",
    .destroy = ring_destroy,
    .start = ring_start,
    .run = ring_run,
    .call = ring_call,
    .register_buffer = ring_register,
};

kv_status kv_ring_create(uint32_t depth, enum kv_ring_choice choice, struct kv_disk **ret_disk,
                         struct kv_error *err)
{
    assert(depth > 0);
    assert(depth <= DEPTH_MAX);
    if (choice == KV_RING_POOL) return kv_disk_pool_create(ret_disk, err);

    struct ring *ring = calloc(1, sizeof(*ring));
    if (ring == NULL) return KV_FAIL(err, KV_NOMEM, "create a ring");
    ring->disk.ops = &ring_ops;
    ring->depth = depth;
    ring->wake_fd = -1;
    ring->wake_tag = 1;
    const kv_status status = uring_create(ring, err);
    if (status != KV_OK) {
        ring_destroy(&ring->disk);
        return choice == KV_RING_URING ? status : kv_disk_pool_create(ret_disk, err);
    }
    *ret_disk = &ring->disk;
    return KV_OK;
}
