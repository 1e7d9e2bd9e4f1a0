/*
 * File I/O through both backends of the ring.
 *
 * Goal: io_uring and the thread pool are indistinguishable to the owner of an op: bytes, order of
 * life (done runs inside run), short files, errors, more ops than depth, waking and timeouts.
 * Method: each test runs once per backend on files in a temporary folder; the io_uring pass is left
 * out where the kernel refuses io_uring.  O_DIRECT covers symptom T86: every page size a multiple
 * of 4096 up to 96 KiB, from registered and from plain memory.
 */

#include "kvstore/base/clock.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/ring.h"
#include "kvstore/base/thread.h"
#include "tests/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE_BYTES_MAX 98304u
#define OPS 500u

struct env {
    enum kv_ring_choice choice;
    struct kv_disk *disk;
    char path[64];
    int fd;
    uint32_t done_count;
};

/* Embedded in its owner, as users of the ring do it. */
struct owner {
    struct kv_disk_op op;
    struct env *env;
    uint32_t done_count;
    uint32_t again;
};

static void owner_done(struct kv_disk_op *op)
{
    struct owner *owner = (struct owner *)op;
    owner->done_count++;
    owner->env->done_count++;
    if (owner->again > 0) {
        owner->again--;
        kv_disk_start(owner->env->disk, op);
    }
}

static void env_open(struct env *env, enum kv_ring_choice choice, uint32_t depth, int flags)
{
    *env = (struct env){.choice = choice};
    (void)snprintf(env->path, sizeof(env->path), "test_ring.XXXXXX");
    env->fd = mkstemp(env->path);
    EXPECT(env->fd >= 0);
    if (flags != 0) {
        (void)close(env->fd);
        env->fd = open(env->path, O_RDWR | flags | O_CLOEXEC);
    }
    if (env->fd < 0 && errno == EINVAL) {
        (void)unlink(env->path);
        SKIP("no O_DIRECT in this folder");
    }
    EXPECT(kv_ring_create(depth, choice, &env->disk, NULL) == KV_OK);
}

static void env_close(struct env *env)
{
    kv_disk_destroy(env->disk);
    (void)close(env->fd);
    EXPECT(unlink(env->path) == 0);
}

static void wait_all(struct env *env)
{
    while (kv_disk_inflight(env->disk) > 0)
        (void)kv_disk_run(env->disk, -1, -1);
}

static kv_status run_one(struct env *env, struct owner *owner, enum kv_disk_verb verb, uint8_t *buf,
                         uint32_t bytes, uint64_t offset)
{
    *owner = (struct owner){.env = env};
    owner->op = (struct kv_disk_op){
        .call = {.verb = verb, .fd = env->fd, .buf = buf, .bytes = bytes, .offset = offset},
        .done = owner_done};
    kv_disk_start(env->disk, &owner->op);
    EXPECT_EQ_U32(owner->done_count, 0);
    wait_all(env);
    EXPECT_EQ_U32(owner->done_count, 1);
    return owner->op.status;
}

static void fill(uint8_t *buf, uint32_t bytes, uint32_t seed)
{
    for (uint32_t i = 0; i < bytes; i++)
        buf[i] = (uint8_t)((i * 2654435761u + seed * 40503u) >> 13);
}

static void test_direct_page_sizes(enum kv_ring_choice choice, bool registered)
{
    struct env env;
    struct owner owner;
    env_open(&env, choice, 8, O_DIRECT);
    uint8_t *memory = aligned_alloc(KV_IO_ALIGN, (size_t)2 * PAGE_BYTES_MAX);
    uint8_t *back = memory + PAGE_BYTES_MAX;
    if (registered) {
        kv_disk_register(env.disk, memory, PAGE_BYTES_MAX);
        kv_disk_register(env.disk, back, PAGE_BYTES_MAX);
    }
    for (uint32_t bytes = 4096; bytes <= PAGE_BYTES_MAX; bytes += 4096) {
        fill(memory, bytes, bytes);
        memset(back, 0, bytes);
        EXPECT(run_one(&env, &owner, KV_DISK_WRITE, memory, bytes, 4096) == KV_OK);
        EXPECT(run_one(&env, &owner, KV_DISK_READ, back, bytes, 4096) == KV_OK);
        EXPECT_EQ_MEM(back, memory, bytes);
    }
    EXPECT(run_one(&env, &owner, KV_DISK_SYNC, NULL, 0, 0) == KV_OK);
    /* Not aligned: the kernel's EINVAL comes back, and not a short file. */
    EXPECT(run_one(&env, &owner, KV_DISK_READ, back + 1, 4096, 4096) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, EINVAL);
    /* A file that ends inside a block. */
    EXPECT(ftruncate(env.fd, 4096 + 1000) == 0);
    EXPECT(run_one(&env, &owner, KV_DISK_READ, back, 8192, 4096) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, 0);
    env_close(&env);
    free(memory);
}

