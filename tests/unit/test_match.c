/*
 * Matching a prompt against a tree of checkpoints.
 *
 * Goal: for random trees and random prompts the rows found are the longest common prefix with any
 * stored history, wherever the prompt leaves it; plus the named cases: expired, foreign, two nodes
 * with the same tokens and other marks.
 * Method: histories are token arrays kept beside the tree; the answer is compared with a plain
 * search over them.  Pages hold ids only.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"
#include "kvstore/index/match.h"
#include "tests/harness.h"

#include <stdlib.h>
#include <string.h>

#define TOKENS_MAX 700u
#define NODES_MAX 24u

struct world {
    struct kv_index *index;
    struct kv_session *session;
    struct kv_digest root;
    struct kv_node *nodes[NODES_MAX];
    uint32_t ids[NODES_MAX][TOKENS_MAX]; /* History of each node. */
    uint32_t node_count;
    uint8_t *page_bytes[4096];
    uint64_t random;
};

static uint32_t next_random(struct world *world, uint32_t below)
{
    world->random = world->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(world->random >> 33) % below;
}

static void world_init(struct world *world, uint64_t seed)
{
    struct kv_error err;
    const struct kv_index_options options = {
        .bytes = 4u << 20, .kernels = kv_kernels_tag("fp32"), .sessions_max = 8};
    const struct kv_user_id user_id = kv_user_id_of("u");
    memset(world, 0, sizeof(*world));
    world->random = seed;
    EXPECT(kv_index_create(&options, &world->index, &err) == KV_OK);
    struct kv_user *user = kv_index_user_add(world->index, &user_id, NULL);
    const struct kv_session_id id = kv_session_id_of(&user_id, "s");
    world->session = kv_index_session_add(world->index, &id, user, "s", "");
    world->session->ttl_ms = 1000;
    world->root = user->root;
}

static void world_fini(struct world *world)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(world->page_bytes); i++)
        free(world->page_bytes[i]);
    kv_index_destroy(world->index);
}

static uint32_t make_page(struct world *world, const struct kv_digest *chain, const uint32_t *ids,
                          uint32_t position, uint32_t count)
{
    const uint32_t page = kv_index_page_add(world->index, world->session);
    struct kv_page *object = kv_index_page(world->index, page);
    object->position = position;
    object->count = count;
    object->tag = kv_load64(chain->bytes);
    world->page_bytes[page] = calloc(1, KV_PAGE_ROWS_OFFSET);
    for (uint32_t i = 0; i < count; i++)
        kv_page_set_id(world->page_bytes[page], i, ids[position + i]);
    return page;
}

/* A checkpoint of `tokens` tokens of ids under parent, with pages of its own. */
static struct kv_node *add_node(struct world *world, struct kv_node *parent, const uint32_t *ids,
                                uint32_t tokens)
{
    struct kv_digest chain[TOKENS_MAX / KV_PAGE_TOKENS + 1];
    uint32_t pages[TOKENS_MAX / KV_PAGE_TOKENS + 1];
    const uint32_t first = (parent == NULL ? 0 : parent->tokens) / KV_PAGE_TOKENS;
    kv_match_chain(&world->root, ids, tokens, chain);
    uint32_t count = 0;
    for (uint32_t k = first; k < kv_pages_for(tokens); k++)
        pages[count++] = make_page(world, &chain[k], ids, k * KV_PAGE_TOKENS,
                                   KV_MIN(KV_PAGE_TOKENS, tokens - k * KV_PAGE_TOKENS));
    struct kv_node *node =
        kv_index_node_add(world->index, world->session, parent, tokens, pages, count);
    const uint32_t k = tokens / KV_PAGE_TOKENS;
    node->digest = kv_digest_at(&chain[k], tokens, ids + k * KV_PAGE_TOKENS);
    memcpy(node->id.bytes, node->digest.bytes, 16);
    node->id.bytes[0] ^= (uint8_t)world->node_count; /* Same tokens, other id. */
    memcpy(world->ids[world->node_count], ids, sizeof(*ids) * tokens);
    world->nodes[world->node_count++] = node;
    return node;
}

