/*
 * The script of saves, restores and deletes.
 *
 * A save does what cached/shard/commit.c does, for histories that only grow: nodes and pages in
 * memory, pages written and flushed, records synced, acknowledged.  Several run at once, each on a
 * session of its own.
 */

#include "tests/seam/work.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"
#include "tests/seam/plant.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct save {
    struct work *work;
    struct kv_write *write;
    struct kv_node *node;
    uint32_t session, point;
};

struct restore {
    struct work *work;
    struct kv_read read;
    uint32_t session, life, tokens;
    uint32_t pages[CONTENT_PAGES_MAX], slots[CONTENT_PAGES_MAX];
    bool fresh[CONTENT_PAGES_MAX];
    struct kv_digest chain[CONTENT_PAGES_MAX + 1];
};

struct drop {
    struct work *work;
    uint32_t session;
    uint64_t begun;
};

static void *must(void *memory)
{
    assert(memory != NULL);
    return memory;
}

static uint64_t now(const struct work *work)
{
    return recorder_mark(work->options.recorder);
}

/* ---- points ---- */

const struct work_point *work_find(const struct work *work, uint32_t session,
                                   const struct kv_checkpoint_id *id)
{
    for (uint32_t i = 0; i < work->point_count; i++) {
        if (work->points[i].session == session && kv_id_equal(work->points[i].id.bytes, id->bytes))
            return &work->points[i];
    }
    return NULL;
}

/* One that failed before may be asked for again; one that was deleted is not. */
static uint32_t point_add(struct work *work, const struct work_point *point)
{
    const struct work_point *found = work_find(work, point->session, &point->id);
    if (found != NULL) return (uint32_t)(found - work->points);
    assert(work->point_count < WORK_POINTS_MAX);
    work->points[work->point_count] = *point;
    return work->point_count++;
}

/* ---- saves ---- */

static void save_revert(struct save *save, bool free_space)
{
    struct kv_session *session = save->node->session;
    struct kv_store *store = save->work->world.store;
    kv_write_undo(save->write, free_space);
    session->head = save->node->parent;
    session->has_head = session->head != NULL;
    if (session->has_head) session->head_id = session->head->id;
    kv_index_node_remove(store->index, save->node);
    save->work->saves_failed++;
}

static void save_end(struct save *save)
{
    save->work->sessions[save->session].busy--;
    kv_write_destroy(save->write);
    free(save);
}

/* A planted bug does so before it may. */
static void acknowledge(struct save *save)
{
    struct work_point *point = &save->work->points[save->point];
    point->saved = KV_MIN(point->saved, now(save->work));
}

static void save_recorded(void *context, kv_status status)
{
    struct save *save = context;
    struct work *work = save->work;
    struct kv_index *index = work->world.store->index;
    if (status != KV_OK) {
        save_revert(save, false);
        save_end(save);
        return;
    }
    for (uint32_t i = 0; i < save->write->count; i++)
        kv_index_page(index, save->write->items[i].page)->durable = true;
    save->node->durable = true;
    work->world.store->checkpoints++;
    work->sessions[save->session].known = true;
    acknowledge(save);
    work->saves++;
    save_end(save);
}

static void save_record(struct save *save)
{
    struct work *work = save->work;
    struct kv_index *index = work->world.store->index;
    struct kv_session *session = save->node->session;
    struct kv_batch *batch = must(kv_batch_create(work->world.store));
    kv_status status = KV_OK;
    if (!work->sessions[save->session].known)
        status = kv_batch_user(batch, session->user, content_user_name(save->session));
    for (uint32_t i = 0; status == KV_OK && i < save->write->count; i++) {
        const struct kv_write_item *item = &save->write->items[i];
        status = kv_batch_page(batch, kv_index_page(index, item->page));
        if (status == KV_OK && item->old_ssd != KV_SSD_PAGE_NONE)
            status = kv_batch_free_ssd(batch, item->old_ssd);
    }
    if (status == KV_OK) status = kv_batch_node(batch, save->node);
    if (status == KV_OK) status = kv_batch_session(batch, session);
    assert(status == KV_OK);
    kv_batch_post(batch, save_recorded, save);
    if (plant_now() == KV_PLANT_ACK_BEFORE_SYNC) acknowledge(save);
}

static void save_written(struct kv_write *write, kv_status status)
{
    struct save *save = write->context;
    if (status == KV_OK) {
        save_record(save);
        return;
    }
    save_revert(save, true);
    save_end(save);
}

