/*
 * The daemon's disk: io_uring, or threads (disk_pool.c) where the kernel refuses it.
 *
 * Setup flags are asked for and dropped, because kernels of the same version differ in what seccomp
 * and sysctl leave of them.  The wake descriptor is watched by a one-shot poll inside the ring, so
 * the loop sleeps in one place.  A submit that fails for good breaks the ring: the ops it did not
 * take fail, and the kernel is not entered again, because waiting for completions of work that was
 * never accepted hangs for ever.
 *
 * Files opened through it are registered with the ring, and so is memory, piece by piece when it is
 * first used: registering pins a piece and touches all of it, and an arena of gigabytes would make
 * a start slow and a small daemon large.  Files are made by the kernel's own workers.
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
#include <sys/resource.h>

#define TRY_BYTES_MAX (1ull << 30)
#define PIECE_BYTES_MIN (2ull << 20)   /* A huge page. */
#define PIECE_BYTES_MAX (512ull << 20) /* The kernel takes buffers of at most twice that. */
#define OVERLAP_BYTES (256u << 10)     /* A page that begins in one piece ends in it. */
#define PIECES_MAX 4096u               /* Of all memory. */
#define REGIONS_MAX 4u
#define FILES_MAX 1024u
#define DEPTH_MAX 4096u
#define SUBMIT_EARLY 4u

/* Memory in pieces, told to the kernel one by one. */
struct region {
    uint8_t *base; /* NULL: not in use. */
    uint64_t bytes;
    uint64_t piece_bytes;
    uint32_t first, count; /* Of the ring's pieces. */
};

struct ring {
    struct kv_disk disk;
    uint32_t depth;
    uint32_t in_kernel;          /* At most depth. */
    struct kv_disk_queue queue;  /* Started, not yet handed over. */
    uint32_t queued;             /* Since somebody tried to. */
    struct kv_disk_queue failed; /* Refused by a broken ring. */

    struct io_uring uring;
    bool uring_made;
    int broken_errno; /* 0: healthy. */
    int wake_fd;      /* Watched by the outstanding poll. */
    bool wake_armed;
    uint64_t wake_tag; /* user_data of that poll: odd, and so never an op's address. */

    /* What the kernel has been told of: files by their descriptor, memory by piece. */
    uint32_t files_max; /* 0: it takes none. */
    bool files[FILES_MAX];
    bool takes_memory;
    struct region regions[REGIONS_MAX];
    bool pieces[PIECES_MAX];
    uint64_t bytes_in_use;
    int refused_errno;
};

static struct ring *ring_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct ring, disk);
}

/* ---- what is registered ---- */

static void files_create(struct ring *ring)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    const uint32_t count = (uint32_t)KV_MIN(limit.rlim_cur, (rlim_t)FILES_MAX);
    if (io_uring_register_files_sparse(&ring->uring, count) == 0) ring->files_max = count;
}

/* A file is opened (it is its own index) or about to be closed. */
static void file_set(struct ring *ring, int64_t fd, bool open)
{
    const int value = open ? (int)fd : -1;
    if (fd < 0 || fd >= ring->files_max || ring->files[fd] == open) return;
    const int rc = io_uring_register_files_update(&ring->uring, (unsigned)fd, &value, 1);
    if (rc == 1) {
        ring->files[fd] = open;
    } else if (!open) {
        ring->files_max = 0; /* The table would keep what the descriptor no longer means. */
    }
}

static void memory_create(struct ring *ring)
{
    ring->takes_memory = io_uring_register_buffers_sparse(&ring->uring, PIECES_MAX) == 0;
}

static struct iovec piece_place(const struct region *region, uint32_t i)
{
    const uint64_t at = i * region->piece_bytes;
    return (struct iovec){
        .iov_base = region->base + at,
        .iov_len = (size_t)KV_MIN(region->bytes - at, region->piece_bytes + OVERLAP_BYTES)};
}

/* Once refused, nobody asks again: the limit is of the process, and the way without is as right. */
static bool piece_set(struct ring *ring, const struct region *region, uint32_t i, bool in_use)
{
    const struct iovec none = {0};
    const struct iovec place = in_use ? piece_place(region, i) : none;
    const unsigned at = region->first + i;
    if (in_use && ring->refused_errno != 0) return false;
    const int rc = io_uring_register_buffers_update_tag(&ring->uring, at, &place, NULL, 1);
    if (rc < 1) {
        if (in_use) ring->refused_errno = rc < 0 ? -rc : EAGAIN;
        return false;
    }
    ring->pieces[at] = in_use;
    const uint64_t bytes = KV_MIN(region->bytes - i * region->piece_bytes, region->piece_bytes);
    ring->bytes_in_use += in_use ? bytes : 0 - bytes;
    return true;
}

