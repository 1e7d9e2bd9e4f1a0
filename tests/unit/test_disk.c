/*
 * What is made of a disk's results.
 *
 * Goal: short transfers are continued from where they stopped, interrupted ones repeated a bounded
 * number of times, what claims too much or makes no progress refused, a flush never tried twice;
 * the same for calls that wait.  Wrappers see every try, and their word counts.  The calls that the
 * kernel answers do what their verb says.
 * Method: a disk that returns results from a list and notes what it was asked; and a real folder.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/disk.h"
#include "kvstore/base/disk_queue.h"
#include "kvstore/base/limits.h"
#include "tests/harness.h"

#include <errno.h>
#include <unistd.h>

#define TRIES_MAX 32u

struct script {
    struct kv_disk disk;
    int64_t results[TRIES_MAX];
    struct kv_disk_call asked[TRIES_MAX];
    uint32_t tries;
    struct kv_disk_queue started;
};

struct wrapper {
    struct kv_disk disk;
    struct kv_disk *inner;
    uint32_t passed;
};

static uint32_t done_count;

static void op_done(struct kv_disk_op *op)
{
    (void)op;
    done_count++;
}

static int64_t next_result(struct script *script, const struct kv_disk_call *call)
{
    EXPECT(script->tries < TRIES_MAX);
    script->asked[script->tries] = *call;
    return script->results[script->tries++];
}

static void script_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    kv_disk_queue_push(&KV_CONTAINER_OF(disk, struct script, disk)->started, op);
}

static uint32_t script_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    struct script *script = KV_CONTAINER_OF(disk, struct script, disk);
    struct kv_disk_op *op = kv_disk_queue_pop(&script->started);
    (void)wake_fd;
    (void)timeout_ms;
    return op == NULL ? 0 : kv_disk_result(op, next_result(script, &op->rest));
}

static int64_t script_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    return next_result(KV_CONTAINER_OF(disk, struct script, disk), call);
}

static const struct kv_disk_ops script_ops = {
    .name = "script", .start = script_start, .run = script_run, .call = script_call};

static void wrapper_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    struct kv_disk *inner = KV_CONTAINER_OF(disk, struct wrapper, disk)->inner;
    inner->ops->start(inner, op);
}

static uint32_t wrapper_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    struct kv_disk *inner = KV_CONTAINER_OF(disk, struct wrapper, disk)->inner;
    return inner->ops->run(inner, wake_fd, timeout_ms);
}

/* Says of every transfer that it was 512 B. */
static int64_t wrapper_passed(struct kv_disk *disk, struct kv_disk_op *op, int64_t result)
{
    struct wrapper *wrapper = KV_CONTAINER_OF(disk, struct wrapper, disk);
    result = kv_disk_passed(wrapper->inner, op, result);
    wrapper->passed++;
    return result > 0 ? 512 : result;
}

static const struct kv_disk_ops wrapper_ops = {
    .name = "wrapper", .start = wrapper_start, .run = wrapper_run, .passed = wrapper_passed};

static uint8_t buf[8192];

static struct script script_of(const int64_t *results, uint32_t count)
{
    struct script script = {.disk = {.ops = &script_ops}};
    memcpy(script.results, results, count * sizeof(*results));
    return script;
}

static struct kv_disk_op run_op(struct kv_disk *disk, enum kv_disk_verb verb, uint64_t bytes)
{
    struct kv_disk_op op = {
        .call = {.verb = verb, .fd = 3, .buf = bytes == 0 ? NULL : buf, .bytes = bytes},
        .done = op_done};
    const uint32_t before = done_count;
    op.call.offset = 4096;
    if (verb == KV_DISK_SYNC) op.call.offset = 0;
    kv_disk_start(disk, &op);
    EXPECT_EQ_U32(done_count, before);
    while (kv_disk_inflight(disk) > 0)
        (void)kv_disk_run(disk, -1, 0);
    EXPECT_EQ_U32(done_count, before + 1);
    return op;
}

#define RUN_OP(verb, bytes, ...)                                                                   \
    script = script_of((const int64_t[]){__VA_ARGS__},                                             \
                       (uint32_t)KV_ARRAY_COUNT(((const int64_t[]){__VA_ARGS__})));                \
    op = run_op(&script.disk, verb, bytes)

