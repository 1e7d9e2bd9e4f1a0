#pragma once

/* A tier on real files with small segments, on a disk that can be made to fail; and what an owner
 * does with it, waiting for each result.  For test_tier_ssd.c and test_ssd_ahead.c. */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/ring.h"
#include "kvstore/tier/tier_ssd.h"
#include "tests/harness.h"

#include <errno.h>
#include <unistd.h>

#define PAGE_BYTES 8192u
#define PAGES_PER_SEGMENT 8u
#define SEGMENT_BYTES (4096u + PAGES_PER_SEGMENT * PAGE_BYTES)
#define SEGMENTS 4u

/* The ring, and what it is made to say. */
struct bad_disk {
    struct kv_disk disk;
    struct kv_disk *inner;
    bool fail_writes, fail_syncs, fail_reads, lie;
    uint32_t creates;
};

struct env {
    char dir[64];
    struct bad_disk bad;
    struct kv_disk *ring, *disk;
    struct kv_ssd *ssd;
    struct kv_ssd_options options;
    uint64_t now_ns; /* Moved by who wants it to. */
};

struct page_io {
    struct kv_ssd_op op;
    kv_status status;
    bool done;
};

struct flush_io {
    struct kv_ssd_flush flush;
    kv_status status;
    uint32_t done_count;
};

static inline void page_done(struct kv_ssd_op *op, kv_status status)
{
    struct page_io *io = (struct page_io *)op;
    io->status = status;
    io->done = true;
}

static inline void flush_done(struct kv_ssd_flush *flush, kv_status status)
{
    struct flush_io *io = (struct flush_io *)flush;
    io->status = status;
    io->done_count++;
}

static inline struct bad_disk *bad_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct bad_disk, disk);
}

static inline void bad_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    struct bad_disk *bad = bad_of(disk);
    bad->creates += op->rest.verb == KV_DISK_CREATE;
    bad->inner->ops->start(bad->inner, op);
}

static inline int64_t bad_passed(struct kv_disk *disk, struct kv_disk_op *op, int64_t result)
{
    const struct bad_disk *bad = bad_of(disk);
    result = kv_disk_passed(bad->inner, op, result);
    if (bad->fail_syncs && op->rest.verb == KV_DISK_SYNC) return -EIO;
    if (bad->fail_reads && op->rest.verb == KV_DISK_READ) return -EIO;
    if (bad->lie && op->rest.verb == KV_DISK_READ && result > 0) op->rest.buf[result / 2] ^= 1;
    if (bad->fail_writes && op->rest.verb == KV_DISK_WRITE) return -EIO;
    return result;
}

static inline uint32_t bad_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    const struct bad_disk *bad = bad_of(disk);
    return bad->inner->ops->run(bad->inner, wake_fd, timeout_ms);
}

static inline int64_t bad_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    const struct bad_disk *bad = bad_of(disk);
    return bad->inner->ops->call(bad->inner, call);
}

static const struct kv_disk_ops bad_ops = {
    .name = "bad", .start = bad_start, .run = bad_run, .passed = bad_passed, .call = bad_call};

static inline void env_init(struct env *env, enum kv_ring_choice choice)
{
    *env = (struct env){0};
    (void)snprintf(env->dir, sizeof(env->dir), "test_tier_ssd.XXXXXX");
    EXPECT(mkdtemp(env->dir) != NULL);
    EXPECT(kv_ring_create(16, choice, &env->ring, NULL) == KV_OK);
    env->bad = (struct bad_disk){.disk = {.ops = &bad_ops}, .inner = env->ring};
    env->disk = &env->bad.disk;
    env->options = (struct kv_ssd_options){.dir = env->dir,
                                           .bytes_max = SEGMENTS * SEGMENT_BYTES + 100,
                                           .segment_bytes = SEGMENT_BYTES,
                                           .page_bytes = PAGE_BYTES};
}