/* The object of page k: the parent's last one if nobody has filled it further, or a new one. */
static uint32_t edge_page(struct work *work, struct kv_session *session,
                          const struct kv_node *parent, uint32_t k, const struct kv_digest *chain)
{
    struct kv_store *store = work->world.store;
    const uint32_t start = k * KV_PAGE_TOKENS;
    if (parent != NULL && parent->tokens > start) {
        const uint32_t last = parent->pages[parent->page_count - 1];
        if (kv_index_page(store->index, last)->count == parent->tokens - start) {
            kv_index_page_ref(store->index, last);
            return last;
        }
    }
    const uint32_t page = kv_index_page_add(store->index, session);
    assert(page != KV_PAGE_INDEX_NONE);
    struct kv_page *object = kv_index_page(store->index, page);
    object->uid = kv_store_next_generation(store);
    object->position = start;
    object->tag = kv_load64(chain->bytes);
    return page;
}

static bool pages_write(struct work *work, struct save *save, const uint32_t *pages, uint32_t first,
                        uint32_t tokens, const struct kv_digest *chain)
{
    const struct work_session *state = &work->sessions[save->session];
    struct kv_store *store = work->world.store;
    for (uint32_t i = 0; i < save->node->page_count; i++) {
        const uint32_t k = first + i;
        const uint32_t count = KV_MIN(KV_PAGE_TOKENS, tokens - k * KV_PAGE_TOKENS);
        uint32_t slot;
        if (kv_hbm_alloc(store->hbm, &slot) != KV_OK) return false;
        content_page(&work->world.layout, save->session, state->life, k, count,
                     kv_hbm_bytes(store->hbm, slot));
        kv_write_add(save->write, pages[i], slot, count, &chain[k]);
        kv_hbm_unpin(store->hbm, slot); /* The write has its own pin. */
    }
    return true;
}

static void save_start(struct work *work, uint32_t s, struct kv_session *session, uint32_t tokens)
{
    struct kv_store *store = work->world.store;
    struct work_session *state = &work->sessions[s];
    struct kv_node *parent = session->head;
    const uint32_t first = (parent == NULL ? 0 : parent->tokens) / KV_PAGE_TOKENS;
    const uint32_t count = kv_pages_for(tokens) - first;
    struct kv_digest chain[CONTENT_PAGES_MAX + 1], digest;
    uint32_t pages[CONTENT_PAGES_MAX];
    const struct kv_checkpoint_id id = content_point(s, state->life, tokens, &digest);
    content_chain(s, state->life, tokens, chain);

    struct save *save = must(calloc(1, sizeof(*save)));
    *save = (struct save){.work = work, .session = s, .write = must(kv_write_create(store, count))};
    for (uint32_t i = 0; i < count; i++)
        pages[i] = edge_page(work, session, parent, first + i, &chain[first + i]);
    save->node = must(kv_index_node_add(store->index, session, parent, tokens, pages, count));
    save->node->id = id;
    save->node->digest = digest;
    save->node->kernels = 1;
    save->node->created_ms = kv_store_now_ms(store);
    kv_index_node_mark(save->node, NULL, 0);
    kv_index_renew(save->node, save->node->created_ms);
    save->point = point_add(work, &(struct work_point){.id = id,
                                                       .session = s,
                                                       .life = state->life,
                                                       .tokens = tokens,
                                                       .saved = WORK_NEVER,
                                                       .drop_begun = WORK_NEVER,
                                                       .drop_durable = WORK_NEVER});
    state->busy++;
    const bool ok = pages_write(work, save, pages, first, tokens, chain);
    for (uint32_t i = 0; i < count; i++)
        kv_index_page_unref(store->index, pages[i]); /* The edge holds its own. */
    session->head = save->node;
    session->has_head = true;
    session->head_id = id;
    session->head_tokens = tokens;
    save->write->done = save_written;
    save->write->context = save;
    if (ok && kv_write_start(save->write, NULL) == KV_OK) {
        if (plant_now() == KV_PLANT_ACK_BEFORE_FLUSH) acknowledge(save);
        return;
    }
    save_revert(save, true);
    save_end(save);
}

/* ---- restores ---- */

static void restore_done(struct kv_read *read)
{
    struct restore *restore = KV_CONTAINER_OF(read, struct restore, read);
    struct work *work = restore->work;
    struct kv_store *store = work->world.store;
    for (uint32_t k = 0; k < read->count; k++) {
        const uint32_t slot = read->slots[k];
        const uint32_t count = KV_MIN(KV_PAGE_TOKENS, restore->tokens - k * KV_PAGE_TOKENS);
        const kv_status status = kv_store_read_check(read, k, &restore->chain[k], NULL, 0);
        if (status == KV_IO) {
            work->pages_missed++;
        } else if (status != KV_OK) {
            work->damaged++; /* A shard would drop it. */
        } else if (!content_matches(&work->world.layout, restore->session, restore->life, k, count,
                                    kv_hbm_bytes(store->hbm, slot))) {
            work->wrong++;
        }
        if (slot != KV_HBM_SLOT_NONE) kv_hbm_unpin(store->hbm, slot);
    }
    work->sessions[restore->session].busy--;
    work->restores++;
    free(restore);
}

