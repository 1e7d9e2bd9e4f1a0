/*
 * A tree is loaded while one of its pages moves, and when a record of it fits nothing.
 *
 * Goal: a move whose records are on their way when the tree is read is no damage, and a page whose
 * place is not in use goes with what needs it, once, and has the next start count again.  Method:
 * the real store on a disk and a manifest in memory, where a scan that is posted before a batch
 * reads what was there before it.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/segments.h"
#include "kvstore/store/store_internal.h"
#include "tests/harness.h"
#include "tests/seam/content.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/stack.h"
#include "tests/seam/work.h"

struct rig {
    struct stack stack;
    struct world world;
    struct kv_session *session;
    struct kv_page page; /* One of it. */
    uint32_t nodes;
    kv_status loaded;
};

/* A session with checkpoints, not loaded; one of its pages is remembered. */
static void rig_init(struct rig *rig)
{
    static struct work work;
    *rig = (struct rig){.loaded = KV_STATUS_COUNT};
    stack_init(&rig->stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 7));
    const struct work_options options = {.disk = rig->stack.disk,
                                         .manifest = rig->stack.manifest,
                                         .recorder = rig->stack.recorder,
                                         .dir = STACK_DIR,
                                         .seed = 7,
                                         .rounds = 30};
    work_run(&work, &options);
    EXPECT(!work.stuck && !work.uneven);
    EXPECT(world_open(&rig->world, rig->stack.disk, rig->stack.manifest, STACK_DIR, NULL) == KV_OK);
    for (uint32_t s = 0; s < CONTENT_SESSIONS && rig->nodes == 0; s++) {
        rig->session = world_session(&rig->world, s);
        EXPECT(world_load(&rig->world, rig->session));
        rig->nodes = rig->session->node_count;
        if (rig->nodes == 0) continue;
        const struct kv_node *first = rig->session->tree->roots;
        rig->page = *kv_index_page(rig->world.store->index, first->pages[0]);
    }
    EXPECT(rig->nodes > 0);
    kv_store_unload(rig->world.store, rig->session);
}

static void rig_fini(struct rig *rig)
{
    world_close(&rig->world);
    stack_fini(&rig->stack);
}

static void loaded(void *context, struct kv_session *session, kv_status status)
{
    (void)session;
    *(kv_status *)context = status;
}

static void finish_load(struct rig *rig)
{
    for (uint32_t i = 0; i < 1000 && rig->loaded == KV_STATUS_COUNT; i++)
        world_turn(&rig->world);
    EXPECT(rig->loaded == KV_OK);
    EXPECT(world_settle(&rig->world));
}

static void test_moved_meanwhile(void)
{
    struct rig rig;
    uint32_t place = 0, astray = 0;
    rig_init(&rig);
    struct kv_store *store = rig.world.store;
    EXPECT(kv_ssd_alloc(store->ssd, 1, &place, NULL) == KV_OK);
    kv_store_load_start(store, rig.session, loaded, &rig.loaded); /* Reads the old place. */

    struct kv_page moved = rig.page;
    moved.ssd_page = place;
    struct kv_batch *batch = kv_batch_create(store);
    EXPECT(batch != NULL && kv_batch_page(batch, &moved) == KV_OK);
    EXPECT(kv_batch_free_ssd(batch, rig.page.ssd_page) == KV_OK);
    kv_batch_post(batch, NULL, NULL);
    EXPECT(kv_store_segment_recorded(store, place));
    EXPECT(!kv_store_segment_recorded(store, rig.page.ssd_page));

    finish_load(&rig);
    EXPECT_EQ_U32(rig.session->node_count, rig.nodes);
    EXPECT_EQ_U32(rig.session->recorded_nodes, rig.nodes);
    EXPECT_EQ_U64(store->counters.missing_pages, 0);
    const uint32_t first = rig.session->tree->roots->pages[0];
    EXPECT_EQ_U32(kv_index_page(store->index, first)->ssd_page, place);
    EXPECT_EQ_U64(world_page_records(&rig.world, &astray),
                  kv_ssd_usage(store->ssd).bytes_used / rig.world.layout.page_bytes);
    EXPECT_EQ_U32(astray, 0);
    rig_fini(&rig);
}

