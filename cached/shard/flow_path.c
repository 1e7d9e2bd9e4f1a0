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

static void path_lost(struct flow *flow, uint32_t page, kv_status status)
{
    flow_unpin_read(flow);
    if (status == KV_CORRUPT) shard_drop_page(flow->shard, flow->session, page);
    flow_fail(flow, KV_REASON_CHECKPOINT_NOT_FOUND, "checkpoint", NULL,
              status == KV_CORRUPT ? "CORRUPT" : "READ_FAILED");
    flow_finish(flow);
}

static void path_read(struct kv_read *read)
{
    struct flow *flow = KV_CONTAINER_OF(read, struct flow, read);
    struct kv_store *store = flow->shard->store;
    struct kv_digest chain = flow->session->user->root;
    const uint32_t tokens = flow->node->tokens;

    for (uint32_t k = 0; k < read->count; k++) {
        const uint32_t start = k * KV_PAGE_TOKENS;
        const uint32_t count = KV_MIN(KV_PAGE_TOKENS, tokens - start);
        const kv_status status = kv_store_read_check(read, k, &chain, NULL, 0);
        if (status != KV_OK) {
            path_lost(flow, flow->read_pages[k], status);
            return;
        }
        const uint8_t *bytes = kv_hbm_bytes(store->hbm, flow->read_slots[k]);
        for (uint32_t i = 0; i < count; i++)
            flow->ids[start + i] = kv_page_id(bytes, i);
        if (count == KV_PAGE_TOKENS) chain = kv_digest_next(&chain, flow->ids + start);
    }
    flow_unpin_read(flow);
    flow->ready(flow);
}

void resume_path_ids(struct flow *flow, struct kv_node *node, void (*ready)(struct flow *flow))
{
    struct kv_arena *arena = flow->req->arena;
    const uint32_t count = kv_pages_for(node->tokens);
    const struct live *live = flow->session->live;

    flow->ready = ready;
    flow->node = node;
    if (live != NULL && kv_index_is_ancestor(node, live->node)) {
        for (uint32_t t = 0; t < node->tokens; t++)
            flow->ids[t] = live->ids[t];
        ready(flow);
        return;
    }
    flow->read_pages = kv_arena_alloc(arena, sizeof(uint32_t) * count);
    flow->read_slots = kv_arena_alloc(arena, sizeof(uint32_t) * count);
    flow->read_fresh = kv_arena_alloc(arena, sizeof(bool) * count);
    if (flow->read_pages == NULL || flow->read_slots == NULL || flow->read_fresh == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    kv_index_path_pages(node, node->tokens, flow->read_pages);
    flow->read = (struct kv_read){.count = count,
                                  .pages = flow->read_pages,
                                  .slots = flow->read_slots,
                                  .fresh = flow->read_fresh,
                                  .done = path_read};
    (void)live_make_room(flow->shard, live, count);
    const kv_status status = kv_store_read_start(flow->shard->store, &flow->read);
    if (status != KV_OK && status != KV_MISS) {
        flow_fail(flow, KV_REASON_HBM_FULL, "hbm.bytes", NULL,
                  request_u64(flow->req, node->tokens));
        flow_finish(flow);
        return;
    }
    flow->read_count = count;
    if (status == KV_MISS) path_read(&flow->read);
}