static void test_odd_sizes(enum kv_ring_choice choice)
{
    static uint8_t out[8193];
    static uint8_t back[8193];
    struct env env;
    struct owner owner;
    env_open(&env, choice, 8, 0);
    for (uint32_t bytes = 1; bytes <= sizeof(out); bytes += 127) {
        fill(out, bytes, bytes);
        memset(back, 0, sizeof(back));
        EXPECT(run_one(&env, &owner, KV_DISK_WRITE, out, bytes, bytes) == KV_OK);
        EXPECT(run_one(&env, &owner, KV_DISK_READ, back, bytes, bytes) == KV_OK);
        EXPECT_EQ_MEM(back, out, bytes);
    }
    env_close(&env);
}

static void test_errors(enum kv_ring_choice choice)
{
    static uint8_t buf[4096];
    struct env env;
    struct owner owner;
    env_open(&env, choice, 8, 0);
    EXPECT(run_one(&env, &owner, KV_DISK_WRITE, buf, 1000, 0) == KV_OK);
    EXPECT(run_one(&env, &owner, KV_DISK_READ, buf, 2000, 0) ==
           KV_IO); /* Continued, then the end. */
    EXPECT_EQ_I64(owner.op.sys_errno, 0);
    EXPECT_EQ_U64(owner.op.rest.bytes, 1000);
    EXPECT(run_one(&env, &owner, KV_DISK_READ, buf, 1, 5000) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, 0);

    (void)close(env.fd);
    env.fd = open(env.path, O_RDONLY | O_CLOEXEC);
    EXPECT(run_one(&env, &owner, KV_DISK_WRITE, buf, 100, 0) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, EBADF);

    const int good = env.fd;
    env.fd = 9999;
    EXPECT(run_one(&env, &owner, KV_DISK_SYNC, NULL, 0, 0) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, EBADF);
    env.fd = good;
    /* The ring goes on after all that. */
    EXPECT(run_one(&env, &owner, KV_DISK_READ, buf, 1000, 0) == KV_OK);
    env_close(&env);
}

static void test_more_than_depth(enum kv_ring_choice choice)
{
    static struct owner owners[OPS];
    static uint8_t buf[OPS][64];
    struct env env;
    env_open(&env, choice, 4, 0);
    for (uint32_t i = 0; i < OPS; i++) {
        fill(buf[i], 64, i);
        owners[i] = (struct owner){.env = &env, .again = 1};
        owners[i].op = (struct kv_disk_op){.call = {.verb = KV_DISK_WRITE,
                                                    .fd = env.fd,
                                                    .buf = buf[i],
                                                    .bytes = 64,
                                                    .offset = (uint64_t)i * 64},
                                           .done = owner_done};
        kv_disk_start(env.disk, &owners[i].op);
    }
    EXPECT_EQ_U32(kv_disk_inflight(env.disk), OPS);
    uint32_t ran = 0;
    while (kv_disk_inflight(env.disk) > 0)
        ran += kv_disk_run(env.disk, -1, -1);
    EXPECT_EQ_U32(ran, 2 * OPS); /* Each op was started a second time from its own done. */
    EXPECT_EQ_U32(env.done_count, 2 * OPS);
    for (uint32_t i = 0; i < OPS; i++) {
        uint8_t back[64];
        EXPECT_EQ_U32(owners[i].done_count, 2);
        EXPECT(owners[i].op.status == KV_OK);
        EXPECT_EQ_I64(pread(env.fd, back, 64, (off_t)i * 64), 64);
        EXPECT_EQ_MEM(back, buf[i], 64);
    }
    env_close(&env);
}