/* Index of the registered buffer that holds all of it; -1: none. */
static int piece_find(struct ring *ring, const uint8_t *buf, uint64_t bytes)
{
    for (uint32_t i = 0; i < REGIONS_MAX; i++) {
        const struct region *region = &ring->regions[i];
        if (region->base == NULL || buf < region->base) continue;
        if (buf + bytes > region->base + region->bytes) continue;
        const uint32_t piece = (uint32_t)((uint64_t)(buf - region->base) / region->piece_bytes);
        const struct iovec place = piece_place(region, piece);
        if (buf + bytes > (uint8_t *)place.iov_base + place.iov_len) return -1;
        if (!ring->pieces[region->first + piece] && !piece_set(ring, region, piece, true))
            return -1;
        return (int)(region->first + piece);
    }
    return -1;
}

static void ring_register(struct kv_disk *disk, uint8_t *buf, uint64_t bytes)
{
    struct ring *ring = ring_of(disk);
    uint32_t slot = 0, first = 0;
    while (slot < REGIONS_MAX && ring->regions[slot].base != NULL)
        slot++;
    for (uint32_t i = 0; i < REGIONS_MAX; i++)
        if (ring->regions[i].base != NULL)
            first = KV_MAX(first, ring->regions[i].first + ring->regions[i].count);
    if (!ring->takes_memory || slot == REGIONS_MAX || first == PIECES_MAX) return;
    struct region region = {
        .base = buf, .bytes = bytes, .piece_bytes = PIECE_BYTES_MIN, .first = first};
    /* Half of what is left, so that there is some for those that follow. */
    const uint64_t most = KV_MAX((PIECES_MAX - first) / 2, 1u);
    while ((bytes - 1) / region.piece_bytes + 1 > most && region.piece_bytes < PIECE_BYTES_MAX)
        region.piece_bytes *= 2;
    if ((bytes - 1) / region.piece_bytes + 1 > most) return; /* A TiB and more. */
    region.count = (uint32_t)((bytes - 1) / region.piece_bytes + 1);
    ring->regions[slot] = region;
}

static void ring_forget(struct kv_disk *disk, const uint8_t *buf)
{
    struct ring *ring = ring_of(disk);
    for (uint32_t i = 0; i < REGIONS_MAX; i++) {
        struct region *region = &ring->regions[i];
        if (region->base != buf) continue;
        for (uint32_t j = 0; j < region->count; j++) {
            if (!ring->pieces[region->first + j]) continue;
            /* The kernel would go on to write into memory that is somebody else's. */
            if (!piece_set(ring, region, j, false)) ring->takes_memory = false;
        }
        *region = (struct region){0};
    }
}

static struct kv_disk_facts ring_facts(const struct kv_disk *disk)
{
    const struct ring *ring = KV_CONTAINER_OF(disk, struct ring, disk);
    struct kv_disk_facts facts = {.registers = ring->takes_memory,
                                  .files_max = ring->files_max,
                                  .bytes_in_use = ring->bytes_in_use,
                                  .refused_errno = ring->refused_errno};
    for (uint32_t i = 0; i < REGIONS_MAX; i++)
        facts.bytes += ring->regions[i].bytes;
    return facts;
}

/* ---- io_uring ---- */

static void prepare_transfer(struct ring *ring, struct io_uring_sqe *sqe,
                             const struct kv_disk_call *rest)
{
    const unsigned bytes = (unsigned)KV_MIN(rest->bytes, TRY_BYTES_MAX);
    const int piece = piece_find(ring, rest->buf, bytes);
    if (rest->verb == KV_DISK_READ && piece >= 0) {
        io_uring_prep_read_fixed(sqe, rest->fd, rest->buf, bytes, rest->offset, piece);
    } else if (rest->verb == KV_DISK_READ) {
        io_uring_prep_read(sqe, rest->fd, rest->buf, bytes, rest->offset);
    } else if (piece >= 0) {
        io_uring_prep_write_fixed(sqe, rest->fd, rest->buf, bytes, rest->offset, piece);
    } else {
        io_uring_prep_write(sqe, rest->fd, rest->buf, bytes, rest->offset);
    }
}