static inline kv_status env_open(struct env *env, struct kv_error *err)
{
    return kv_ssd_open(&env->options, env->disk, &env->ssd, err);
}

static inline void env_close(struct env *env)
{
    kv_ssd_close(env->ssd);
    env->ssd = NULL;
}

static inline void segment_path(const struct env *env, uint32_t number, char path[128])
{
    (void)snprintf(path, 128, "%s/segment-%06u.kv", env->dir, number);
}

static inline void env_fini(struct env *env)
{
    env_close(env);
    for (uint32_t i = 0; i < 16; i++) {
        char path[128];
        segment_path(env, i, path);
        (void)unlink(path);
    }
    EXPECT(rmdir(env->dir) == 0); /* And nothing else was left. */
    kv_disk_destroy(env->ring);
}

static inline void run_all(struct env *env)
{
    while (kv_disk_inflight(env->disk) > 0)
        (void)kv_disk_run(env->disk, -1, -1);
}

static inline kv_status page_io(struct env *env, uint32_t page, uint8_t *buf, bool write)
{
    struct page_io io = {.op = {.page = page, .buf = buf, .done = page_done}};
    if (write) {
        kv_ssd_write_start(env->ssd, &io.op);
    } else {
        kv_ssd_read_start(env->ssd, &io.op);
    }
    EXPECT(!io.done);
    EXPECT_EQ_U32(kv_ssd_usage(env->ssd).ops_inflight, 1);
    run_all(env);
    EXPECT(io.done);
    return io.status;
}

/* Beside whatever else is under way. */
static inline kv_status page_io_beside(struct env *env, uint32_t page, uint8_t *buf, bool write)
{
    struct page_io io = {.op = {.page = page, .buf = buf, .done = page_done}};
    if (write) {
        kv_ssd_write_start(env->ssd, &io.op);
    } else {
        kv_ssd_read_start(env->ssd, &io.op);
    }
    while (!io.done)
        (void)kv_disk_run(env->disk, -1, -1);
    return io.status;
}

static inline kv_status flush_now(struct env *env)
{
    struct flush_io io = {.flush = {.done = flush_done}};
    EXPECT(kv_ssd_flush_start(env->ssd, &io.flush) == KV_OK);
    EXPECT_EQ_U32(io.done_count, 0);
    run_all(env);
    EXPECT_EQ_U32(io.done_count, 1);
    return io.status;
}

struct place_wait {
    struct kv_ssd_wait wait;
    bool ready;
};

static inline void place_ready(struct kv_ssd_wait *wait)
{
    ((struct place_wait *)wait)->ready = true;
}

/* As a save does. */
static inline kv_status alloc_wait(struct env *env, uint32_t count, uint32_t *pages,
                                   struct kv_error *err)
{
    struct place_wait place = {.wait = {.ready = place_ready}};
    kv_status status = kv_ssd_alloc(env->ssd, count, pages, err);
    while (status == KV_MISS) {
        place.ready = false;
        kv_ssd_wait(env->ssd, &place.wait);
        EXPECT(!place.ready);
        while (!place.ready)
            (void)kv_disk_run(env->disk, -1, -1);
        const kv_status made = place.wait.status;
        if (made != KV_OK) *err = place.wait.err;
        const kv_status again = kv_ssd_alloc(env->ssd, count, pages, NULL);
        status = again == KV_MISS && made != KV_OK ? made : again;
    }
    return status;
}

/* Everything the tier wants to make ahead of its use. */
static inline void run_ahead(struct env *env)
{
    do {
        kv_ssd_tick(env->ssd, env->now_ns);
        run_all(env);
        kv_ssd_tick(env->ssd, env->now_ns);
    } while (kv_disk_inflight(env->disk) > 0);
}

static inline void fill(uint8_t *buf, uint32_t seed)
{
    for (uint32_t i = 0; i < PAGE_BYTES; i++)
        buf[i] = (uint8_t)((i * 2654435761u + seed * 40503u) >> 13);
}
