/*
 * Where a prompt joins the stored history.
 *
 * The walk compares one salted digest per node and, inside an edge that does not match whole, the
 * chain tags of its pages: the last page whose tag agrees is where the prompt leaves.  Tags are 8
 * bytes; a false agreement costs a look into a page whose ids then disagree, never a wrong hit,
 * because ids are compared before any row is used.
 */

#include "kvstore/index/match.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>
#include <string.h>

void kv_match_chain(const struct kv_digest *root, const uint32_t *ids, uint32_t count,
                    struct kv_digest *ret_chain)
{
    ret_chain[0] = *root;
    for (uint32_t k = 0; k < count / KV_PAGE_TOKENS; k++)
        ret_chain[k + 1] = kv_digest_next(&ret_chain[k], ids + (size_t)k * KV_PAGE_TOKENS);
}

static bool node_matches(const struct kv_match *match, const struct kv_node *node)
{
    if (node->tokens > match->count) return false;
    const uint32_t k = node->tokens / KV_PAGE_TOKENS;
    const struct kv_digest want =
        kv_digest_at(&match->chain[k], node->tokens, match->ids + (size_t)k * KV_PAGE_TOKENS);
    return memcmp(want.bytes, node->digest.bytes, sizeof(want.bytes)) == 0;
}

/* How much of the first `tokens` of the path to node counts. */
static uint32_t counted(const struct kv_match *match, const struct kv_node *node, uint32_t tokens)
{
    if (!match->unmarked_only) return tokens;
    uint32_t limit = KV_MIN(tokens, node->approx_from);
    for (; node != NULL; node = node->parent) {
        if (node->kernels == match->kernels) continue;
        limit = KV_MIN(limit, node->parent == NULL ? 0 : node->parent->tokens);
    }
    return limit;
}

/* Longest, then of our own kernels, then the one with fewer clipped replays. */
static bool node_better(const struct kv_match *match, const struct kv_node *a,
                        const struct kv_node *b)
{
    if (b == NULL) return true;
    const uint32_t a_tokens = counted(match, a, a->tokens);
    const uint32_t b_tokens = counted(match, b, b->tokens);
    if (a_tokens != b_tokens) return a_tokens > b_tokens;
    const bool ours = a->kernels == match->kernels;
    if (ours != (b->kernels == match->kernels)) return ours;
    return a->replay_total < b->replay_total;
}

/* Forgets what cannot reach what is known already: almost all branches leave in an earlier page. */
static void probes_prune(struct kv_match *match)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < match->probe_count; i++) {
        if ((uint64_t)match->probes[i].upper + match->reach >= match->sure)
            match->probes[kept++] = match->probes[i];
    }
    match->probe_count = kept;
}

/* Reaches less far; as far but used longer ago. */
static bool probe_worse(const struct kv_match_probe *a, const struct kv_match_probe *b)
{
    if (a->upper != b->upper) return a->upper < b->upper;
    return a->node->used_ms < b->node->used_ms;
}

static void probe_add(struct kv_match *match, const struct kv_match_probe *probe)
{
    match->sure = KV_MAX(match->sure, counted(match, probe->node, probe->lower));
    if ((uint64_t)probe->upper + match->reach < match->sure) return;
    if (match->probe_count == KV_MATCH_PROBES_MAX) probes_prune(match);
    if (match->probe_count < KV_MATCH_PROBES_MAX) {
        match->probes[match->probe_count++] = *probe;
        return;
    }
    uint32_t worst = 0;
    for (uint32_t i = 1; i < match->probe_count; i++) {
        if (probe_worse(&match->probes[i], &match->probes[worst])) worst = i;
    }
    if (probe_worse(&match->probes[worst], probe)) match->probes[worst] = *probe;
}

static void window_add(struct kv_match *match, struct kv_node *node)
{
    if (node->image.slot == KV_POOL_SLOT_NONE) return;
    if (match->window_count < KV_MATCH_WINDOWS_MAX) {
        match->windows[match->window_count++] = node;
        return;
    }
    uint32_t lowest = 0;
    for (uint32_t i = 1; i < match->window_count; i++) {
        if (match->windows[i]->tokens < match->windows[lowest]->tokens) lowest = i;
    }
    if (node->tokens > match->windows[lowest]->tokens) match->windows[lowest] = node;
}

/* The page of node's edge in which the prompt leaves it. Pages of the edge are asked from the last
 * to the first: their tags name all tokens before them. */
