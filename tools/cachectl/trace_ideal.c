/*
 * Longest common prefix with everything a session has held.
 *
 * A prefix tree whose edges are slices of one token array.  Each turn adds only the tokens that are
 * new, so a session of 300 turns of 100,000 tokens costs its distinct tokens and not 30 million,
 * and matching reads each token of the prompt once.
 */

#include "tools/cachectl/trace_ideal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { ROOT = 0, NONE = 0 }; /* The root is nobody's child, so 0 can mean "no node". */

struct node {
    uint32_t first; /* The edge into this node: tokens[first .. first + count). */
    uint32_t count;
    uint32_t child;
    uint32_t sibling;
};

struct trace_ideal {
    uint32_t *tokens;
    uint32_t token_count;
    uint32_t token_capacity;
    struct node *nodes;
    uint32_t node_count;
    uint32_t node_capacity;
};

/* Where a walk down the tree stopped. */
struct spot {
    uint32_t node;
    uint32_t in_edge; /* Tokens of the node's edge that matched. */
    uint32_t depth;   /* Tokens matched in all. */
};

struct trace_ideal *trace_ideal_create(void)
{
    struct trace_ideal *ideal = calloc(1, sizeof(*ideal));
    if (ideal == NULL) return NULL;
    ideal->nodes = calloc(16, sizeof(*ideal->nodes));
    if (ideal->nodes == NULL) {
        free(ideal);
        return NULL;
    }
    ideal->node_capacity = 16;
    ideal->node_count = 1;
    return ideal;
}

void trace_ideal_destroy(struct trace_ideal *ideal)
{
    if (ideal == NULL) return;
    free(ideal->tokens);
    free(ideal->nodes);
    free(ideal);
}

static uint32_t child_with(const struct trace_ideal *ideal, uint32_t node, uint32_t token)
{
    uint32_t child = ideal->nodes[node].child;

    while (child != NONE && ideal->tokens[ideal->nodes[child].first] != token)
        child = ideal->nodes[child].sibling;
    return child;
}

static struct spot walk(const struct trace_ideal *ideal, struct spot from, const uint32_t *tokens,
                        uint32_t count)
{
    struct spot spot = from;

    for (uint32_t i = 0; i < count; i++) {
        if (spot.in_edge == ideal->nodes[spot.node].count) {
            const uint32_t child = child_with(ideal, spot.node, tokens[i]);
            if (child == NONE) return spot;
            spot.node = child;
            spot.in_edge = 1;
        } else {
            const struct node *node = &ideal->nodes[spot.node];
            if (ideal->tokens[node->first + spot.in_edge] != tokens[i]) return spot;
            spot.in_edge++;
        }
        spot.depth++;
    }
    return spot;
}

uint32_t trace_ideal_match(const struct trace_ideal *ideal, const uint32_t *tokens, uint32_t count)
{
    return walk(ideal, (struct spot){.node = ROOT}, tokens, count).depth;
}

static kv_status reserve(struct trace_ideal *ideal, uint64_t tokens)
{
    const uint64_t want = ideal->token_count + tokens;

    if (want > UINT32_MAX / 2) return KV_NOMEM;
    if (want > ideal->token_capacity) {
        uint32_t *bigger = realloc(ideal->tokens, 2 * want * sizeof(*bigger));
        if (bigger == NULL) return KV_NOMEM;
        ideal->tokens = bigger;
        ideal->token_capacity = (uint32_t)(2 * want);
    }
    /* A sequence that parts inside an edge needs two: the rest of the edge, and its own end. */
    if (ideal->node_count + 2 > ideal->node_capacity) {
        struct node *bigger = realloc(ideal->nodes, 2 * ideal->node_capacity * sizeof(*bigger));
        if (bigger == NULL) return KV_NOMEM;
        ideal->nodes = bigger;
        ideal->node_capacity *= 2;
    }
    return KV_OK;
}

/* Ends the spot's edge at the spot: what follows becomes a child. */
static void split(struct trace_ideal *ideal, struct spot spot)
{
    struct node *upper = &ideal->nodes[spot.node];
    const uint32_t lower = ideal->node_count++;

    assert(spot.in_edge > 0);
    assert(spot.in_edge < upper->count);
    ideal->nodes[lower] = (struct node){.first = upper->first + spot.in_edge,
                                        .count = upper->count - spot.in_edge,
                                        .child = upper->child};
    upper->count = spot.in_edge;
    upper->child = lower;
}

static void append(struct trace_ideal *ideal, const uint32_t *tokens, uint32_t count)
{
    if (count == 0) return;
    (void)memcpy(ideal->tokens + ideal->token_count, tokens, count * sizeof(*tokens));
    ideal->token_count += count;
}

kv_status trace_ideal_add(struct trace_ideal *ideal, const uint32_t *prompt, uint32_t prompt_count,
                          const uint32_t *answer, uint32_t answer_count)
{
    struct spot spot = walk(ideal, (struct spot){.node = ROOT}, prompt, prompt_count);
    if (spot.depth == prompt_count) spot = walk(ideal, spot, answer, answer_count);

    const uint64_t all = (uint64_t)prompt_count + answer_count;
    const uint64_t rest = all - spot.depth;
    if (rest == 0) return KV_OK; /* Held already. */
    const kv_status status = reserve(ideal, rest);
    if (status != KV_OK) return status;
    if (spot.in_edge < ideal->nodes[spot.node].count) split(ideal, spot);

    const uint32_t leaf = ideal->node_count++;
    ideal->nodes[leaf] = (struct node){.first = ideal->token_count,
                                       .count = (uint32_t)rest,
                                       .sibling = ideal->nodes[spot.node].child};
    ideal->nodes[spot.node].child = leaf;
    if (spot.depth < prompt_count) append(ideal, prompt + spot.depth, prompt_count - spot.depth);
    const uint32_t answered = spot.depth > prompt_count ? spot.depth - prompt_count : 0;
    append(ideal, answer + answered, answer_count - answered);
    return KV_OK;
}
