/*
 * Records of data keys are of users that are there, and all under one master key.
 *
 * Goal: a rotation beside a user whose own record never comes, and beside one that is being erased,
 * leaves no key of nobody behind after the next start. Method: the store of tests/seam/world.c on a
 * disk and a manifest in memory, closed without what would have come next.
 */

#include "tests/harness.h"
#include "tests/seam/content.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/stack.h"
#include "tests/seam/world.h"

static struct stack stack;
static struct world world;

struct count {
    uint32_t keys;
    uint8_t master[8]; /* Of the first one: its record after version and id, see key_record.h. */
    bool is_one;       /* All are under the same. */
};

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct count *count = context;
    struct kv_record_key record;
    EXPECT(kv_record_key_decode(put->value, put->value_bytes, &record) == KV_OK);
    if (count->keys++ == 0)
        memcpy(count->master, record.master.bytes, sizeof(count->master));
    else if (memcmp(count->master, record.master.bytes, sizeof(count->master)) != 0)
        count->is_one = false;
    return KV_OK;
}

static struct count keys_recorded(void)
{
    struct count count = {.is_one = true};
    EXPECT(kv_manifest_scan_now(stack.manifest, (const uint8_t *)"K", 1, visit, &count, NULL) ==
           KV_OK);
    return count;
}

static void open_world(void)
{
    struct kv_error err = {0};
    const kv_status status = world_open(&world, stack.disk, stack.manifest, STACK_DIR, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
}

static struct kv_user *recorded_user(uint32_t session)
{
    struct kv_session *made = world_session(&world, session);
    struct kv_batch *batch = kv_batch_create(world.store);
    EXPECT(batch != NULL);
    EXPECT(kv_batch_session(batch, made) == KV_OK);
    EXPECT(kv_batch_user(batch, made->user, content_user_name(session)) == KV_OK);
    kv_batch_post(batch, NULL, NULL);
    EXPECT(world_settle(&world));
    return made->user;
}

static void rotate(void)
{
    const uint32_t before = world.master;
    world_rotate(&world);
    EXPECT(world_settle(&world));
    EXPECT(world.master != before);
}

/* Sessions of different users. */
static uint32_t other_user(uint32_t session)
{
    uint32_t other = session + 1;
    while (kv_id_equal(content_user(other).bytes, content_user(session).bytes))
        other++;
    return other;
}

static void test_record_never_comes(void)
{
    const uint32_t late = other_user(0);
    open_world();
    (void)recorded_user(0);
    /* In memory, with a key; its batch is given up. */
    struct kv_batch *batch = kv_batch_create(world.store);
    EXPECT(kv_batch_user(batch, world_session(&world, late)->user, content_user_name(late)) ==
           KV_OK);
    kv_batch_discard(batch);
    rotate();
    EXPECT_EQ_U32(keys_recorded().keys, 2);
    world_close(&world);

    open_world();
    EXPECT_EQ_U32(keys_recorded().keys, 1); /* Nobody's is gone. */
    rotate();
    EXPECT(keys_recorded().is_one);
    world_close(&world);
}

static void test_erased_beside(void)
{
    open_world();
    struct kv_user *user = world_session(&world, 0)->user;
    struct kv_batch *batch = kv_batch_create(world.store);
    EXPECT(batch != NULL && kv_batch_delete_user(batch, &user->id) == KV_OK);
    kv_batch_post(batch, NULL, NULL);
    world_rotate(&world); /* Behind it. */
    EXPECT(world_settle(&world));
    EXPECT_EQ_U32(keys_recorded().keys, 0);
    world_close(&world);
}

int main(void)
{
    world_encrypt(true);
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 1));
    test_record_never_comes();
    test_erased_beside();
    stack_fini(&stack);
    HARNESS_END();
}