static void edge_probe(struct kv_match *match, struct kv_index *index, struct kv_node *node)
{
    const uint32_t parent_tokens = node->parent == NULL ? 0 : node->parent->tokens;
    const uint32_t first = parent_tokens / KV_PAGE_TOKENS;
    for (uint32_t i = node->page_count; i-- > 0;) {
        const uint32_t k = first + i;
        if ((uint64_t)k * KV_PAGE_TOKENS > match->count) continue;
        if (kv_index_page(index, node->pages[i])->tag != kv_load64(match->chain[k].bytes)) continue;
        const uint32_t start = k * KV_PAGE_TOKENS;
        const uint32_t limit = KV_MIN(match->count, node->tokens);
        struct kv_match_probe probe = {
            .node = node,
            .page = node->pages[i],
            .lower = KV_MAX(start, parent_tokens),
            .upper = KV_MIN(limit, start + KV_PAGE_TOKENS),
        };
        if (probe.lower >= probe.upper) {
            /* Nothing of the page is in question: the prompt ends, or leaves, at its start. */
            probe.resolved = true;
            probe.share = KV_MIN(probe.lower, limit);
        }
        probe_add(match, &probe);
        return;
    }
}

void kv_match_run(struct kv_match *match, struct kv_index *index, struct kv_session *session,
                  uint64_t now_ms)
{
    struct kv_node *node = session->tree->roots;

    match->kernels = kv_index_kernels(index);
    match->node = NULL;
    match->sure = 0;
    match->probe_count = 0;
    match->window_count = 0;
    while (node != NULL) {
        bool inside = false;
        if (node->foreign) {
            match->foreign_seen = true;
        } else if (kv_index_expired(node, now_ms)) {
            /* Descendants were used no later, but those of a fork may live longer. */
            match->expired_seen = true;
            inside = session->tree->session_count > 1 && node_matches(match, node);
        } else {
            match->any_seen = true;
            inside = node_matches(match, node);
            if (inside && node_better(match, node, match->node)) match->node = node;
            if (inside) match->whole = KV_MAX(match->whole, node->tokens);
            if (inside) match->sure = KV_MAX(match->sure, counted(match, node, node->tokens));
            if (inside) window_add(match, node);
            if (!inside) edge_probe(match, index, node);
        }
        /* Only below a node that matched whole can anything longer stand. */
        if (inside && node->child != NULL) {
            node = node->child;
            continue;
        }
        while (node != NULL && node->sibling == NULL)
            node = node->parent;
        if (node != NULL) node = node->sibling;
    }
    probes_prune(match);
}

void kv_match_resolve(struct kv_match *match, struct kv_match_probe *probe,
                      const struct kv_page *object, const uint8_t *page_bytes)
{
    assert(!probe->resolved);
    probe->resolved = true;
    probe->share = probe->lower;
    if (page_bytes == NULL) return;
    const uint32_t limit = KV_MIN(probe->upper, object->position + object->count);
    for (uint32_t t = object->position; t < limit; t++) {
        if (kv_page_id(page_bytes, t - object->position) != match->ids[t]) {
            /* Below `lower` the digests agreed. */
            probe->share = KV_MAX(t, probe->lower);
            return;
        }
    }
    probe->share = limit;
}

static bool is_marked(const struct kv_match *match, const struct kv_node *node, uint32_t tokens)
{
    if (node->approx_from < tokens) return true;
    return tokens > 0 && kv_index_kernels_at(node, tokens) != match->kernels;
}

/* Longer, or as long without a mark below its end. */
static bool rows_better(const struct kv_match *match, const struct kv_node *node, uint32_t share,
                        const struct kv_node *best, uint32_t tokens)
{
    if (share != tokens) return share > tokens;
    if (best == NULL) return true;
    return !is_marked(match, node, share) && is_marked(match, best, share);
}