static void test_ops(void)
{
    struct script script;
    struct kv_disk_op op;

    RUN_OP(KV_DISK_WRITE, 8192, 512, -EINTR, 4096, -EAGAIN, 3584);
    EXPECT(op.status == KV_OK);
    EXPECT_EQ_U32(script.tries, 5);
    EXPECT(script.asked[2].buf == buf + 512);
    EXPECT_EQ_U64(script.asked[2].offset, 4096 + 512);
    EXPECT_EQ_U64(script.asked[4].bytes, 3584);
    EXPECT_EQ_U64(op.call.bytes, 8192); /* The owner's part is untouched. */
    EXPECT(op.call.buf == buf);

    RUN_OP(KV_DISK_READ, 4096, 512, 0);
    EXPECT(op.status == KV_IO);
    EXPECT_EQ_I64(op.sys_errno, 0);
    RUN_OP(KV_DISK_READ, 4096, 500, -EINVAL); /* O_DIRECT's way to say so. */
    EXPECT(op.status == KV_IO);
    EXPECT_EQ_I64(op.sys_errno, 0);
    RUN_OP(KV_DISK_READ, 4096, -EINVAL);
    EXPECT_EQ_I64(op.sys_errno, EINVAL);
    RUN_OP(KV_DISK_WRITE, 4096, 4608);
    EXPECT(op.status == KV_IO);
    EXPECT_EQ_I64(op.sys_errno, EPROTO);
    RUN_OP(KV_DISK_WRITE, 4096, 512, 4096);
    EXPECT_EQ_I64(op.sys_errno, EPROTO);
    RUN_OP(KV_DISK_WRITE, 4096, -ENOSPC);
    EXPECT_EQ_I64(op.sys_errno, ENOSPC);
    EXPECT_EQ_U32(script.tries, 1);

    /* Eight times in a row, then it is an error; progress starts the count anew. */
    RUN_OP(KV_DISK_READ, 4096, -EINTR, -EINTR, -EINTR, -EINTR, -EINTR, -EINTR, -EINTR, -EINTR,
           -EINTR);
    EXPECT_EQ_I64(op.sys_errno, EINTR);
    EXPECT_EQ_U32(script.tries, 9);
    RUN_OP(KV_DISK_READ, 4096, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN,
           -EAGAIN, 512, -EAGAIN, 3584);
    EXPECT(op.status == KV_OK);
}

static void test_syncs(void)
{
    static const int64_t bad[] = {-EIO, -EINTR, -EAGAIN, 1};
    struct script script;
    struct kv_disk_op op;
    RUN_OP(KV_DISK_SYNC, 0, 0);
    EXPECT(op.status == KV_OK);
    for (size_t i = 0; i < KV_ARRAY_COUNT(bad); i++) {
        RUN_OP(KV_DISK_SYNC, 0, bad[i]);
        EXPECT(op.status == KV_IO);
        EXPECT(op.sys_errno != 0);
        EXPECT_EQ_U32(script.tries, 1);
    }
}

static int64_t call_with(struct script *script, enum kv_disk_verb verb, uint64_t bytes,
                         const int64_t *results, uint32_t count)
{
    const struct kv_disk_call call = {.verb = verb, .fd = 3, .buf = buf, .bytes = bytes};
    *script = script_of(results, count);
    errno = 0;
    return kv_disk_call(&script->disk, &call);
}

static void test_calls(void)
{
    struct script script;
    const int64_t parts[] = {512, -EINTR, 3584};
    EXPECT_EQ_I64(call_with(&script, KV_DISK_WRITE, 4096, parts, 3), 4096);
    EXPECT_EQ_U64(script.asked[1].offset, 512);
    EXPECT(script.asked[2].buf == buf + 512);
    const int64_t end[] = {512, 0};
    EXPECT_EQ_I64(call_with(&script, KV_DISK_READ, 4096, end, 2), 512);
    const int64_t stopped[] = {512, -EIO};
    EXPECT_EQ_I64(call_with(&script, KV_DISK_READ, 4096, stopped, 2), 512);
    const int64_t more[] = {4608};
    EXPECT_EQ_I64(call_with(&script, KV_DISK_READ, 4096, more, 1), -1);
    EXPECT_EQ_I64(errno, EPROTO);
    const int64_t again[] = {-EINTR, -EAGAIN, 7};
    EXPECT_EQ_I64(call_with(&script, KV_DISK_OPEN, 0, again, 3), 7);
    EXPECT_EQ_I64(call_with(&script, KV_DISK_SYNC, 0, again, 3), -1);
    EXPECT_EQ_I64(errno, EINTR);
    EXPECT_EQ_U32(script.tries, 1);
    EXPECT_EQ_I64(call_with(&script, KV_DISK_CLOSE, 0, again, 3), -1);
    EXPECT_EQ_U32(script.tries, 1); /* The descriptor is gone. */
}

