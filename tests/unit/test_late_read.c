/*
 * Reads that the device does not answer.
 *
 * Goal: a read that is given up ends at once, with every page that had not come as one that could
 * not be read; its memory is not used by anybody until the device gives it back; meanwhile no other
 * read asks the device; and when it answers, all is as before.
 * Method: the real store on a disk in memory (tests/seam/) that keeps reads to itself when told to.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/disk_queue.h"
#include "tests/harness.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/stack.h"
#include "tests/seam/work.h"

#include <string.h>

#define ROUNDS 40u
#define TURNS 50u

/* ---- a disk that holds reads back ---- */

struct holding {
    struct kv_disk disk;
    struct kv_disk *inner;
    struct kv_disk_queue held;
    uint32_t held_count;
    bool holds;
    uint32_t passes; /* Reads that still get through. */
};

static struct holding *holding_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct holding, disk);
}

static void hold_start(struct kv_disk *base, struct kv_disk_op *op)
{
    struct holding *disk = holding_of(base);
    const bool is_read = op->rest.verb == KV_DISK_READ;
    if (disk->holds && is_read && disk->passes == 0) {
        kv_disk_queue_push(&disk->held, op);
        disk->held_count++;
        return;
    }
    if (disk->holds && is_read) disk->passes--;
    disk->inner->ops->start(disk->inner, op);
}

static uint32_t hold_run(struct kv_disk *base, int wake_fd, int timeout_ms)
{
    struct holding *disk = holding_of(base);
    for (struct kv_disk_op *op; !disk->holds && (op = kv_disk_queue_pop(&disk->held)) != NULL;)
        disk->inner->ops->start(disk->inner, op);
    return disk->inner->ops->run(disk->inner, wake_fd, timeout_ms);
}

static int64_t hold_passed(struct kv_disk *base, struct kv_disk_op *op, int64_t result)
{
    return kv_disk_passed(holding_of(base)->inner, op, result);
}

static int64_t hold_call(struct kv_disk *base, const struct kv_disk_call *call)
{
    struct kv_disk *inner = holding_of(base)->inner;
    return inner->ops->call(inner, call);
}

static const struct kv_disk_ops hold_ops = {
    .name = "holding",
    .start = hold_start,
    .run = hold_run,
    .passed = hold_passed,
    .call = hold_call,
};

/* ---- a read of all pages of a session's head ---- */

struct reading {
    struct kv_read read;
    uint32_t session, life, tokens;
    uint32_t pages[CONTENT_PAGES_MAX], slots[CONTENT_PAGES_MAX];
    bool fresh[CONTENT_PAGES_MAX], done;
    struct kv_digest chain[CONTENT_PAGES_MAX + 1];
};

static void read_done(struct kv_read *read)
{
    KV_CONTAINER_OF(read, struct reading, read)->done = true;
}

static kv_status start(struct world *world, const struct work *work, uint32_t s,
                       struct reading *reading)
{
    struct kv_session *session = world_session(world, s);
    EXPECT(world_load(world, session));
    const struct kv_node *head = NULL;
    for (struct kv_node *node = kv_index_node_next(session, NULL); node != NULL;
         node = kv_index_node_next(session, node))
        if (head == NULL || node->tokens > head->tokens) head = node;
    EXPECT(head != NULL);
    const struct work_point *point = work_find(work, s, &head->id);
    EXPECT(point != NULL);
    *reading = (struct reading){.session = s, .life = point->life, .tokens = head->tokens};
    reading->read = (struct kv_read){.count = kv_pages_for(head->tokens),
                                     .pages = reading->pages,
                                     .slots = reading->slots,
                                     .fresh = reading->fresh,
                                     .done = read_done};
    kv_index_path_pages(head, head->tokens, reading->pages);
    content_chain(s, point->life, head->tokens, reading->chain);
    return kv_store_read_start(world->store, &reading->read);
}