uint32_t kv_match_rows(const struct kv_match *match, struct kv_node **ret_source,
                       uint32_t *ret_diverged)
{
    struct kv_node *source = match->node;
    uint32_t tokens = source == NULL ? 0 : counted(match, source, source->tokens);
    uint32_t diverged = UINT32_MAX;
    bool goes_on = false; /* Something stored holds the whole prompt. */

    for (uint32_t i = 0; i < match->probe_count; i++) {
        const struct kv_match_probe *probe = &match->probes[i];
        assert(probe->resolved);
        const uint32_t share = counted(match, probe->node, probe->share);
        if (rows_better(match, probe->node, share, source, tokens)) {
            tokens = share;
            source = probe->node;
        }
        if (probe->share >= KV_MIN(match->count, probe->node->tokens)) goes_on = true;
    }
    if (tokens < match->count && !goes_on && match->any_seen) {
        /* A prompt that extends its last checkpoint does not diverge; one that leaves an edge, or
         * a node that has other children, does. */
        for (uint32_t i = 0; i < match->probe_count; i++) {
            if (match->probes[i].share == tokens) diverged = tokens;
        }
    }
    *ret_source = tokens == 0 ? NULL : source;
    *ret_diverged = diverged;
    return tokens;
}

/* As far as another one: of our own kernels, then with fewer clipped replays. */
static bool window_better(const struct kv_match *match, const struct kv_node *node,
                          const struct kv_node *best, uint32_t cut)
{
    const bool ours = kv_index_kernels_at(node, cut) == match->kernels;
    if (ours != (kv_index_kernels_at(best, cut) == match->kernels)) return ours;
    return node->replay_total < best->replay_total;
}

static void window_consider(const struct kv_layout *layout, struct kv_pool *pool, uint64_t now_ns,
                            const struct kv_match *match, struct kv_node *node, uint32_t share,
                            uint32_t *best, struct kv_node **best_node)
{
    if (share == 0 || !kv_pool_has(pool, &node->image, now_ns)) return;
    const uint32_t cut = kv_image_cut(layout, &node->image_state, share);
    if (cut == 0 || cut < *best || counted(match, node, cut) < cut) return;
    if (cut > *best || (*best_node != NULL && window_better(match, node, *best_node, cut))) {
        *best = cut;
        *best_node = node;
    }
}

/* Nodes below `top` (itself included) that stand within the spare rows above `share`. */
static void window_below(const struct kv_layout *layout, struct kv_pool *pool, uint64_t now_ns,
                         const struct kv_match *match, struct kv_node *top, uint32_t share,
                         uint32_t *best, struct kv_node **best_node)
{
    const uint64_t reach = (uint64_t)share + layout->spare_tokens;
    struct kv_node *node = top;
    while (node != NULL) {
        const bool near = node->tokens <= reach;
        if (near) window_consider(layout, pool, now_ns, match, node, share, best, best_node);
        if (near && node->child != NULL) {
            node = node->child;
            continue;
        }
        while (node != top && node->sibling == NULL)
            node = node->parent;
        node = node == top ? NULL : node->sibling;
    }
}

uint32_t kv_match_window(const struct kv_match *match, const struct kv_layout *layout,
                         struct kv_pool *pool, uint64_t now_ns, struct kv_node **ret_node)
{
    const uint32_t most = match->count - 1; /* There must be logits to sample from. */
    uint32_t best = 0;
    *ret_node = NULL;

    for (uint32_t i = 0; i < match->window_count; i++) {
        struct kv_node *node = match->windows[i];
        window_consider(layout, pool, now_ns, match, node, KV_MIN(node->tokens, most), &best,
                        ret_node);
    }
    for (uint32_t i = 0; i < match->probe_count; i++) {
        const struct kv_match_probe *probe = &match->probes[i];
        window_below(layout, pool, now_ns, match, probe->node, KV_MIN(probe->share, most), &best,
                     ret_node);
    }
    return best;
}

bool kv_match_window_near(const struct kv_match_probe *probe, const struct kv_layout *layout,
                          struct kv_pool *pool, uint64_t now_ns)
{
    const struct kv_match any = {.kernels = probe->node->kernels};
    struct kv_node *node = NULL;
    uint32_t best = 0;
    window_below(layout, pool, now_ns, &any, probe->node, probe->upper, &best, &node);
    return best > 0;
}

enum kv_reason kv_match_window_reason(const struct kv_layout *layout, const struct kv_node *source,
                                      uint32_t tokens, bool diverged)
{
    for (const struct kv_node *node = source; node != NULL; node = node->parent) {
        if (node->tokens > (uint64_t)tokens + layout->spare_tokens) continue;
        if ((uint64_t)node->tokens + layout->window_tokens < tokens) break;
        if (node->image.lost == KV_REASON_DIVERGED) continue; /* A cut edge never had one. */
        return node->image.lost == KV_REASON_NONE ? KV_REASON_NEVER_STORED : node->image.lost;
    }
    return diverged ? KV_REASON_DIVERGED : KV_REASON_NEVER_STORED;
}
