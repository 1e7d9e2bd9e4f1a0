/*
 * Live sessions: the shard's side of what the engine holds.
 *
 * A live session's page table lists an HBM slot per page, pinned while it stands there.  A page
 * that is also a page object of the index is shared and never written; the page the head is in
 * belongs to the table alone.  Going back into a shared page copies it.  When room runs out, idle
 * live sessions are the first to go: their rows are on SSD as far as the last checkpoint.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void page_drop(struct shard *shard, struct live *live, uint32_t k)
{
    struct live_page *entry = &live->pages[k];
    kv_hbm_unpin(shard->store->hbm, entry->slot);
    if (entry->page != KV_PAGE_INDEX_NONE) kv_index_page_unref(shard->store->index, entry->page);
    *entry = (struct live_page){KV_HBM_SLOT_NONE, KV_PAGE_INDEX_NONE};
    live->page_bytes[k] = NULL;
}

void live_clear(struct shard *shard, struct live *live)
{
    assert(!live->busy);
    live->turns++;
    for (uint32_t k = live->page_count; k-- > 0;)
        page_drop(shard, live, k);
    live_give_spare(shard, live);
    live->page_count = 0;
    live->chain_count = 0;
    live->node = NULL;
    live->branch = NULL;
    live->branch_at = 0;
    live->replay_count = 0;
    live->other_until = 0;
    live->has_logits = false;
    memset(&live->state, 0, sizeof(live->state));
    /* The log is the user's text: it does not outlive its use. */
    if (live->ids != NULL) explicit_bzero(live->ids, sizeof(*live->ids) * live->ids_capacity);
}

void live_give_spare(struct shard *shard, struct live *live)
{
    if (live->spare != KV_HBM_SLOT_NONE) kv_hbm_unpin(shard->store->hbm, live->spare);
    live->spare = KV_HBM_SLOT_NONE;
}

static void commit_forget_live(struct shard *shard, const struct live *live)
{
    for (struct commit *commit = shard->commits; commit != NULL; commit = commit->next) {
        if (commit->live == live) commit->live = NULL;
    }
}

void live_note_loss(struct live *live)
{
    const uint32_t saved = live->node == NULL ? 0 : live->node->tokens;
    if (live->state.tokens > saved) live->session->fell_back = true;
}

void live_release(struct shard *shard, struct live *live)
{
    if (live == NULL || live->session == NULL) return;
    commit_forget_live(shard, live);
    live_note_loss(live);
    live_clear(shard, live);
    free(live->ids);
    live->ids = NULL;
    live->ids_capacity = 0;
    live->session->live = NULL;
    live->session = NULL;
}

static struct live *least_recent_idle(struct shard *shard, const struct live *keep)
{
    struct live *victim = NULL;
    for (uint32_t i = 0; i < shard->live_count; i++) {
        struct live *live = &shard->lives[i];
        if (live->session == NULL || live->busy || live == keep) continue;
        if (live->session->busy != NULL) continue;
        if (victim == NULL || live->used_seq < victim->used_seq) victim = live;
    }
    return victim;
}

struct live *live_find(struct shard *shard)
{
    for (uint32_t i = 0; i < shard->live_count; i++) {
        struct live *live = &shard->lives[i];
        if (live->session == NULL && live->holder == NULL) return live;
    }
    struct live *victim = least_recent_idle(shard, NULL);
    if (victim == NULL) return NULL;
    shard->counters.live_evictions++;
    live_release(shard, victim);
    return victim;
}

void live_attach(struct shard *shard, struct live *live, struct kv_session *session)
{
    assert(live->session == NULL || live->session == session);
    assert(session->live == NULL || session->live == live);
    live->session = session;
    session->live = live;
    live->used_seq = ++shard->used_seq;
}

bool live_make_room(struct shard *shard, const struct live *keep, uint32_t slots)
{
    while (kv_hbm_available(shard->store->hbm) < slots) {
        struct live *victim = least_recent_idle(shard, keep);
        if (victim == NULL) return false;
        shard->counters.live_evictions++;
        live_release(shard, victim);
    }
    return true;
}