/* How many pages are right; the others must be such as could not be read. */
static uint32_t end(struct world *world, struct reading *reading)
{
    uint32_t right = 0;
    for (uint32_t k = 0; k < reading->read.count; k++) {
        const uint32_t slot = reading->slots[k];
        const uint32_t count = KV_MIN(KV_PAGE_TOKENS, reading->tokens - k * KV_PAGE_TOKENS);
        const kv_status status =
            kv_store_read_check(&reading->read, k, &reading->chain[k], NULL, 0);
        EXPECT(status == KV_OK || status == KV_IO);
        EXPECT((slot == KV_HBM_SLOT_NONE) == (status == KV_IO));
        if (status != KV_OK) continue;
        EXPECT(content_matches(&world->layout, reading->session, reading->life, k, count,
                               kv_hbm_bytes(world->store->hbm, slot)));
        kv_hbm_unpin(world->store->hbm, slot);
        right++;
    }
    return right;
}

static void turns(struct world *world)
{
    for (uint32_t i = 0; i < TURNS; i++)
        world_turn(world);
}

/* Sessions with a checkpoint of several pages. */
static uint32_t long_sessions(struct world *world, uint32_t *ret_sessions)
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++) {
        const struct kv_session_id id = content_session(s);
        struct kv_session *session = kv_index_session_find(world->store->index, &id);
        if (session == NULL || !world_load(world, session)) continue;
        uint32_t tokens = 0;
        for (struct kv_node *node = kv_index_node_next(session, NULL); node != NULL;
             node = kv_index_node_next(session, node))
            tokens = KV_MAX(tokens, node->tokens);
        if (kv_pages_for(tokens) >= 2) ret_sessions[count++] = s;
    }
    return count;
}

static void test_given_up(const struct stack *stack, const struct work *work, uint32_t passes)
{
    struct world world;
    struct holding holding = {.disk.ops = &hold_ops, .inner = stack->memory, .passes = passes};
    struct reading first, second;
    uint32_t sessions[CONTENT_SESSIONS];
    EXPECT(world_open(&world, &holding.disk, stack->records, STACK_DIR, NULL) == KV_OK);
    EXPECT(long_sessions(&world, sessions) >= 2);
    struct kv_store *store = world.store;

    holding.holds = true;
    EXPECT(start(&world, work, sessions[0], &first) == KV_OK);
    const uint32_t count = first.read.count;
    turns(&world);
    EXPECT(!first.done && first.read.waiting == count - passes);
    kv_store_read_give_up(&first.read);
    EXPECT(first.done);
    EXPECT_EQ_U32(end(&world, &first), passes);
    EXPECT_EQ_U32(store->reads_late, holding.held_count);
    EXPECT_EQ_U32(kv_hbm_usage(store->hbm).pinned, holding.held_count);
    EXPECT_EQ_U64(store->counters.unread_pages, count - passes);

    /* Nobody else is sent there. */
    const uint32_t held = holding.held_count;
    EXPECT(start(&world, work, sessions[1], &second) == KV_MISS);
    EXPECT_EQ_U32(holding.held_count, held);
    EXPECT_EQ_U32(end(&world, &second), 0);

    holding.holds = false;
    EXPECT(world_settle(&world));
    EXPECT_EQ_U32(store->reads_late, 0);
    EXPECT_EQ_U32(kv_hbm_usage(store->hbm).pinned, 0);
    for (uint32_t i = 0; i < 2; i++) {
        const kv_status status = start(&world, work, sessions[i], &first);
        EXPECT(status == KV_OK || status == KV_MISS);
        while (status == KV_OK && !first.done)
            world_turn(&world);
        EXPECT_EQ_U32(end(&world, &first), first.read.count);
    }
    EXPECT(world_settle(&world));
    EXPECT_EQ_U64(store->counters.corrupt_pages, 0);
    world_close(&world);
}

int main(void)
{
    struct stack stack;
    static struct work work;
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, 5));
    work_run(&work, &(struct work_options){.disk = stack.disk,
                                           .manifest = stack.manifest,
                                           .recorder = stack.recorder,
                                           .faulty = &stack.faulty,
                                           .dir = STACK_DIR,
                                           .seed = 5,
                                           .rounds = ROUNDS});
    EXPECT(!work.stuck && work.saves > 0);
    test_given_up(&stack, &work, 0);
    test_given_up(&stack, &work, 1);
    stack_fini(&stack);
    HARNESS_END();
}
