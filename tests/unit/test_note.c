/*
 * Acknowledged records that are gone from the manifest.
 *
 * Goal: a start on a manifest that lacks its last batches says how many, once, and serves the rest;
 * a start on a whole one, on one without the file, or with a file that cannot be believed says
 * nothing of a loss; a note that cannot be written holds nobody up.
 * Method: runs of the real store on a disk in memory (tests/seam/), then stores on what they left,
 * with fewer batches in the manifest than there were.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/acknowledged.h"
#include "kvstore/format/manifest_record.h"
#include "tests/harness.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"
#include "tests/seam/stack.h"
#include "tests/seam/work.h"

#define ROUNDS 12u

static struct stack stack;
static struct work work;
static uint64_t first_generation; /* Of the last start is above this. */

static void run(uint64_t seed)
{
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, seed));
    work_run(&work, &(struct work_options){.disk = stack.disk,
                                           .manifest = stack.manifest,
                                           .recorder = stack.recorder,
                                           .faulty = &stack.faulty,
                                           .dir = STACK_DIR,
                                           .seed = seed,
                                           .rounds = ROUNDS});
    EXPECT(!work.stuck && work.saves > 0);
}

static uint32_t batches(void)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < stack.recorder->event_count; i++)
        count += stack.recorder->events[i].kind == RECORD_BATCH;
    return count;
}

/* The first `count` batches of the run. */
static struct kv_manifest *manifest_of(uint32_t count)
{
    struct kv_manifest *manifest = mem_manifest_create();
    for (uint32_t i = 0; count > 0; i++) {
        const struct record_event *event = &stack.recorder->events[i];
        if (event->kind != RECORD_BATCH) continue;
        EXPECT(kv_manifest_write_now(manifest, event->puts, event->put_count, NULL) == KV_OK);
        count--;
    }
    return manifest;
}

/* What a start on the disk says of lost batches. */
static uint64_t lost(struct kv_manifest *manifest)
{
    struct world world;
    struct kv_error err = {0};
    if (world_open(&world, stack.disk, manifest, STACK_DIR, &err) != KV_OK)
        (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(world.store != NULL);
    const uint64_t said = world.store->recovery.lost_batches;
    first_generation = world.store->generation;
    EXPECT(world_settle(&world));
    world_close(&world);
    return said;
}

static struct mem_disk_file file(void)
{
    struct mem_disk_file found = {.name = ""};
    for (uint32_t i = 0; mem_disk_file(stack.memory, i, &found); i++)
        if (strcmp(found.name, KV_ACKNOWLEDGED_NAME) == 0) return found;
    EXPECT(strcmp(found.name, KV_ACKNOWLEDGED_NAME) == 0);
    return found;
}

static uint64_t noted(void)
{
    struct kv_acknowledged found;
    uint32_t slot, damaged;
    EXPECT_EQ_U64(file().size, KV_ACKNOWLEDGED_BYTES);
    EXPECT(kv_acknowledged_decode(file().bytes, &found, &slot, &damaged) == KV_OK);
    EXPECT_EQ_U32(damaged, 0);
    EXPECT_EQ_MEM(found.directory.bytes, content_directory().bytes, 16);
    return found.number;
}

/* Each batch is numbered, from 1, and the last one is noted. */
static void test_numbers(void)
{
    uint64_t number = 0;
    run(1);
    for (uint32_t i = 0; i < stack.recorder->event_count; i++) {
        const struct record_event *event = &stack.recorder->events[i];
        struct kv_record_commit record;
        if (event->kind != RECORD_BATCH) continue;
        EXPECT(event->put_count > 0 && event->puts[0].key_bytes == 1 &&
               event->puts[0].key[0] == 'C');
        EXPECT(kv_record_commit_decode(event->puts[0].value, event->puts[0].value_bytes, &record) ==
               KV_OK);
        EXPECT_EQ_U64(record.number, ++number);
    }
    EXPECT_EQ_U64(number, batches());
    EXPECT_EQ_U64(noted(), number);
    EXPECT_EQ_U64(lost(stack.manifest), 0);
    EXPECT_EQ_U64(noted(), number + 1); /* The start itself. */
    EXPECT_EQ_U64(lost(stack.manifest), 0);
    stack_fini(&stack);
}

static kv_status take_boots(void *context, const struct kv_manifest_put *put)
{
    struct kv_record_store record;
    EXPECT(kv_record_store_decode(put->value, put->value_bytes, &record) == KV_OK);
    *(uint64_t *)context = record.boots;
    return KV_OK;
}

/* Starts that the whole manifest knows of. */
static uint64_t boots(void)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    uint64_t count = 0;
    const uint32_t key_bytes = kv_key_store(key);
    EXPECT(kv_manifest_scan_now(stack.records, key, key_bytes, take_boots, &count, NULL) == KV_OK);
    EXPECT(count > 0);
    return count;
}