static kv_status table_reserve(struct live *live, uint32_t count)
{
    if (count <= live->page_capacity) return KV_OK;
    const uint32_t capacity = KV_MAX(count, KV_MAX(2 * live->page_capacity, 16u));
    struct live_page *pages = realloc(live->pages, capacity * sizeof(*pages));
    if (pages == NULL) return KV_NOMEM;
    live->pages = pages;
    uint8_t **bytes = realloc(live->page_bytes, capacity * sizeof(*bytes));
    if (bytes == NULL) return KV_NOMEM;
    live->page_bytes = bytes;
    live->page_capacity = capacity;
    return KV_OK;
}

static kv_status slot_alloc(struct shard *shard, const struct live *keep, uint32_t *ret_slot)
{
    if (!live_make_room(shard, keep, 1)) return KV_BUSY;
    return kv_hbm_alloc(shard->store->hbm, ret_slot);
}

static void table_add(struct shard *shard, struct live *live, uint32_t slot, uint32_t page)
{
    assert(live->page_count < live->page_capacity);
    live->pages[live->page_count] = (struct live_page){slot, page};
    live->page_bytes[live->page_count] = kv_hbm_bytes(shard->store->hbm, slot);
    live->page_count++;
}

kv_status live_install(struct shard *shard, struct live *live, const uint32_t *pages,
                       const uint32_t *slots, uint32_t count)
{
    assert(live->page_count == 0);
    const kv_status status = table_reserve(live, count);
    if (status != KV_OK) return status;
    for (uint32_t k = 0; k < count; k++) {
        kv_index_page_ref(shard->store->index, pages[k]);
        table_add(shard, live, slots[k], pages[k]);
    }
    return KV_OK;
}

void live_follow(struct live *live, struct kv_node *path, uint32_t tokens)
{
    live->branch = NULL;
    while (path != NULL && path->tokens > tokens) {
        live->branch = path;
        path = path->parent;
    }
    live->node = path;
    live->branch_at = tokens;
    if (tokens == (path == NULL ? 0 : path->tokens)) live->branch = NULL;
}

void live_back_to(struct live *live, uint32_t tokens)
{
    const uint32_t node_tokens = live->node == NULL ? 0 : live->node->tokens;
    if (node_tokens > tokens) {
        live_follow(live, live->node, tokens);
        return;
    }
    if (live->branch == NULL || live->branch_at <= tokens) return;
    live->branch_at = tokens; /* It leaves the same edge, earlier. */
    if (tokens == node_tokens) live->branch = NULL;
}

kv_status live_cut(struct shard *shard, struct live *live, uint32_t tokens)
{
    const uint32_t keep = kv_pages_for(tokens);
    assert(keep <= live->page_count);
    while (live->page_count > keep)
        page_drop(shard, live, --live->page_count);
    live->chain_count = KV_MIN(live->chain_count, tokens / KV_PAGE_TOKENS + 1);

    if (tokens % KV_PAGE_TOKENS == 0) return KV_OK;
    const uint32_t k = keep - 1;
    if (live->pages[k].page == KV_PAGE_INDEX_NONE) return KV_OK;
    uint32_t slot;
    const kv_status status = slot_alloc(shard, live, &slot);
    if (status != KV_OK) return status;
    uint8_t *bytes = kv_hbm_bytes(shard->store->hbm, slot);
    memcpy(bytes, live->page_bytes[k], shard->layout->page_bytes);
    kv_page_clear_after(shard->layout, bytes, tokens % KV_PAGE_TOKENS);
    page_drop(shard, live, k);
    live->pages[k] = (struct live_page){slot, KV_PAGE_INDEX_NONE};
    live->page_bytes[k] = bytes;
    return KV_OK;
}

