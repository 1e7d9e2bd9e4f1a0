/*
 * Room to start in.
 *
 * RocksDB and gRPC start threads of their own, and end the process when they cannot.  So the
 * threads are had once, all at the same time, and given back: whichever limit there is
 * (RLIMIT_NPROC, a cgroup's pids.max, memory for stacks), it shows here, where it can be told in a
 * sentence.  Address space is compared instead: what is configured is known.  So is the room for
 * the first segment, so that a start that cannot be leaves nothing half made behind.
 */

#include "cached/headroom.h"

#include "kvstore/base/thread.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static kv_status check_address_space(uint64_t bytes, struct kv_error *err)
{
    struct rlimit limit;
    const uint64_t want = bytes + HEADROOM_BYTES;
    if (getrlimit(RLIMIT_AS, &limit) != 0) return KV_FAIL_ERRNO(err, KV_IO, "look at RLIMIT_AS");
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= want) return KV_OK;
    return KV_FAIL(err, KV_INVALID,
                   "RLIMIT_AS allows %" PRIu64 " bytes of address space: want at least %" PRIu64
                   ", %" PRIu64 " for the memory that is configured and %" PRIu64
                   " beside it (ulimit -v, LimitAS= of the unit)",
                   (uint64_t)limit.rlim_cur, want, bytes, (uint64_t)HEADROOM_BYTES);
}

/* Until all are there. */
static void wait_for_all(void *context)
{
    const int *all_fd = context;
    struct pollfd poll_fd = {.fd = *all_fd, .events = POLLIN};
    while (poll(&poll_fd, 1, -1) < 0)
        continue;
}

static kv_status check_threads(uint32_t count, struct kv_error *err)
{
    struct kv_error why = {0};
    uint32_t started = 0;
    int all_fd = eventfd(0, EFD_CLOEXEC);
    if (all_fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "try %" PRIu32 " threads", count);
    struct kv_thread *threads = calloc(count, sizeof(*threads));

    while (threads != NULL && started < count &&
           kv_thread_start(&threads[started], KV_THREAD_ANY, "kv-headroom", wait_for_all, &all_fd,
                           &why) == KV_OK)
        started++;
    const int rc = eventfd_write(all_fd, 1);
    assert(rc == 0);
    for (uint32_t i = 0; i < started; i++)
        kv_thread_join(&threads[i]);
    (void)close(all_fd);
    if (threads == NULL) return KV_FAIL(err, KV_NOMEM, "try %" PRIu32 " threads", count);
    free(threads);
    if (started == count) return KV_OK;
    return KV_FAIL(err, KV_INVALID,
                   "%" PRIu32 " threads can be started: want at least %" PRIu32
                   " (%s); raise TasksMax= or LimitNPROC= of the unit, ulimit -u, or pids.max of "
                   "the container",
                   started, count, why.text);
}

kv_status headroom_check(uint32_t threads, uint64_t bytes, struct kv_error *err)
{
    assert(threads > 0);
    const kv_status status = check_address_space(bytes, err);
    if (status != KV_OK) return status;
    return check_threads(threads, err);
}

kv_status headroom_segment(const char *state_dir, uint64_t segment_bytes, struct kv_error *err)
{
    char ssd[512];
    struct stat info;
    struct statvfs system;
    (void)snprintf(ssd, sizeof(ssd), "%s/ssd", state_dir);
    if (stat(ssd, &info) == 0 || statvfs(state_dir, &system) != 0) return KV_OK;
    if (system.f_blocks == 0) return KV_OK; /* It does not count, as ramfs. */
    const uint64_t room = (uint64_t)system.f_bavail * system.f_frsize;
    if (room >= segment_bytes) return KV_OK;
    return KV_FAIL(err, KV_INVALID,
                   "ssd.segment_bytes is %" PRIu64 ", but %" PRIu64
                   " bytes are free on the file system of '%s'",
                   segment_bytes, room, state_dir);
}