/* However many are missing, and all of them; told by the first start only, and numbers go on.  So
 * do generations: those of starts that are forgotten stand in pages. */
static void test_lost(void)
{
    for (uint32_t missing = 1; missing != 0; missing = missing < 6 ? missing + 1 : 0) {
        run(missing);
        const uint32_t all = batches();
        const uint32_t gone = missing == 6 ? all : missing;
        struct kv_manifest *manifest = manifest_of(all - gone);
        EXPECT_EQ_U64(lost(manifest), gone);
        EXPECT(first_generation >> 32 > boots());
        EXPECT(noted() > all);
        EXPECT_EQ_U64(lost(manifest), 0);
        kv_manifest_close(manifest);
        stack_fini(&stack);
    }
}

/* A directory of a build before this file. */
static void test_absent(void)
{
    run(3);
    struct kv_manifest *manifest = manifest_of(batches() - 2);
    const int dir = (int)kv_disk_call(
        stack.disk, &(struct kv_disk_call){.verb = KV_DISK_OPEN_DIR, .name = STACK_DIR});
    EXPECT(kv_disk_call(stack.disk, &(struct kv_disk_call){.verb = KV_DISK_UNLINK,
                                                           .fd = dir,
                                                           .name = KV_ACKNOWLEDGED_NAME}) == 0);
    kv_disk_close_file(stack.disk, dir);
    EXPECT_EQ_U64(lost(manifest), 0);
    EXPECT_EQ_U64(noted(), batches() - 1); /* Two less, and the start. */
    kv_manifest_close(manifest);
    stack_fini(&stack);
}

/* One slot is enough; none, or those of another directory, say nothing and are written anew. */
static void test_unbelievable(void)
{
    for (int what = 0; what < 4; what++) {
        run(4);
        const uint64_t all = batches();
        struct kv_manifest *manifest = manifest_of((uint32_t)all - 3);
        uint8_t *bytes = file().bytes;
        if (what < 3) bytes[20] ^= what == 1 ? 0 : 1;
        if (what > 0 && what < 3) bytes[KV_ACKNOWLEDGED_SLOT_BYTES + 20] ^= 1;
        for (uint32_t i = 0; what == 3 && i < 2; i++)
            kv_acknowledged_encode(
                &(struct kv_acknowledged){.directory = {{1}}, .number = 1000 + i},
                bytes + (size_t)i * KV_ACKNOWLEDGED_SLOT_BYTES);
        const uint64_t said = lost(manifest);
        if (what < 2) EXPECT(said == 3 || said == 2); /* The other slot may be one older. */
        if (what >= 2) EXPECT_EQ_U64(said, 0);
        EXPECT_EQ_U64(lost(manifest), 0);
        EXPECT(noted() >= all - 2);
        kv_manifest_close(manifest);
        stack_fini(&stack);
    }
}

/* Reading and making it fail: the store opens, and says that it cannot say. */
static void test_errors(void)
{
    for (uint64_t call = 1; call < 40; call++) {
        stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, call));
        stack.faulty.armed = true;
        stack.faulty.fault = FAULT_EIO;
        stack.faulty.from = call;
        struct world world;
        const kv_status status = world_open(&world, stack.disk, stack.manifest, STACK_DIR, NULL);
        stack.faulty.armed = false;
        if (status == KV_OK) EXPECT_EQ_U64(world.store->recovery.lost_batches, 0);
        if (status == KV_OK) EXPECT(world_settle(&world));
        if (status == KV_OK) world_close(&world);
        stack.faulty.manifest_failed = false;
        EXPECT_EQ_U64(lost(stack.manifest), 0);
        stack_fini(&stack);
    }
}

int main(void)
{
    test_numbers();
    test_lost();
    test_absent();
    test_unbelievable();
    test_errors();
    HARNESS_END();
}