static void wake_later(void *arg)
{
    (void)usleep(20000);
    EXPECT(eventfd_write(*(int *)arg, 1) == 0);
}

static void test_wake_and_timeout(enum kv_ring_choice choice)
{
    struct env env;
    eventfd_t drained;
    env_open(&env, choice, 4, 0);
    EXPECT_EQ_U32(kv_disk_run(env.disk, -1, -1), 0); /* Nothing could wake it: no wait. */

    int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    uint64_t start_ns = kv_clock_stopwatch_ns();
    EXPECT_EQ_U32(kv_disk_run(env.disk, wake, 30), 0);
    EXPECT(kv_clock_stopwatch_ns() - start_ns >= 29000000u);
    EXPECT_EQ_U32(kv_disk_run(env.disk, wake, 0), 0);

    /* Level, not edge: readable before, still readable, readable again after a drain. */
    for (int i = 0; i < 3; i++) {
        EXPECT(eventfd_write(wake, 1) == 0);
        start_ns = kv_clock_stopwatch_ns();
        (void)kv_disk_run(env.disk, wake, 5000);
        (void)kv_disk_run(env.disk, wake, 5000);
        EXPECT(kv_clock_stopwatch_ns() - start_ns < 2000000000u);
        EXPECT(eventfd_read(wake, &drained) == 0);
        (void)kv_disk_run(env.disk, wake, 1); /* Takes a poll that had already fired. */
    }

    struct kv_thread thread = {0};
    EXPECT(kv_thread_start(&thread, KV_THREAD_ANY, "waker", wake_later, &wake, NULL) == KV_OK);
    (void)kv_disk_run(env.disk, wake, -1);
    kv_thread_join(&thread);
    EXPECT(eventfd_read(wake, &drained) == 0);

    /* Another descriptor takes over. */
    const int other = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC);
    start_ns = kv_clock_stopwatch_ns();
    (void)kv_disk_run(env.disk, other, 5000);
    EXPECT(kv_clock_stopwatch_ns() - start_ns < 2000000000u);
    env_close(&env);
    (void)close(other);
    (void)close(wake);
}

struct foreign {
    struct env *env;
    struct owner owners[6];
};

static void use_from_elsewhere(void *arg)
{
    struct foreign *foreign = arg;
    static uint8_t buf[64];
    for (size_t i = 0; i < 6; i++) {
        foreign->owners[i] = (struct owner){.env = foreign->env};
        foreign->owners[i].op = (struct kv_disk_op){
            .call = {.verb = KV_DISK_WRITE, .fd = foreign->env->fd, .buf = buf, .bytes = 64},
            .done = owner_done};
        kv_disk_start(foreign->env->disk, &foreign->owners[i].op);
    }
    while (kv_disk_inflight(foreign->env->disk) > 0)
        (void)kv_disk_run(foreign->env->disk, -1, 1000);
}

/* A submit the kernel refuses: with SINGLE_ISSUER any thread but the first gets EEXIST.  Where the
 * flag is not there the writes simply succeed.  In both cases everything is finished. */
static void test_broken_submit(void)
{
    struct env env;
    struct foreign foreign = {.env = &env};
    struct owner after;
    static uint8_t buf[64];
    env_open(&env, KV_RING_URING, 4, 0);
    struct kv_thread thread = {0};
    EXPECT(run_one(&env, &after, KV_DISK_WRITE, buf, 64, 0) == KV_OK);
    EXPECT(kv_thread_start(&thread, KV_THREAD_ANY, "foreign", use_from_elsewhere, &foreign, NULL) ==
           KV_OK);
    kv_thread_join(&thread);
    const bool broke = foreign.owners[0].op.status == KV_IO;
    for (size_t i = 0; i < 6; i++) {
        EXPECT_EQ_U32(foreign.owners[i].done_count, 1);
        EXPECT((foreign.owners[i].op.status == KV_IO) == broke);
        if (broke) EXPECT_EQ_I64(foreign.owners[i].op.sys_errno, EEXIST);
    }
    EXPECT((run_one(&env, &after, KV_DISK_WRITE, buf, 64, 0) == KV_IO) == broke);
    (void)printf("  a refused submit %s\n",
                 broke ? "fails what it held" : "cannot be provoked here");
    env_close(&env);
}