static uint32_t run(struct world *world, struct kv_match *match, const uint32_t *ids,
                    uint32_t count, struct kv_digest *chain, struct kv_node **ret_source,
                    uint32_t *ret_diverged)
{
    kv_match_chain(&world->root, ids, count, chain);
    *match = (struct kv_match){.ids = ids, .count = count, .chain = chain};
    kv_match_run(match, world->index, world->session, 0);
    for (uint32_t i = 0; i < match->probe_count; i++) {
        struct kv_match_probe *probe = &match->probes[i];
        if (!probe->resolved)
            kv_match_resolve(match, probe, kv_index_page(world->index, probe->page),
                             world->page_bytes[probe->page]);
    }
    return kv_match_rows(match, ret_source, ret_diverged);
}

static uint32_t longest(const struct world *world, const uint32_t *ids, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < world->node_count; i++) {
        const uint32_t limit = KV_MIN(count, world->nodes[i]->tokens);
        uint32_t t = 0;
        while (t < limit && world->ids[i][t] == ids[t])
            t++;
        best = KV_MAX(best, t);
    }
    return best;
}

/* A history that leaves a random node's at a random position. */
static uint32_t random_history(struct world *world, uint32_t *ids, struct kv_node **ret_parent)
{
    uint32_t keep = 0;
    struct kv_node *parent = NULL;
    if (world->node_count > 0 && next_random(world, 8) != 0) {
        const uint32_t from = next_random(world, world->node_count);
        parent = world->nodes[from];
        keep = next_random(world, 3) == 0 ? parent->tokens : next_random(world, parent->tokens + 1);
        memcpy(ids, world->ids[from], sizeof(*ids) * keep);
    }
    const uint32_t more = 1 + next_random(world, 200);
    const uint32_t tokens = KV_MIN(TOKENS_MAX, keep + more);
    for (uint32_t t = keep; t < tokens; t++)
        ids[t] = next_random(world, 500);
    *ret_parent = kv_index_ancestor(parent, KV_MIN(keep, tokens - 1));
    return tokens;
}

static void test_rows_are_the_longest_common_prefix(uint64_t seed)
{
    struct world *world = malloc(sizeof(*world));
    struct kv_digest chain[TOKENS_MAX / KV_PAGE_TOKENS + 1];
    world_init(world, seed);
    for (uint32_t step = 0; step < 60; step++) {
        uint32_t ids[TOKENS_MAX];
        struct kv_node *parent, *source;
        struct kv_match match;
        uint32_t diverged;
        const uint32_t tokens = random_history(world, ids, &parent);
        const uint32_t want = longest(world, ids, tokens);
        const uint32_t got = run(world, &match, ids, tokens, chain, &source, &diverged);
        EXPECT_EQ_U32(got, want);
        EXPECT((source == NULL) == (got == 0));
        if (source != NULL) EXPECT(source->tokens >= got);
        if (diverged != UINT32_MAX) EXPECT_EQ_U32(diverged, want);
        if (world->node_count < NODES_MAX && next_random(world, 2) == 0)
            (void)add_node(world, parent, ids, tokens);
    }
    world_fini(world);
    free(world);
}