static kv_status see(void *context, const struct kv_manifest_put *put)
{
    if (put->key_bytes == 1) *(bool *)context = true;
    return KV_OK;
}

static void test_place_not_in_use(void)
{
    struct rig rig;
    bool doubt = false;
    uint32_t astray = 0;
    rig_init(&rig);
    struct kv_store *store = rig.world.store;
    kv_segments_set(store->segments, rig.page.ssd_page, false);
    EXPECT(world_page_records(&rig.world, &astray) > 0);
    EXPECT_EQ_U32(astray, 1);
    const uint64_t before = store->checkpoints;
    kv_store_load_start(store, rig.session, loaded, &rig.loaded);
    finish_load(&rig);
    EXPECT_EQ_U32(rig.session->node_count, 0); /* It was the first page of all. */
    EXPECT_EQ_U64(store->counters.missing_pages, 1);
    EXPECT_EQ_U64(store->checkpoints, before - rig.nodes);
    (void)world_page_records(&rig.world, &astray);
    EXPECT_EQ_U32(astray, 0);
    EXPECT(kv_manifest_scan_now(rig.stack.records, (const uint8_t *)"G", 1, see, &doubt, NULL) ==
           KV_OK);
    EXPECT(doubt);
    world_close(&rig.world);
    EXPECT(world_open(&rig.world, rig.stack.disk, rig.stack.manifest, STACK_DIR, NULL) == KV_OK);
    EXPECT_EQ_STR(rig.world.store->recovery.scan_why, "records did not fit together");
    EXPECT_EQ_U64(rig.world.store->recovery.checkpoints, before - rig.nodes);
    world_close(&rig.world);
    EXPECT(world_open(&rig.world, rig.stack.disk, rig.stack.manifest, STACK_DIR, NULL) == KV_OK);
    EXPECT(rig.world.store->recovery.scan_why == NULL);
    EXPECT_EQ_U64(rig.world.store->recovery.checkpoints, before - rig.nodes);
    rig_fini(&rig);
}

/* A tree as deep as it has checkpoints: leaving memory and being dropped take as long as it has
 * nodes, not their square (minutes, with nobody else served). */
static void test_deep(void)
{
    enum { NODES = 100000, ROUNDS = 2 };
    struct rig rig;
    rig_init(&rig);
    struct kv_store *store = rig.world.store;
    EXPECT(world_load(&rig.world, rig.session));
    const uint64_t begun = kv_clock_stopwatch_ns();
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct kv_node *root = NULL, *node = NULL;
        for (uint32_t i = 0; i < NODES; i++) {
            node = kv_index_node_add(store->index, rig.session, node, i + 1, NULL, 0);
            EXPECT(node != NULL);
            if (root == NULL) root = node;
        }
        EXPECT_EQ_U32(rig.session->node_count, rig.nodes + NODES);
        if (round % 2 == 0) {
            kv_store_drop_node(store, root, KV_REASON_EXPIRED);
            EXPECT_EQ_U32(rig.session->node_count, rig.nodes);
        } else {
            kv_store_unload(store, rig.session);
            EXPECT_EQ_U32(rig.session->node_count, 0);
        }
        EXPECT(world_settle(&rig.world));
        EXPECT(world_load(&rig.world, rig.session));
        EXPECT_EQ_U32(rig.session->node_count, rig.nodes);
    }
    EXPECT(kv_clock_stopwatch_ns() - begun < 4000000000ull);
    rig_fini(&rig);
}

int main(void)
{
    test_deep();
    test_moved_meanwhile();
    test_place_not_in_use();
    HARNESS_END();
}
