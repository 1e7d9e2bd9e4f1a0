/*
 * The power goes while a state directory is made, or its superblock is written again.
 *
 * Goal: whatever the cut leaves is a directory that opens, or one with nothing in it; a superblock
 * is never half there, and never missing where something else is. Method: a first start of the real
 * store is recorded (tests/seam/), and so is one that puts a damaged copy right; then many images
 * of every moment.  Where names are not flushed, the same images must show it.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/directory.h"
#include "tests/harness.h"
#include "tests/seam/content.h"
#include "tests/seam/image.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"
#include "tests/seam/stack.h"
#include "tests/seam/world.h"

#include <string.h>

#define IMAGES 60u /* Of each moment. */

struct seen {
    uint32_t empty, made, wrong;
};

static void start(struct stack *stack)
{
    struct world world;
    struct kv_error err = {0};
    if (world_open(&world, stack->disk, stack->manifest, STACK_DIR, &err) != KV_OK)
        (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(world.store != NULL);
    EXPECT(world_settle(&world));
    world_close(&world);
}

static bool opens(struct kv_disk *disk, struct kv_manifest *manifest, const char **ret_why)
{
    static struct kv_error err;
    struct world world;
    *ret_why = err.text;
    if (world_open(&world, disk, manifest, STACK_DIR, &err) != KV_OK) return false;
    const bool ok = world.store->recovery.lost_batches == 0 && world_settle(&world);
    world_close(&world);
    return ok;
}

static void look(const struct stack *stack, uint64_t tick, struct ex_random *random,
                 struct seen *seen)
{
    struct image image;
    struct kv_superblock superblock;
    struct kv_error err = {0};
    uint32_t damaged = 0;
    const char *why;
    image_build(stack->recorder, tick, IMAGE_HONEST, STACK_DIR, random, &image);
    const kv_status status = kv_directory_read(image.disk, STACK_DIR, &superblock, &damaged, &err);
    struct kv_manifest *manifest = mem_manifest_create();
    EXPECT(image_manifest(stack->recorder, &image, manifest) == KV_OK);
    if (status == KV_MISS && image.batches == 0)
        seen->empty++;
    else if (status == KV_OK && damaged <= 1 &&
             kv_id_equal(superblock.id.bytes, content_directory().bytes))
        seen->made++;
    else
        seen->wrong++;
    if (!opens(image.disk, manifest, &why) || !opens(image.disk, manifest, &why)) seen->wrong++;
    kv_manifest_close(manifest);
    kv_disk_destroy(image.disk);
}

static struct seen look_always(const struct stack *stack, uint64_t from)
{
    struct seen seen = {0};
    struct ex_random random = {3};
    for (uint64_t tick = from; tick <= stack->recorder->tick; tick++) {
        for (uint32_t i = 0; i < IMAGES; i++)
            look(stack, tick, &random, &seen);
    }
    (void)printf("  %u empty, %u made, %u wrong\n", seen.empty, seen.made, seen.wrong);
    return seen;
}

static void test_first_start(enum kv_plant plant)
{
    struct stack stack;
    stack_init(&stack, plant, mem_disk_create(STACK_DIR, 1));
    start(&stack);
    const struct seen seen = look_always(&stack, 0);
    EXPECT(seen.empty > 0 && seen.made > 0);
    EXPECT((seen.wrong > 0) == (plant != KV_PLANT_NONE));
    stack_fini(&stack);
}

/* The old file is there until the new one is. */
static void test_put_right(void)
{
    struct stack stack;
    struct mem_disk_file file;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 2));
    start(&stack);
    for (uint32_t i = 0; mem_disk_file(stack.memory, i, &file); i++)
        if (strcmp(file.name, "superblock") == 0) break;
    EXPECT(strcmp(file.name, "superblock") == 0);

    struct kv_disk *damaged = mem_disk_create(STACK_DIR, 3);
    uint8_t *bytes = malloc(file.size);
    EXPECT(bytes != NULL);
    memcpy(bytes, file.bytes, file.size);
    bytes[40] ^= 1;
    mem_disk_add(damaged, STACK_DIR, "superblock", bytes, file.size);
    stack_fini(&stack);

    stack_init(&stack, KV_PLANT_NONE, damaged);
    start(&stack);
    const struct seen seen = look_always(&stack, 0);
    EXPECT(seen.empty == 0 && seen.made > 0 && seen.wrong == 0);
    stack_fini(&stack);
}

int main(void)
{
    test_first_start(KV_PLANT_NONE);
    test_first_start(KV_PLANT_NAMES_NOT_FLUSHED);
    test_put_right();
    HARNESS_END();
}
