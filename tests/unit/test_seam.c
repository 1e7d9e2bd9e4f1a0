/*
 * The disks and manifests that other tests judge the store with (tests/seam/).
 *
 * Goal: a record tells when each call began and ended, and with which bytes; an image holds what
 * was flushed, always, and of the rest every kind of part, sometimes; a fault comes at its call,
 * once or from then on, and is counted. Method: calls made by hand, and many images of one record.
 */

#include "tests/harness.h"
#include "tests/seam/image.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"
#include "tests/seam/stack.h"

#include <errno.h>

#define BYTES 8192u
#define IMAGES 400u

static uint8_t buf[BYTES];
static bool finished;

static void op_done(struct kv_disk_op *op)
{
    (void)op;
    finished = true;
}

static int64_t call(struct stack *stack, enum kv_disk_verb verb, int fd, const char *name,
                    uint64_t bytes)
{
    return kv_disk_call(
        stack->disk,
        &(struct kv_disk_call){.verb = verb, .fd = fd, .name = name, .buf = buf, .bytes = bytes});
}

/* Not finished when it returns, unless told to wait. */
static struct kv_disk_op start(struct stack *stack, struct kv_disk_op *op, enum kv_disk_verb verb,
                               int fd, uint8_t fill, bool wait)
{
    const bool moves = verb != KV_DISK_SYNC;
    memset(buf, fill, sizeof(buf));
    *op = (struct kv_disk_op){
        .call = {.verb = verb, .fd = fd, .buf = moves ? buf : NULL, .bytes = moves ? BYTES : 0},
        .done = op_done};
    finished = false;
    kv_disk_start(stack->disk, op);
    EXPECT(!finished);
    while (wait && !finished)
        (void)kv_disk_run(stack->disk, -1, 0);
    return *op;
}

static int make_file(struct stack *stack)
{
    EXPECT_EQ_I64(call(stack, KV_DISK_MAKE_DIR, -1, STACK_DIR "/ssd", 0), 0);
    const int state = (int)call(stack, KV_DISK_OPEN_DIR, -1, STACK_DIR, 0);
    EXPECT_EQ_I64(call(stack, KV_DISK_SYNC_DIR, state, NULL, 0), 0);
    const int folder = (int)call(stack, KV_DISK_OPEN_DIR, -1, STACK_DIR "/ssd", 0);
    const int file = (int)call(stack, KV_DISK_CREATE, folder, "a", 0);
    EXPECT(file >= 0);
    EXPECT_EQ_I64(call(stack, KV_DISK_RESERVE, file, NULL, BYTES), 0);
    EXPECT_EQ_I64(call(stack, KV_DISK_SYNC, file, NULL, 0), 0);
    EXPECT_EQ_I64(call(stack, KV_DISK_SYNC_DIR, folder, NULL, 0), 0);
    return file;
}

struct seen {
    uint32_t absent, none, whole, torn_512, torn_4096;
};

/* Many images at the tick: how the file looks, which was 1s and was written with 2s. */
static struct seen look(const struct stack *stack, uint64_t tick)
{
    struct seen seen = {0};
    struct ex_random random = {7};
    for (uint32_t i = 0; i < IMAGES; i++) {
        struct image image;
        struct mem_disk_file file;
        image_build(stack->recorder, tick, IMAGE_HONEST, STACK_DIR, &random, &image);
        if (!mem_disk_file(image.disk, 0, &file)) {
            seen.absent++;
            kv_disk_destroy(image.disk);
            continue;
        }
        uint32_t twos = 0, edges = 0, small_edges = 0;
        EXPECT_EQ_U64(file.size, BYTES);
        for (uint32_t at = 0; at < BYTES; at++) {
            EXPECT(file.bytes[at] <= 2);
            twos += file.bytes[at] == 2;
            if (at == 0 || file.bytes[at] == file.bytes[at - 1]) continue;
            EXPECT_EQ_U32(at % 512, 0);
            edges++;
            small_edges += at % 4096 != 0;
        }
        seen.none += twos == 0;
        seen.whole += twos == BYTES;
        seen.torn_512 += small_edges > 0;
        seen.torn_4096 += edges > 0 && small_edges == 0;
        kv_disk_destroy(image.disk);
    }
    return seen;
}

