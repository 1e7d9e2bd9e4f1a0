#pragma once

/*
 * Asynchronous file I/O as an event loop on io_uring.  Owned by: the thread that runs it (a
 * shard); it may be created by another.  Where io_uring is refused (seccomp, sysctl) a small pool
 * of pread/pwrite threads serves the same calls; kv_ring_backend() names which one runs.
 *
 * An op is embedded in its owner and stays untouched by it from start until done() runs.  done()
 * runs inside kv_ring_run(), never inside kv_ring_start().  A short completion is continued for the
 * rest; one that makes no progress is KV_IO.  At most `depth` ops are with the kernel; more are
 * queued in order inside the ring (owners bound their number).
 */

#include "kvstore/base/status.h"

#include <stdint.h>
#include <sys/types.h>

enum kv_ring_verb { KV_RING_READ, KV_RING_WRITE, KV_RING_SYNC };

struct kv_ring_op;
typedef void kv_ring_done_fn(struct kv_ring_op *op);

struct kv_ring_op {
    enum kv_ring_verb verb;
    int fd;
    uint8_t *buf; /* READ, WRITE: aligned to KV_IO_ALIGN for O_DIRECT files. */
    uint32_t bytes;
    uint64_t offset;
    kv_ring_done_fn *done;
    kv_status status; /* Result: KV_OK or KV_IO. */
    int sys_errno;    /* Of a KV_IO; 0 for a short file. */
    /* Owned by the ring. */
    uint32_t bytes_done;
    struct kv_ring_op *next;
};

struct kv_ring;

enum kv_ring_choice { KV_RING_AUTO, KV_RING_URING, KV_RING_POOL };

kv_status kv_ring_create(uint32_t depth, enum kv_ring_choice choice, struct kv_ring **ret_ring,
                         struct kv_error *err) KV_MUST_CHECK;
void kv_ring_destroy(struct kv_ring *ring); /* Nothing may be in flight. */
const char *kv_ring_backend(const struct kv_ring *ring); /* "io_uring" or "pool" */

void kv_ring_start(struct kv_ring *ring, struct kv_ring_op *op);

/* Submits what was started, then waits until a completion is there, wake_fd is readable or
 * timeout_ms passed (-1: no limit, 0: do not wait), and runs the completions.  Returns how many. */
uint32_t kv_ring_run(struct kv_ring *ring, int wake_fd, int timeout_ms);
uint32_t kv_ring_inflight(const struct kv_ring *ring);

/* Optional: registers a buffer (io_uring fixed buffer); reads and writes inside it then use it.
 * Not used by the daemon yet. */
kv_status kv_ring_register(struct kv_ring *ring, uint8_t *buf, uint64_t bytes,
                           struct kv_error *err) KV_MUST_CHECK;