static void restore_start(struct work *work, uint32_t s, struct kv_session *session)
{
    struct kv_node *node = session->head;
    if (node == NULL) return;
    struct restore *restore = must(calloc(1, sizeof(*restore)));
    restore->work = work;
    restore->session = s;
    restore->life = work->sessions[s].life;
    restore->tokens = node->tokens;
    content_chain(s, restore->life, node->tokens, restore->chain);
    kv_index_path_pages(node, node->tokens, restore->pages);
    restore->read = (struct kv_read){.count = kv_pages_for(node->tokens),
                                     .pages = restore->pages,
                                     .slots = restore->slots,
                                     .fresh = restore->fresh,
                                     .done = restore_done};
    work->sessions[s].busy++;
    const kv_status status = kv_store_read_start(work->world.store, &restore->read);
    if (status == KV_OK) return;
    if (status == KV_MISS) {
        restore_done(&restore->read);
        return;
    }
    work->sessions[s].busy--; /* All slots are pinned by others. */
    free(restore);
}

/* ---- deletes ---- */

static void drop_recorded(void *context, kv_status status)
{
    struct drop *drop = context;
    struct work *work = drop->work;
    const uint64_t durable = now(work);
    for (uint32_t i = 0; i < work->point_count; i++) {
        struct work_point *point = &work->points[i];
        if (status == KV_OK && point->session == drop->session && point->drop_begun == drop->begun)
            point->drop_durable = durable;
    }
    work->sessions[drop->session].busy--;
    work->drops++;
    free(drop);
}

/* `from` and all that follow it. */
static void drop_start(struct work *work, uint32_t s, struct kv_session *session,
                       struct kv_node *from)
{
    struct kv_store *store = work->world.store;
    struct drop *drop = must(malloc(sizeof(*drop)));
    *drop = (struct drop){.work = work, .session = s, .begun = now(work)};
    for (struct kv_node *node = from; node != NULL; node = node->child) {
        const struct work_point *point = work_find(work, s, &node->id);
        assert(point != NULL);
        work->points[point - work->points].drop_begun = drop->begun;
    }
    session->head = from->parent;
    session->has_head = session->head != NULL;
    if (session->has_head) session->head_id = session->head->id;
    kv_store_drop_node(store, from, KV_REASON_EXPIRED);
    if (session->head == NULL) work->sessions[s].life = ++work->sessions[s].lives;
    /* Removals become durable before or with the next batch: this one says when. */
    work->sessions[s].busy++;
    kv_batch_post(must(kv_batch_create(store)), drop_recorded, drop);
}

/* ---- moves ---- */

struct move {
    struct work *work;
    uint32_t session;
};

static void move_done(void *context, uint32_t moved, kv_status status)
{
    struct move *move = context;
    (void)status; /* One that failed left everything where it was. */
    move->work->moves += moved;
    move->work->sessions[move->session].busy--;
    free(move);
}

/* Some pages of the path, as compaction does. */
static void move_start(struct work *work, uint32_t s, const struct kv_node *head)
{
    struct kv_index *index = work->world.store->index;
    uint32_t path[CONTENT_PAGES_MAX], pages[CONTENT_PAGES_MAX], count = 0;
    const uint32_t all = kv_pages_for(head->tokens);
    kv_index_path_pages(head, head->tokens, path);
    for (uint32_t k = 0; k < all; k++) {
        if (kv_index_page(index, path[k])->durable && ex_random_percent(&work->random, 60))
            pages[count++] = path[k];
    }
    if (count == 0) return;
    struct move *move = must(malloc(sizeof(*move)));
    *move = (struct move){.work = work, .session = s};
    work->sessions[s].busy++;
    if (kv_store_move_start(work->world.store, pages, count, move_done, move) == KV_OK) return;
    work->sessions[s].busy--; /* All slots are pinned by others. */
    free(move);
}

/* ---- script ---- */

static bool is_used(const struct work *work, uint32_t s, uint32_t tokens)
{
    struct kv_digest digest;
    const struct kv_checkpoint_id id = content_point(s, work->sessions[s].life, tokens, &digest);
    const struct work_point *point = work_find(work, s, &id);
    return point != NULL && point->drop_begun != WORK_NEVER;
}