static void test_images(void)
{
    struct stack stack;
    struct kv_disk_op op;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 1));
    const int file = make_file(&stack);
    (void)start(&stack, &op, KV_DISK_WRITE, file, 1, true);
    (void)start(&stack, &op, KV_DISK_SYNC, file, 0, true);
    const uint64_t before = stack.recorder->tick;
    EXPECT_EQ_U32(look(&stack, before).none, IMAGES); /* All ones. */

    (void)start(&stack, &op, KV_DISK_WRITE, file, 2, true);
    const uint64_t written = stack.recorder->tick;
    struct seen seen = look(&stack, written);
    EXPECT(seen.none > 50 && seen.whole > 50 && seen.torn_512 > 20 && seen.torn_4096 > 10);
    EXPECT_EQ_U32(seen.absent, 0);
    EXPECT_EQ_U32(look(&stack, before).none, IMAGES); /* The past has not changed. */

    struct kv_disk_op sync;
    (void)start(&stack, &sync, KV_DISK_SYNC, file, 0, false);
    EXPECT(look(&stack, stack.recorder->tick).none > 50); /* Begun is not done. */
    while (!finished)
        (void)kv_disk_run(stack.disk, -1, 0);
    EXPECT_EQ_U32(look(&stack, stack.recorder->tick).whole, IMAGES);
    EXPECT(look(&stack, 4).absent == IMAGES);
    stack_fini(&stack);
}

/* A flush that failed, and one that then succeeded: nobody knows what they kept. */
static void test_failed_flush(void)
{
    struct stack stack;
    struct kv_disk_op op;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 1));
    const int file = make_file(&stack);
    (void)start(&stack, &op, KV_DISK_WRITE, file, 1, true);
    (void)start(&stack, &op, KV_DISK_SYNC, file, 0, true);
    (void)start(&stack, &op, KV_DISK_WRITE, file, 2, true);
    stack.faulty.armed = true;
    stack.faulty.fault = FAULT_EIO;
    stack.faulty.from = stack.faulty.calls + 1;
    EXPECT(start(&stack, &op, KV_DISK_SYNC, file, 0, true).status == KV_IO);
    EXPECT(stack.faulty.fired_sync);
    EXPECT(start(&stack, &op, KV_DISK_SYNC, file, 0, true).status == KV_OK);
    const struct seen seen = look(&stack, stack.recorder->tick);
    EXPECT(seen.none > 50 && seen.whole > 50);
    stack_fini(&stack);
}

static void arm(struct stack *stack, enum fault fault, bool for_ever)
{
    stack->faulty.armed = true;
    stack->faulty.fault = fault;
    stack->faulty.from = stack->faulty.calls + 1;
    stack->faulty.for_ever = for_ever;
}

static void test_faults(void)
{
    static const int errnos[] = {EIO, ENOSPC, EINTR, EAGAIN, 0, 0, EPROTO};
    struct stack stack;
    struct kv_disk_op op;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 1));
    const int file = make_file(&stack);
    for (uint32_t i = 0; i < FAULT_ERRORS; i++) {
        const enum fault fault = (enum fault)i;
        const enum kv_disk_verb verb = fault == FAULT_SHORT_READ ? KV_DISK_READ : KV_DISK_WRITE;
        const bool passes = fault == FAULT_EINTR || fault == FAULT_EAGAIN ||
                            fault == FAULT_SHORT_WRITE || fault == FAULT_SHORT_READ;
        arm(&stack, fault, false);
        EXPECT((start(&stack, &op, verb, file, 1, true).status == KV_OK) == passes);
        EXPECT_EQ_U64(stack.faulty.fired[fault], 1);
        if (!passes) EXPECT_EQ_I64(op.sys_errno, errnos[fault]);
        EXPECT(start(&stack, &op, verb, file, 1, true).status == KV_OK); /* Once. */
        arm(&stack, fault, true);
        const bool halves = fault == FAULT_SHORT_WRITE || fault == FAULT_SHORT_READ;
        EXPECT((start(&stack, &op, verb, file, 1, true).status == KV_OK) == halves);
        EXPECT((start(&stack, &op, verb, file, 1, true).status == KV_OK) == halves);
        EXPECT(stack.faulty.fired[fault] >= 3);
        stack.faulty.armed = false;
    }
    stack_fini(&stack);
}