static void uring_prepare(struct ring *ring, struct io_uring_sqe *sqe, struct kv_disk_op *op)
{
    const struct kv_disk_call *rest = &op->rest;
    switch (rest->verb) {
    case KV_DISK_READ:
    case KV_DISK_WRITE:
        prepare_transfer(ring, sqe, rest);
        break;
    case KV_DISK_SYNC:
        io_uring_prep_fsync(sqe, rest->fd, IORING_FSYNC_DATASYNC);
        break;
    case KV_DISK_SYNC_DIR:
        io_uring_prep_fsync(sqe, rest->fd, 0);
        break;
    case KV_DISK_CREATE:
        io_uring_prep_openat(sqe, rest->fd, rest->name, kv_disk_flags(rest), 0600);
        break;
    case KV_DISK_UNLINK:
        io_uring_prep_unlinkat(sqe, rest->fd, rest->name, 0);
        break;
    default:
        assert(rest->verb == KV_DISK_RESERVE);
        io_uring_prep_fallocate(sqe, rest->fd, 0, 0, (off_t)rest->bytes);
        break;
    }
    if (rest->verb <= KV_DISK_SYNC && (uint32_t)rest->fd < ring->files_max && ring->files[rest->fd])
        sqe->flags |= IOSQE_FIXED_FILE; /* Its index is the descriptor. */
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
    ring->queued = 0;
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

/* What a result of making a file means here. */
static int64_t file_result(struct ring *ring, const struct kv_disk_op *op, int64_t result)
{
    if (op->rest.verb == KV_DISK_CREATE) file_set(ring, result, true);
    /* A file system that reserves nothing: the C library writes instead.  It takes its time, on
     * this thread, on such a file system only. */
    if (op->rest.verb == KV_DISK_RESERVE && result == -EOPNOTSUPP) return kv_disk_kernel(&op->rest);
    return result;
}

static uint32_t uring_reap(struct ring *ring)
{
    /* What the done functions start is handed over a few at a time, because they may compute for
     * long and the device should not run dry meanwhile; those are for the next run to reap. */
    uint32_t count = 0;
    struct io_uring_cqe *cqe;
    for (uint32_t i = 0; i < ring->depth && io_uring_peek_cqe(&ring->uring, &cqe) == 0; i++) {
        const uint64_t data = cqe->user_data;
        const int result = cqe->res;
        io_uring_cqe_seen(&ring->uring, cqe);
        if (data & 1) {
            if (data == ring->wake_tag) ring->wake_armed = false;
            continue;
        }
        struct kv_disk_op *op = (struct kv_disk_op *)(uintptr_t)data;
        ring->in_kernel--;
        count += kv_disk_result(op, file_result(ring, op, result));
        if (ring->queued >= SUBMIT_EARLY && ring->broken_errno == 0) uring_submit(ring);
    }
    return count;
}

static void ring_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    struct ring *ring = ring_of(disk);
    kv_disk_queue_push(&ring->queue, op);
    ring->queued++;
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
    if (ring->broken_errno != 0) kv_disk_queue_append(&ring->failed, &ring->queue);
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
                     io_uring_opcode_supported(probe, IORING_OP_READ_FIXED) &&
                     io_uring_opcode_supported(probe, IORING_OP_WRITE_FIXED) &&
                     io_uring_opcode_supported(probe, IORING_OP_FSYNC) &&
                     io_uring_opcode_supported(probe, IORING_OP_OPENAT) &&
                     io_uring_opcode_supported(probe, IORING_OP_FALLOCATE) &&
                     io_uring_opcode_supported(probe, IORING_OP_UNLINKAT) &&
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
        return KV_FAIL(err, KV_IO,
                       "this kernel's io_uring cannot read, write, sync and make files");
    files_create(ring);
    memory_create(ring);
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
    struct ring *ring = ring_of(disk);
    if (call->verb == KV_DISK_CLOSE) file_set(ring, call->fd, false);
    const int64_t result = kv_disk_kernel(call);
    if (call->verb == KV_DISK_OPEN || call->verb == KV_DISK_CREATE) file_set(ring, result, true);
    return result;
}

static const struct kv_disk_ops ring_ops = {
    .name = "io_uring",
    .destroy = ring_destroy,
    .start = ring_start,
    .run = ring_run,
    .call = ring_call,
    .register_buffer = ring_register,
    .forget_buffer = ring_forget,
    .facts = ring_facts,
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