static void step(struct work *work)
{
    const uint32_t s = ex_random_below(&work->random, CONTENT_SESSIONS);
    const uint32_t what = ex_random_below(&work->random, 100);
    const uint32_t more = ex_random_between(&work->random, 20, 260);
    struct kv_session *session = world_session(&work->world, s);
    if (world_encrypts() && ex_random_percent(&work->random, 5)) world_rotate(&work->world);
    if (work->sessions[s].busy > 0 || !world_load(&work->world, session)) return;
    struct kv_node *head = session->head;
    const uint32_t tokens = (head == NULL ? 0 : head->tokens) + more;
    if (what < 20) {
        restore_start(work, s, session);
    } else if (what < 28 && head != NULL) {
        drop_start(work, s, session, head);
    } else if (head != NULL && (what < 36 || tokens > CONTENT_TOKENS_MAX)) {
        drop_start(work, s, session, session->tree->roots);
    } else if (head != NULL && what < 48) {
        move_start(work, s, head);
    } else if (!is_used(work, s, tokens)) {
        save_start(work, s, session, tokens);
    }
}

/* After a start the deepest checkpoint of each session says which life it leads. */
static bool start(struct work *work)
{
    struct world *world = &work->world;
    if (work->options.faulty != NULL) work->options.faulty->manifest_failed = false;
    work->open_status =
        world_open(world, work->options.disk, work->options.manifest, work->options.dir, NULL);
    if (work->open_status != KV_OK) return false;
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++) {
        const struct kv_session_id id = content_session(s);
        struct kv_session *session = kv_index_session_find(world->store->index, &id);
        work->sessions[s].known = session != NULL;
        work->sessions[s].life = ++work->sessions[s].lives;
        if (session == NULL || !world_load(world, session)) continue;
        struct kv_node *deepest = NULL;
        for (struct kv_node *node = kv_index_node_next(session, NULL); node != NULL;
             node = kv_index_node_next(session, node))
            if (deepest == NULL || node->tokens > deepest->tokens) deepest = node;
        session->head = deepest;
        const struct work_point *point = deepest == NULL ? NULL : work_find(work, s, &deepest->id);
        if (point != NULL) work->sessions[s].life = point->life;
    }
    return true;
}

static void finish(struct work *work)
{
    struct world *world = &work->world;
    work->stuck |= !world_settle(world);
    if (work->stuck) return;
    char why[SPACE_WHY_BYTES];
    uint32_t astray = 0;
    (void)world_page_records(world, &astray);
    /* After a failed record its pages may turn up at the next start and stay taken. */
    const bool failed = kv_manifest_stats(world->manifest).failed;
    bool even = space_is_even(world, failed, why);
    if (even && !failed && astray > 0) {
        even = false;
        (void)snprintf(why, sizeof(why), "places that segment records have otherwise: %u", astray);
    }
    if (!even && !work->uneven) {
        work->uneven = true;
        memcpy(work->uneven_why, why, sizeof(why));
    }
    work->read_only |= kv_ssd_usage(world->store->ssd).read_only;
    work->erased += kv_ssd_usage(world->store->ssd).pages_erased;
    world_close(world);
}

static void run(struct work *work)
{
    const struct work_options *options = &work->options;
    if (!start(work)) return;
    for (uint32_t round = 0; round < options->rounds && !work->stuck; round++) {
        if (round == options->rounds / 2) {
            finish(work);
            work->restarted = now(work);
            if (work->stuck || !start(work)) return;
        }
        const uint32_t steps = ex_random_between(&work->random, 1, 5);
        for (uint32_t i = 0; i < steps; i++) {
            step(work);
            for (uint32_t turns = ex_random_below(&work->random, 3); turns > 0; turns--)
                world_turn(&work->world);
        }
        if (ex_random_percent(&work->random, 50)) work->stuck |= !world_settle(&work->world);
    }
    if (!work->stuck) finish(work);
}

void work_run(struct work *work, const struct work_options *options)
{
    *work = (struct work){.options = *options, .random = {options->seed}};
    run(work);
}

/* Before all ticks of the new recorder, or never. */
static uint64_t carried(uint64_t tick, uint64_t cut)
{
    return tick < cut ? 0 : WORK_NEVER;
}

void work_resume(struct work *work, const struct work_options *options, const struct work *before,
                 uint64_t tick)
{
    *work = (struct work){.options = *options, .random = {options->seed}};
    memcpy(work->sessions, before->sessions, sizeof(work->sessions));
    memcpy(work->points, before->points, sizeof(work->points));
    work->point_count = before->point_count;
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++)
        work->sessions[s].busy = 0;
    for (uint32_t i = 0; i < work->point_count; i++) {
        struct work_point *point = &work->points[i];
        point->saved = carried(point->saved, tick);
        point->drop_begun = carried(point->drop_begun, tick);
        point->drop_durable = carried(point->drop_durable, tick);
    }
    run(work);
}