static void test_lies(void)
{
    struct stack stack;
    struct kv_disk_op op;
    struct mem_disk_file seen;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 1));
    const int file = make_file(&stack);
    (void)start(&stack, &op, KV_DISK_WRITE, file, 1, true);
    arm(&stack, FAULT_DROP, false);
    EXPECT(start(&stack, &op, KV_DISK_WRITE, file, 2, true).status == KV_OK);
    EXPECT(mem_disk_file(stack.memory, 0, &seen));
    EXPECT_EQ_U32(seen.bytes[0], 1);
    EXPECT(start(&stack, &op, KV_DISK_WRITE, file, 3, true).status == KV_OK);
    arm(&stack, FAULT_REPLAY, false);
    EXPECT(start(&stack, &op, KV_DISK_WRITE, file, 4, true).status == KV_OK);
    EXPECT(mem_disk_file(stack.memory, 0, &seen));
    EXPECT_EQ_U32(seen.bytes[0], 3);

    memset(buf, 5, sizeof(buf));
    struct kv_disk_call other = {
        .verb = KV_DISK_WRITE, .fd = file, .buf = buf, .bytes = BYTES, .offset = BYTES};
    arm(&stack, FAULT_SWAP, false);
    EXPECT_EQ_I64(kv_disk_call(stack.disk, &other), BYTES);
    EXPECT(mem_disk_file(stack.memory, 0, &seen));
    EXPECT_EQ_U32(seen.bytes[0], 5); /* In the place of the last one, and that in its. */
    EXPECT_EQ_U32(seen.bytes[BYTES], 4);
    stack_fini(&stack);
}

static void test_batches(void)
{
    struct stack stack;
    const struct kv_manifest_put one = {(const uint8_t *)"k", 1, (const uint8_t *)"1", 1};
    const struct kv_manifest_put none = {(const uint8_t *)"k", 1, NULL, 0};
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 1));
    EXPECT(kv_manifest_write_now(stack.manifest, &one, 1, NULL) == KV_OK);
    const uint64_t put = stack.recorder->tick;
    EXPECT(kv_manifest_write_now(stack.manifest, &none, 1, NULL) == KV_OK);
    struct ex_random random = {3};
    for (uint32_t i = 0; i < 2; i++) {
        struct image image;
        struct kv_manifest *manifest = mem_manifest_create();
        image_build(stack.recorder, i == 0 ? put : stack.recorder->tick, IMAGE_HONEST, STACK_DIR,
                    &random, &image);
        EXPECT_EQ_U32(image.batches, i + 1);
        EXPECT(image_manifest(stack.recorder, &image, manifest) == KV_OK);
        EXPECT_EQ_U64(kv_manifest_stats(manifest).records, 1 - i);
        kv_manifest_close(manifest);
        kv_disk_destroy(image.disk);
    }
    arm(&stack, FAULT_ENOSPC, false);
    EXPECT(kv_manifest_write_now(stack.manifest, &one, 1, NULL) == KV_IO);
    EXPECT(kv_manifest_write_now(stack.manifest, &one, 1, NULL) == KV_IO); /* From then on. */
    EXPECT(kv_manifest_stats(stack.manifest).failed);
    EXPECT_EQ_U64(kv_manifest_stats(stack.records).records, 0);
    stack.faulty.manifest_failed = false;
    arm(&stack, FAULT_EIO, false);
    EXPECT(kv_manifest_write_now(stack.manifest, &one, 1, NULL) == KV_IO);
    EXPECT_EQ_U64(kv_manifest_stats(stack.records).records, 1); /* It was written all the same. */
    stack_fini(&stack);
}

int main(void)
{
    test_images();
    test_failed_flush();
    test_faults();
    test_lies();
    test_batches();
    HARNESS_END();
}
