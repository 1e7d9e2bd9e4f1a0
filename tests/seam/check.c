/*
 * Compares a store with what was promised.
 *
 * Whatever it lists is read and compared, also what nobody had been promised yet: a checkpoint that
 * is there must be whole.
 */

#include "tests/seam/check.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct reading {
    struct kv_read read;
    bool done;
};

static void note(struct check *check, uint64_t *count, const char *fmt, ...) KV_PRINTF(3, 4);
static void note(struct check *check, uint64_t *count, const char *fmt, ...)
{
    va_list args;
    ++*count;
    if (check->first[0] != '\0') return;
    va_start(args, fmt);
    (void)vsnprintf(check->first, sizeof(check->first), fmt, args);
    va_end(args);
}

static void read_done(struct kv_read *read)
{
    KV_CONTAINER_OF(read, struct reading, read)->done = true;
}

enum outcome { OUTCOME_RIGHT, OUTCOME_TORN, OUTCOME_WRONG };

static enum outcome page_outcome(struct world *world, const struct work_point *point, uint32_t k,
                                 const struct kv_read *read, const struct kv_digest *chain)
{
    const uint32_t slot = read->slots[k];
    const uint32_t count = KV_MIN(KV_PAGE_TOKENS, point->tokens - k * KV_PAGE_TOKENS);
    enum outcome outcome = OUTCOME_TORN;
    if (kv_store_read_check(read, k, &chain[k], NULL, 0) == KV_OK)
        outcome = content_matches(&world->layout, point->session, point->life, k, count,
                                  kv_hbm_bytes(world->store->hbm, slot))
                      ? OUTCOME_RIGHT
                      : OUTCOME_WRONG;
    if (slot != KV_HBM_SLOT_NONE) kv_hbm_unpin(world->store->hbm, slot);
    return outcome;
}

static enum outcome node_outcome(struct check *check, struct world *world,
                                 const struct kv_node *node, const struct work_point *point)
{
    uint32_t pages[CONTENT_PAGES_MAX], slots[CONTENT_PAGES_MAX];
    bool fresh[CONTENT_PAGES_MAX];
    struct kv_digest chain[CONTENT_PAGES_MAX + 1];
    struct reading reading = {.read = {.count = kv_pages_for(node->tokens),
                                       .pages = pages,
                                       .slots = slots,
                                       .fresh = fresh,
                                       .done = read_done}};
    kv_index_path_pages(node, node->tokens, pages);
    content_chain(point->session, point->life, node->tokens, chain);
    const kv_status status = kv_store_read_start(world->store, &reading.read);
    assert(status == KV_OK || status == KV_MISS);
    while (status == KV_OK && !reading.done)
        world_turn(world);
    enum outcome worst = OUTCOME_RIGHT;
    for (uint32_t k = 0; k < reading.read.count; k++) {
        const enum outcome outcome = page_outcome(world, point, k, &reading.read, chain);
        if (outcome == OUTCOME_TORN) check->refused++;
        worst = KV_MAX(worst, outcome);
    }
    return worst;
}

static void check_node(struct check *check, const struct work *work, struct world *world,
                       uint32_t s, const struct kv_node *node, uint64_t tick, bool lying,
                       bool *right)
{
    const struct work_point *point = work_find(work, s, &node->id);
    if (point == NULL || point->tokens != node->tokens) {
        note(check, &check->wrong, "%s: a checkpoint at %u that nobody asked for",
             content_session_name(s), node->tokens);
        return;
    }
    if (point->drop_durable < tick)
        note(check, &check->undead, "%s life %u: the checkpoint at %u was deleted and is back",
             content_session_name(s), point->life, node->tokens);
    switch (node_outcome(check, world, node, point)) {
    case OUTCOME_RIGHT:
        right[point - work->points] = true;
        break;
    case OUTCOME_TORN:
        if (!lying && !(point->saved < tick && point->drop_begun >= tick))
            note(check, &check->torn, "%s life %u: the checkpoint at %u is there and not whole",
                 content_session_name(s), point->life, node->tokens);
        break;
    case OUTCOME_WRONG:
        note(check, &check->wrong, "%s life %u: the checkpoint at %u has bytes of something else",
             content_session_name(s), point->life, node->tokens);
        break;
    }
}

static void check_session(struct check *check, const struct work *work, struct world *world,
                          uint32_t s, uint64_t tick, bool lying, bool *right)
{
    const struct kv_session_id id = content_session(s);
    struct kv_session *session = kv_index_session_find(world->store->index, &id);
    if (session == NULL) return;
    if (!world_load(world, session)) {
        note(check, &check->unopened, "%s: its tree does not load", content_session_name(s));
        return;
    }
    for (struct kv_node *node = kv_index_node_next(session, NULL); node != NULL;
         node = kv_index_node_next(session, node))
        check_node(check, work, world, s, node, tick, lying, right);
}

static void check_promises(struct check *check, const struct work *work, uint64_t tick, bool lying,
                           const bool *right)
{
    for (uint32_t i = 0; i < work->point_count; i++) {
        const struct work_point *point = &work->points[i];
        if (point->saved >= tick || point->drop_begun < tick || lying) continue;
        check->acknowledged++;
        check->found += right[i];
        if (!right[i])
            note(check, &check->lost,
                 "%s life %u: the checkpoint at %u was acknowledged and is lost",
                 content_session_name(point->session), point->life, point->tokens);
    }
}

void check_store(struct check *check, const struct work *work, struct kv_disk *disk,
                 struct kv_manifest *manifest, uint64_t tick, bool lying)
{
    struct world world;
    struct kv_error err = {0};
    bool *right = calloc(WORK_POINTS_MAX, sizeof(*right));
    assert(right != NULL);
    const kv_status status = world_open(&world, disk, manifest, work->options.dir, &err);
    if (status == KV_CORRUPT && lying) { /* The superblock, whose second copy is as old. */
        free(right);
        return;
    }
    if (status != KV_OK) {
        note(check, &check->unopened, "the store does not open: %s", err.text);
        check_promises(check, work, tick, lying, right);
        free(right);
        return;
    }
    const uint64_t lost_batches = world.store->recovery.lost_batches;
    check->lost_batches += lost_batches;
    if (lost_batches > 0 && !lying)
        note(check, &check->alarms, "it says that %llu acknowledged batches are lost",
             (unsigned long long)lost_batches);
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++)
        check_session(check, work, &world, s, tick, lying, right);
    const bool settled = world_settle(&world);
    assert(settled);
    const uint64_t used = kv_ssd_usage(world.store->ssd).bytes_used / world.layout.page_bytes;
    uint32_t astray = 0;
    const uint32_t records = world_page_records(&world, &astray);
    /* Places found damaged just now are out of use; nobody dropped what needs them. */
    const uint64_t out = world.store->counters.quarantined;
    if (used + out != records || astray > 0)
        note(check, &check->uneven,
             "%llu pages in use, %llu out of use, %u recorded, %u of them elsewhere",
             (unsigned long long)used, (unsigned long long)out, records, astray);
    if (world.store->recovery.scan_why != NULL && !lying && !check->may_read_trees)
        note(check, &check->uneven, "all trees had to be read: %s", world.store->recovery.scan_why);
    world_close(&world);
    check_promises(check, work, tick, lying, right);
    free(right);
}

uint64_t check_failures(const struct check *check)
{
    return check->lost + check->torn + check->wrong + check->undead + check->uneven +
           check->unopened + check->alarms;
}