static kv_status run_call(struct env *env, struct owner *owner, const struct kv_disk_call *call)
{
    *owner = (struct owner){.env = env};
    owner->op = (struct kv_disk_op){.call = *call, .done = owner_done};
    kv_disk_start(env->disk, &owner->op);
    wait_all(env);
    EXPECT_EQ_U32(owner->done_count, 1);
    return owner->op.status;
}

/* A file made, written, read and removed without a call that waits; and one opened by such a call,
 * closed, and its descriptor used for another file, which must not be taken for the first. */
static void test_files(enum kv_ring_choice choice)
{
    struct env env;
    struct owner owner;
    static uint8_t out[8192], back[8192];
    env_open(&env, choice, 8, 0);
    const int dir = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    char name[80];
    (void)snprintf(name, sizeof(name), "%s.made", env.path);
    const struct kv_disk_call create = {
        .verb = KV_DISK_CREATE, .fd = dir, .name = name, .cached = true};
    EXPECT(run_call(&env, &owner, &create) == KV_OK);
    const int made = owner.op.fd;
    EXPECT(made >= 0);
    EXPECT(run_call(&env, &owner, &create) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, EEXIST);
    struct stat info;
    EXPECT(fstat(made, &info) == 0);
    EXPECT_EQ_U32(info.st_mode & 0777, 0600);

    EXPECT(run_call(&env, &owner,
                    &(struct kv_disk_call){
                        .verb = KV_DISK_RESERVE, .fd = made, .bytes = 16384}) == KV_OK);
    EXPECT(fstat(made, &info) == 0);
    EXPECT_EQ_U64((uint64_t)info.st_size, 16384);
    EXPECT(run_call(&env, &owner,
                    &(struct kv_disk_call){.verb = KV_DISK_SYNC_DIR, .fd = dir}) == KV_OK);
    const int plain = env.fd;
    env.fd = made;
    fill(out, sizeof(out), 3);
    EXPECT(run_one(&env, &owner, KV_DISK_WRITE, out, sizeof(out), 4096) == KV_OK);
    EXPECT(run_one(&env, &owner, KV_DISK_READ, back, sizeof(back), 4096) == KV_OK);
    EXPECT_EQ_MEM(back, out, sizeof(out));
    kv_disk_close_file(env.disk, made);

    EXPECT_EQ_I64(open(env.path, O_RDWR | O_CLOEXEC), made); /* The same number. */
    EXPECT(run_one(&env, &owner, KV_DISK_READ, back, sizeof(back), 4096) == KV_IO);
    EXPECT_EQ_I64(owner.op.sys_errno, 0); /* It is empty. */
    (void)close(made);
    env.fd = plain;
    EXPECT(run_call(&env, &owner,
                    &(struct kv_disk_call){.verb = KV_DISK_UNLINK, .fd = dir, .name = name}) ==
           KV_OK);
    EXPECT(access(name, F_OK) != 0);
    (void)close(dir);
    env_close(&env);
}

static uint8_t *map_memory(uint8_t *at, size_t bytes)
{
    uint8_t *memory = mmap(at, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | (at != NULL ? MAP_FIXED : 0), -1, 0);
    EXPECT(memory != MAP_FAILED);
    return memory;
}

/* Pieces are registered when they are used; a page across two of them is whole; memory that was
 * given back and mapped again is not taken for what was there. */