static void test_wrappers(void)
{
    const int64_t whole[] = {1024, 512, 1024, 512};
    struct script script = script_of(whole, 4);
    struct wrapper below = {.disk = {.ops = &wrapper_ops}, .inner = &script.disk};
    struct wrapper above = {.disk = {.ops = &wrapper_ops}, .inner = &below.disk};
    const struct kv_disk_op op = run_op(&above.disk, KV_DISK_WRITE, 1024);
    EXPECT(op.status == KV_OK);
    EXPECT_EQ_U32(script.tries, 2); /* The first was said to be half. */
    EXPECT_EQ_U32(above.passed, 2);
    EXPECT_EQ_U32(below.passed, 2);
    EXPECT_EQ_U32(kv_disk_inflight(&below.disk), 0);
}

static int64_t kernel(enum kv_disk_verb verb, int fd, const char *name, uint64_t bytes)
{
    return kv_disk_kernel(
        &(struct kv_disk_call){.verb = verb, .fd = fd, .name = name, .buf = buf, .bytes = bytes});
}

static void test_kernel(void)
{
    char dir[] = "test_disk.XXXXXX", sub[64];
    EXPECT(mkdtemp(dir) != NULL);
    (void)snprintf(sub, sizeof(sub), "%s/sub", dir);
    EXPECT_EQ_I64(kernel(KV_DISK_MAKE_DIR, -1, sub, 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_MAKE_DIR, -1, sub, 0), -EEXIST);
    EXPECT_EQ_I64(kernel(KV_DISK_OPEN_DIR, -1, "test_disk.none", 0), -ENOENT);
    const int folder = (int)kernel(KV_DISK_OPEN_DIR, -1, sub, 0);
    EXPECT(folder >= 0);
    EXPECT_EQ_I64(kernel(KV_DISK_LIST, folder, NULL, sizeof(buf)), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_OPEN, folder, "a", 0), -ENOENT);
    const int64_t file = kernel(KV_DISK_CREATE, folder, "a", 0);
    if (file == -EINVAL) SKIP("no O_DIRECT in this folder");
    EXPECT(file >= 0);
    EXPECT_EQ_I64(kernel(KV_DISK_CREATE, folder, "a", 0), -EEXIST);
    EXPECT_EQ_I64(kernel(KV_DISK_RESERVE, (int)file, NULL, 65536), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_SIZE, (int)file, NULL, 0), 65536);
    EXPECT_EQ_I64(kernel(KV_DISK_LINKS, (int)file, NULL, 0), 1);
    EXPECT_EQ_I64(kernel(KV_DISK_SYNC, (int)file, NULL, 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_SYNC_DIR, folder, NULL, 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_CLOSE, (int)file, NULL, 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_SIZE, (int)file, NULL, 0), -EBADF);

    const int64_t other = kernel(KV_DISK_CREATE, folder, "bcd", 0);
    for (int i = 0; i < 2; i++) { /* A list begins at the beginning each time. */
        EXPECT_EQ_I64(kernel(KV_DISK_LIST, folder, NULL, sizeof(buf)), 6);
        EXPECT(memcmp(buf, "a\0bcd", 6) == 0 || memcmp(buf, "bcd\0a", 6) == 0);
    }
    EXPECT_EQ_I64(kernel(KV_DISK_LIST, folder, NULL, 5), -ERANGE);
    EXPECT_EQ_I64(kernel(KV_DISK_LIST, (int)other, NULL, sizeof(buf)), -ENOTDIR);
    EXPECT_EQ_I64(kernel(KV_DISK_UNLINK, folder, "a", 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_UNLINK, folder, "a", 0), -ENOENT);
    EXPECT_EQ_I64(kernel(KV_DISK_UNLINK, folder, "bcd", 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_CLOSE, (int)other, NULL, 0), 0);
    EXPECT_EQ_I64(kernel(KV_DISK_CLOSE, folder, NULL, 0), 0);
    EXPECT(rmdir(sub) == 0);
    EXPECT(rmdir(dir) == 0);
}

int main(void)
{
    test_ops();
    test_syncs();
    test_calls();
    test_wrappers();
    test_kernel();
    HARNESS_END();
}
