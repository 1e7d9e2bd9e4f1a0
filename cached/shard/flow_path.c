/*
 * The token ids of a stored path: for a prompt given as "parent checkpoint + new tokens", and for a
 * Decode on a head that is not in memory.
 *
 * Ids stand in the pages, so the path's pages are read and verified front to back, each against the
 * digest chain of the ids before it.  The resume that follows finds the pages in memory.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>

/* Other sessions may share the tree and drop some of it meanwhile: pages keep their entries, and
 * the node is not looked at again. */
static void let_pages_go(struct flow *flow)
{
    for (uint32_t k = 0; k < flow->read.count; k++)
        kv_index_page_unref(flow->shard->store->index, flow->read_pages[k]);
}

static void path_lost(struct flow *flow, uint32_t page, kv_status status)
{
    flow_unpin_read(flow);
    let_pages_go(flow);
    if (status == KV_CORRUPT && flow->session->tree->commits == 0)
        shard_drop_page(flow->shard, flow->session, page);
    flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND, "checkpoint", NULL,
              status == KV_CORRUPT ? "CORRUPT" : "READ_FAILED");
    flow_finish(flow);
}

/* A page is bound to the ids in all pages before it, so they are checked in order: as far as
 * they are there, while the others are on their way.  Stops at one that is not what it should be.
 */
static void path_advance(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    for (; flow->path_next < flow->read.count; flow->path_next++) {
        const uint32_t k = flow->path_next;
        const uint32_t start = k * KV_PAGE_TOKENS;
        const uint32_t count = KV_MIN(KV_PAGE_TOKENS, flow->path_tokens - start);
        if (!flow->path_there[k]) return;
        flow->path_status = kv_store_read_check(&flow->read, k, &flow->path_chain, NULL, 0);
        if (flow->path_status != KV_OK) return;
        const uint8_t *bytes = kv_hbm_bytes(store->hbm, flow->read_slots[k]);
        for (uint32_t i = 0; i < count; i++)
            flow->ids[start + i] = kv_page_id(bytes, i);
        if (count == KV_PAGE_TOKENS)
            flow->path_chain = kv_digest_next(&flow->path_chain, flow->ids + start);
    }
}

static void page_arrived(struct kv_read *read, uint32_t k)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    flow->path_there[k] = true;
    if (flow->path_status == KV_OK) path_advance(flow);
}

static void path_read(struct kv_read *read)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    /* What was in memory, and what never came: its check says that it could not be read. */
    for (uint32_t k = 0; k < read->count; k++)
        flow->path_there[k] = true;
    if (flow->path_status == KV_OK) path_advance(flow);
    if (flow->path_status != KV_OK) {
        path_lost(flow, flow->read_pages[flow->path_next], flow->path_status);
        return;
    }
    assert(flow->path_next == read->count);
    flow_unpin_read(flow);
    let_pages_go(flow);
    flow->ready(flow);
}

void resume_path_ids(struct flow *flow, struct kv_node *node, void (*ready)(struct flow *flow))
{
    struct kv_arena *arena = flow->req->arena;
    const uint32_t count = kv_pages_for(node->tokens);
    const struct live *live = flow->session->live;

    flow->ready = ready;
    flow->path_tokens = node->tokens;
    if (live != NULL && kv_index_is_ancestor(node, live->node)) {
        for (uint32_t t = 0; t < node->tokens; t++)
            flow->ids[t] = live->ids[t];
        ready(flow);
        return;
    }
    flow->read_pages = kv_arena_alloc(arena, sizeof(uint32_t) * count);
    flow->read_slots = kv_arena_alloc(arena, sizeof(uint32_t) * count);
    flow->read_fresh = kv_arena_alloc(arena, sizeof(bool) * count);
    flow->path_there = kv_arena_alloc(arena, sizeof(bool) * count);
    if (flow->read_pages == NULL || flow->read_slots == NULL || flow->read_fresh == NULL ||
        flow->path_there == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    kv_index_path_pages(node, node->tokens, flow->read_pages);
    flow->read = (struct kv_read){.count = count,
                                  .pages = flow->read_pages,
                                  .slots = flow->read_slots,
                                  .fresh = flow->read_fresh,
                                  .arrived = page_arrived,
                                  .done = path_read};
    flow->path_chain = flow->session->user->root;
    flow->path_next = 0;
    flow->path_status = KV_OK;
    (void)live_make_room(flow->shard, live, count);
    const kv_status status = kv_store_read_start(flow->shard->store, &flow->read);
    if (status != KV_OK && status != KV_MISS) {
        flow_fail(flow, KV_REASON_HBM_FULL, "hbm.bytes", flow_hbm_tokens(flow),
                  request_u64(flow->req, node->tokens));
        flow_finish(flow);
        return;
    }
    flow->read_count = count;
    for (uint32_t k = 0; k < count; k++) {
        kv_index_page_ref(flow->shard->store->index, flow->read_pages[k]);
        flow->path_there[k] = !flow->read_fresh[k];
    }
    if (status == KV_MISS) path_read(&flow->read);
}