static void test_memory(enum kv_ring_choice choice)
{
    enum { MEMORY = 7 << 20, PAGE = 114688 };
    struct env env;
    struct owner owner;
    env_open(&env, choice, 8, O_DIRECT);
    uint8_t *out = aligned_alloc(KV_IO_ALIGN, PAGE);
    fill(out, PAGE, 5);
    EXPECT(run_one(&env, &owner, KV_DISK_WRITE, out, PAGE, 0) == KV_OK);
    uint8_t *memory = map_memory(NULL, MEMORY);
    for (int turn = 0; turn < 2; turn++) {
        kv_disk_register(env.disk, memory, MEMORY);
        EXPECT_EQ_U64(kv_disk_facts(env.disk).bytes_in_use, 0);
        for (size_t at = 0; at + PAGE <= MEMORY; at += PAGE) {
            EXPECT(run_one(&env, &owner, KV_DISK_READ, memory + at, PAGE, 0) == KV_OK);
            EXPECT_EQ_MEM(memory + at, out, PAGE);
        }
        if (choice == KV_RING_URING) {
            const struct kv_disk_facts facts = kv_disk_facts(env.disk);
            EXPECT(facts.registers);
            EXPECT(facts.files_max > 0);
            EXPECT_EQ_U64(facts.bytes, MEMORY);
            EXPECT_EQ_U64(facts.bytes_in_use, MEMORY);
            EXPECT_EQ_I64(facts.refused_errno, 0);
        }
        kv_disk_forget(env.disk, memory);
        EXPECT_EQ_U64(kv_disk_facts(env.disk).bytes, 0);
        EXPECT_EQ_U64(kv_disk_facts(env.disk).bytes_in_use, 0);
        EXPECT(munmap(memory, MEMORY) == 0);
        EXPECT(map_memory(memory, MEMORY) == memory);
    }
    EXPECT(munmap(memory, MEMORY) == 0);
    env_close(&env);
    free(out);
}

/* Without the right to lock memory: bytes are as right, and it is said. */
static void test_memory_refused(void)
{
    enum { MEMORY = 4 << 20 };
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        struct env env;
        struct owner owner;
        const struct rlimit little = {.rlim_cur = 65536, .rlim_max = 65536};
        env_open(&env, KV_RING_POOL, 8, O_DIRECT);
        EXPECT(unlink(env.path) == 0);
        kv_disk_destroy(env.disk);
        EXPECT(setrlimit(RLIMIT_MEMLOCK, &little) == 0);
        EXPECT(geteuid() != 0 || setresuid(65534, 65534, 65534) == 0);
        EXPECT(kv_ring_create(8, KV_RING_URING, &env.disk, NULL) == KV_OK);
        uint8_t *memory = map_memory(NULL, MEMORY);
        kv_disk_register(env.disk, memory, MEMORY);
        fill(memory, 8192, 9);
        EXPECT(run_one(&env, &owner, KV_DISK_WRITE, memory, 8192, 0) == KV_OK);
        EXPECT(run_one(&env, &owner, KV_DISK_READ, memory + 8192, 8192, 0) == KV_OK);
        EXPECT_EQ_MEM(memory + 8192, memory, 8192);
        EXPECT_EQ_I64(kv_disk_facts(env.disk).refused_errno, ENOMEM);
        EXPECT_EQ_U64(kv_disk_facts(env.disk).bytes_in_use, 0);
        EXPECT_EQ_U64(kv_disk_facts(env.disk).bytes, MEMORY);
        kv_disk_destroy(env.disk);
        exit(EXIT_SUCCESS);
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_backend(enum kv_ring_choice choice)
{
    test_files(choice);
    test_memory(choice);
    test_odd_sizes(choice);
    test_errors(choice);
    test_more_than_depth(choice);
    test_wake_and_timeout(choice);
    test_direct_page_sizes(choice, false);
    test_direct_page_sizes(choice, true);
}

int main(void)
{
    struct kv_disk *disk = NULL;
    struct kv_error err = {0};

    EXPECT(kv_ring_create(8, KV_RING_AUTO, &disk, &err) == KV_OK);
    (void)printf("  auto chooses %s\n", kv_disk_backend(disk));
    const bool has_uring = strcmp(kv_disk_backend(disk), "io_uring") == 0;
    kv_disk_destroy(disk);
    kv_disk_destroy(NULL);

    EXPECT(kv_ring_create(8, KV_RING_POOL, &disk, NULL) == KV_OK);
    EXPECT_EQ_STR(kv_disk_backend(disk), "pool");
    kv_disk_destroy(disk);

    if (has_uring) {
        test_broken_submit();
        test_backend(KV_RING_URING);
        test_memory_refused();
    } else {
        EXPECT(kv_ring_create(8, KV_RING_URING, &disk, &err) == KV_IO);
        (void)printf("  io_uring refused: %s\n", err.text);
    }
    test_backend(KV_RING_POOL);
    HARNESS_END();
}