static void test_marks_and_strangers(void)
{
    struct world *world = malloc(sizeof(*world));
    struct kv_digest chain[4];
    struct kv_match match;
    struct kv_node *source;
    uint32_t ids[200], diverged;
    world_init(world, 1);
    for (uint32_t t = 0; t < 200; t++)
        ids[t] = t;
    struct kv_node *marked = add_node(world, NULL, ids, 150);
    struct kv_node *plain = add_node(world, NULL, ids, 150);
    kv_index_node_mark(marked, &(uint32_t){140}, 1);
    EXPECT_EQ_U32(run(world, &match, ids, 200, chain, &source, &diverged), 150);
    EXPECT(source == plain); /* The unmarked of two with the same tokens. */
    EXPECT_EQ_U32(diverged, UINT32_MAX);

    /* Computed by other kernels is worse than either, and what it means for a part of an edge. */
    plain->kernels = kv_kernels_tag("other");
    kv_index_node_mark(marked, NULL, 0);
    EXPECT_EQ_U32(run(world, &match, ids, 200, chain, &source, &diverged), 150);
    EXPECT(source == marked);
    EXPECT_EQ_U32(run(world, &match, ids, 140, chain, &source, &diverged), 140);
    EXPECT(source == marked);
    marked->kernels = plain->kernels;
    plain->kernels = kv_index_kernels(world->index);
    EXPECT_EQ_U32(run(world, &match, ids, 140, chain, &source, &diverged), 140);
    EXPECT(source == plain);
    struct kv_node *child = add_node(world, marked, ids, 180);
    EXPECT_EQ_U64(kv_index_kernels_at(child, 180), kv_index_kernels(world->index));
    EXPECT_EQ_U64(kv_index_kernels_at(child, 151), kv_index_kernels(world->index));
    EXPECT_EQ_U64(kv_index_kernels_at(child, 150), kv_kernels_tag("other"));
    kv_index_node_remove(world->index, child);
    marked->kernels = plain->kernels;
    kv_index_node_mark(marked, &(uint32_t){140}, 1);

    plain->foreign = true;
    EXPECT_EQ_U32(run(world, &match, ids, 200, chain, &source, &diverged), 150);
    EXPECT(source == marked && match.foreign_seen);
    marked->used_ms = 5;
    marked->foreign = false;
    kv_match_chain(&world->root, ids, 200, chain);
    match = (struct kv_match){.ids = ids, .count = 200, .chain = chain};
    kv_match_run(&match, world->index, world->session, 5000);
    EXPECT(match.expired_seen && !match.any_seen && match.node == NULL);

    marked->kernels = kv_kernels_tag("other");
    const struct kv_node *upper = kv_index_node_split(world->index, marked, 100);
    EXPECT_EQ_U64(upper->kernels, kv_kernels_tag("other"));
    world_fini(world);
    free(world);
}

static void test_window_reason(void)
{
    struct kv_node child = {.tokens = 100}, parent = {.tokens = 60};
    child.parent = &parent;
    child.image.lost = KV_REASON_EXPIRED;
    parent.image.lost = KV_REASON_CAPACITY;
    const struct kv_layout layout = {.window_tokens = 16, .spare_tokens = 4};
    EXPECT(kv_match_window_reason(&layout, &child, 100, true) == KV_REASON_EXPIRED);
    EXPECT(kv_match_window_reason(&layout, &child, 96, true) == KV_REASON_EXPIRED);
    EXPECT(kv_match_window_reason(&layout, &child, 95, true) == KV_REASON_DIVERGED);
    EXPECT(kv_match_window_reason(&layout, &child, 70, true) == KV_REASON_CAPACITY);
    EXPECT(kv_match_window_reason(&layout, &child, 90, true) == KV_REASON_DIVERGED);
    EXPECT(kv_match_window_reason(&layout, &child, 90, false) == KV_REASON_NEVER_STORED);
    EXPECT(kv_match_window_reason(&layout, NULL, 90, true) == KV_REASON_DIVERGED);
    parent.image.lost = KV_REASON_DIVERGED; /* Made by cutting an edge. */
    EXPECT(kv_match_window_reason(&layout, &child, 70, false) == KV_REASON_NEVER_STORED);
}

int main(void)
{
    for (uint64_t seed = 1; seed <= harness_count(60); seed++)
        test_rows_are_the_longest_common_prefix(seed);
    test_marks_and_strangers();
    test_window_reason();
    HARNESS_END();
}
