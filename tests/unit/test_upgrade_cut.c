/*
 * The power goes while a directory gets its segment records.
 *
 * Goal: a directory of a build without them is read in full, and whatever a cut in the middle of
 * that leaves is read again with every checkpoint, every place and no more.  Method: saves and
 * deletes of the real store on a disk in memory (tests/seam/); then the bit and the records are
 * taken away, as an older build would have left them; a start on that is recorded, and images of
 * every moment of it are opened and compared with what was promised.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/superblock.h"
#include "kvstore/store/directory.h"
#include "tests/harness.h"
#include "tests/seam/check.h"
#include "tests/seam/image.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"
#include "tests/seam/stack.h"

#include <string.h>

enum {
    IMAGES = 20, /* Of each moment. */
    ROUNDS = 40,
};

struct old {
    struct work work;
    struct kv_disk *disk;         /* Without the bit. */
    struct kv_manifest *manifest; /* Without segment records, or with stale ones. */
    bool stale;
};

/* ---- what an older build left ---- */

static kv_status copy_record(void *context, const struct kv_manifest_put *put)
{
    struct old *old = context;
    if (put->key[0] != 'G') return kv_manifest_write_now(old->manifest, put, 1, NULL);
    if (!old->stale) return KV_OK;
    /* Of a start that was cut off before it set the bit, and pages have moved since. */
    uint8_t value[256] = {0};
    const uint32_t pages = kv_load32(put->value + 10);
    const uint8_t bits[32] = {0};
    const struct kv_record_segment record = {
        .state = KV_SEGMENT_SEALED, .used_ms = 1, .pages = pages, .bits = bits};
    EXPECT(put->value_bytes <= sizeof(value) && pages <= 8 * sizeof(bits));
    const struct kv_manifest_put stale = {put->key, put->key_bytes, value,
                                          kv_record_segment_encode(&record, value)};
    return kv_manifest_write_now(old->manifest, &stale, 1, NULL);
}

static uint8_t *without_bit(const struct mem_disk_file *file)
{
    struct kv_superblock superblock;
    uint32_t version, damaged;
    uint8_t *bytes = malloc(file->size);
    EXPECT(bytes != NULL);
    memcpy(bytes, file->bytes, file->size);
    if (strcmp(file->name, "superblock") != 0) return bytes;
    EXPECT(kv_superblock_decode(bytes, &superblock, &version, &damaged) == KV_OK);
    EXPECT_EQ_U64(superblock.features,
                  KV_FEATURE_SEGMENTS | KV_FEATURE_HISTORY | KV_FEATURE_PLAN_TTL);
    superblock.features = 0;
    kv_superblock_encode(&superblock, bytes);
    return bytes;
}

static void make_old(struct old *old, uint64_t seed)
{
    struct stack stack;
    struct mem_disk_file file;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, seed));
    const struct work_options options = {.disk = stack.disk,
                                         .manifest = stack.manifest,
                                         .recorder = stack.recorder,
                                         .dir = STACK_DIR,
                                         .seed = seed,
                                         .rounds = ROUNDS};
    work_run(&old->work, &options);
    EXPECT(!old->work.stuck && !old->work.uneven && old->work.saves > 20);
    old->disk = mem_disk_create(STACK_DIR, seed + 1);
    old->manifest = mem_manifest_create();
    EXPECT(old->disk != NULL && old->manifest != NULL);
    for (uint32_t i = 0; mem_disk_file(stack.memory, i, &file); i++)
        mem_disk_add(old->disk, file.dir, file.name, without_bit(&file), file.size);
    EXPECT(kv_manifest_scan_now(stack.records, NULL, 0, copy_record, old, NULL) == KV_OK);
    stack_fini(&stack);
}

static kv_status copy_all(void *context, const struct kv_manifest_put *put)
{
    return kv_manifest_write_now(context, put, 1, NULL);
}

/* ---- images ---- */

struct seen {
    uint32_t without, with;
};

static void look(const struct old *old, const struct stack *stack, uint64_t tick,
                 struct ex_random *random, struct seen *seen)
{
    struct image image;
    struct kv_superblock superblock;
    struct check check = {.may_read_trees = true}, again = {.may_read_trees = false};
    uint32_t damaged;
    image_build(stack->recorder, tick, IMAGE_HONEST, STACK_DIR, random, &image);
    struct kv_manifest *manifest = mem_manifest_create();
    EXPECT(kv_manifest_scan_now(old->manifest, NULL, 0, copy_all, manifest, NULL) == KV_OK);
    EXPECT(image_manifest(stack->recorder, &image, manifest) == KV_OK);
    EXPECT(kv_directory_read(image.disk, STACK_DIR, &superblock, &damaged, NULL) == KV_OK);
    if ((superblock.features & KV_FEATURE_SEGMENTS) == 0)
        seen->without++;
    else
        seen->with++;
    /* Every promise was made before. */
    check_store(&check, &old->work, image.disk, manifest, WORK_NEVER, false);
    check_store(&again, &old->work, image.disk, manifest, WORK_NEVER, false);
    if (check_failures(&check) + check_failures(&again) > 0)
        (void)fprintf(stderr, "tick %llu: %s%s\n", (unsigned long long)tick, check.first,
                      again.first);
    EXPECT(check_failures(&check) == 0 && check_failures(&again) == 0);
    EXPECT(check.acknowledged > 0 && check.found == check.acknowledged);
    kv_manifest_close(manifest);
    kv_disk_destroy(image.disk);
}

static void test_upgrade(uint64_t seed, bool stale)
{
    static struct old old;
    struct stack stack;
    struct world world;
    struct kv_error err = {0};
    struct seen seen = {0};
    struct ex_random random = {seed};
    old = (struct old){.stale = stale};
    make_old(&old, seed);
    stack_init(&stack, KV_PLANT_NONE, old.disk);
    EXPECT(kv_manifest_scan_now(old.manifest, NULL, 0, copy_all, stack.records, NULL) == KV_OK);
    EXPECT(world_open(&world, stack.disk, stack.manifest, STACK_DIR, &err) == KV_OK);
    EXPECT(world.store->recovery.scan_why != NULL);
    EXPECT(world.store->recovery.dropped == 0 && world.store->recovery.checkpoints > 0);
    EXPECT(world_settle(&world));
    world_close(&world);
    for (uint64_t tick = 0; tick <= stack.recorder->tick; tick++) {
        for (uint32_t i = 0; i < IMAGES; i++)
            look(&old, &stack, tick, &random, &seen);
    }
    (void)printf("  seed %llu: %u images without the bit, %u with it\n", (unsigned long long)seed,
                 seen.without, seen.with);
    EXPECT(seen.without > 0 && seen.with > 0);
    kv_manifest_close(old.manifest);
    stack_fini(&stack);
}

int main(void)
{
    test_upgrade(1, false);
    test_upgrade(2, true);
    HARNESS_END();
}