kv_status live_extend(struct shard *shard, struct live *live, uint32_t tokens)
{
    const uint32_t want = kv_pages_for(tokens);
    kv_status status = table_reserve(live, want);
    if (status != KV_OK) return status;
    if (want > live->page_count && !live_make_room(shard, live, want - live->page_count))
        return KV_BUSY;
    while (live->page_count < want) {
        uint32_t slot;
        status = slot_alloc(shard, live, &slot);
        if (status != KV_OK) return status;
        table_add(shard, live, slot, KV_PAGE_INDEX_NONE);
    }
    return live->spare != KV_HBM_SLOT_NONE ? KV_OK : slot_alloc(shard, live, &live->spare);
}

kv_status live_reserve_ids(struct live *live, uint32_t tokens)
{
    if (tokens <= live->ids_capacity) return KV_OK;
    const uint32_t capacity = KV_MAX(tokens, KV_MIN(2 * live->ids_capacity, KV_PROMPT_TOKENS_MAX));
    uint32_t *ids = calloc(capacity, sizeof(*ids));
    if (ids == NULL) return KV_NOMEM;
    if (live->ids != NULL) {
        memcpy(ids, live->ids, sizeof(*ids) * live->ids_capacity);
        explicit_bzero(live->ids, sizeof(*ids) * live->ids_capacity);
        free(live->ids);
    }
    live->ids = ids;
    live->ids_capacity = capacity;
    return KV_OK;
}

kv_status live_chain(struct live *live, uint32_t tokens)
{
    const uint32_t want = tokens / KV_PAGE_TOKENS + 1;
    if (want > live->chain_capacity) {
        const uint32_t capacity = KV_MAX(want, 2 * live->chain_capacity);
        struct kv_digest *chain = realloc(live->chain, capacity * sizeof(*chain));
        if (chain == NULL) return KV_NOMEM;
        live->chain = chain;
        live->chain_capacity = capacity;
    }
    if (live->chain_count == 0) {
        live->chain[0] = live->session->user->root;
        live->chain_count = 1;
    }
    while (live->chain_count < want) {
        const uint32_t k = live->chain_count - 1;
        live->chain[k + 1] =
            kv_digest_next(&live->chain[k], live->ids + (size_t)k * KV_PAGE_TOKENS);
        live->chain_count++;
    }
    return KV_OK;
}

uint64_t live_kernels_at(const struct shard *shard, const struct live *live, uint32_t tokens)
{
    if (tokens > live->other_until) return shard->store->options.kernels_made;
    if (live->node != NULL && tokens <= live->node->tokens)
        return kv_index_kernels_at(live->node, tokens);
    if (live->branch != NULL && tokens <= live->branch_at)
        return kv_index_kernels_at(live->branch, tokens);
    return KV_KERNELS_UNKNOWN; /* Its checkpoint is gone. */
}

uint32_t live_unmarked(const struct live *live)
{
    uint32_t tokens = live->state.tokens;
    if (live->other_until > 0) return 0;
    if (live->node != NULL) tokens = KV_MIN(tokens, live->node->approx_from);
    if (live->replay_count > 0) tokens = KV_MIN(tokens, live->replays[0]);
    return tokens;
}

void live_fall_back(struct live *live, struct kv_node *node)
{
    uint32_t replays[KV_REPLAYS_MAX];
    const uint32_t from = node == NULL ? 0 : node->tokens;
    const uint32_t count = live_replays(live, from, UINT32_MAX, replays, KV_REPLAYS_MAX);
    live->node = node;
    live->replay_count = KV_MIN(count, KV_REPLAYS_MAX);
    memcpy(live->replays, replays, sizeof(*replays) * live->replay_count);
}

uint32_t live_replays(const struct live *live, uint32_t from, uint32_t below, uint32_t *out,
                      uint32_t max)
{
    uint32_t count = kv_index_replays(live->node, from, below, out, max);
    for (uint32_t i = 0; i < live->replay_count; i++) {
        if (live->replays[i] < from || live->replays[i] >= below) continue;
        if (count < max) out[count] = live->replays[i];
        count++;
    }
    return count;
}
