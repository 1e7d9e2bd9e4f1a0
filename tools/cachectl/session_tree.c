/*
 * The tree of a session's checkpoints, and of what its forks made, drawn like a graph of commits.
 *
 * Plain ASCII, oldest first: a line of only children stays in one column, so a session of 300 turns
 * is 300 short lines; side branches are indented.  A line fits 80 columns as long as few branches
 * are open; nothing is cut and nothing depends on the terminal, so a pipe gets the same.
 */

#include "tools/cachectl/session_tree.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/out.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef Cached__Session__V1__CheckpointInfo checkpoint_info;
typedef Cached__Session__V1__GetSessionResponse session_answer;

/* Relatives are found by comparing ids: a session has a few hundred checkpoints. */
struct tree {
    const session_answer *answer;
    bool *on_head_path; /* One per checkpoint: at or above the head. */
    bool details;
    char bars[64]; /* Two per open column. */
};

static bool same_id(const ProtobufCBinaryData *a, const ProtobufCBinaryData *b)
{
    return a->len > 0 && a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

/* SIZE_MAX: not listed (any more). */
static size_t find(const session_answer *answer, const ProtobufCBinaryData *id)
{
    for (size_t i = 0; i < answer->n_checkpoints; i++) {
        if (same_id(&answer->checkpoints[i]->id, id)) return i;
    }
    return SIZE_MAX;
}

static void print_details(const session_answer *answer, const checkpoint_info *node)
{
    const size_t parent = find(answer, &node->parent_id);
    const uint32_t from = parent == SIZE_MAX ? 0 : answer->checkpoints[parent]->position;
    char bytes[OUT_TEXT_BYTES], age[OUT_TEXT_BYTES], ttl[OUT_TEXT_BYTES];
    (void)printf("  +%u tokens  %s  %s", node->position - KV_MIN(from, node->position),
                 out_bytes(bytes, node->bytes), level_name(node->rows_level));
    (void)printf("  age %s  ttl %s", out_duration(age, node->age_ms),
                 out_duration(ttl, node->rows_expire_ms));
    if (node->session_id[0]) (void)printf("  by %s", node->session_id);
}

static void print_heads(const session_answer *answer, const checkpoint_info *node)
{
    if (same_id(&answer->head_checkpoint_id, &node->id)) (void)printf("  <- head");
    for (size_t i = 0; i < answer->n_heads; i++)
        if (same_id(&answer->heads[i]->checkpoint_id, &node->id))
            (void)printf("  <- head of %s", answer->heads[i]->session_id);
}

static void print_node(const struct tree *tree, size_t column, size_t index)
{
    const checkpoint_info *node = tree->answer->checkpoints[index];
    char id[OUT_TEXT_BYTES];

    (void)printf("%.*s* %u  %s  %s", (int)column * 2, tree->bars, node->position,
                 checkpoint_kind_name(node->kind),
                 out_hex(id, node->id.data, KV_MIN(node->id.len, 4)));
    if (tree->details) print_details(tree->answer, node);
    if (node->window_level == CACHED__SESSION__V1__LEVEL__LEVEL_RAM) (void)printf("  window");
    print_heads(tree->answer, node);
    (void)printf("\n");
}

static bool is_child(const session_answer *answer, size_t child, size_t parent)
{
    const ProtobufCBinaryData *id = &answer->checkpoints[child]->parent_id;
    if (parent == SIZE_MAX) return find(answer, id) == SIZE_MAX;
    return same_id(id, &answer->checkpoints[parent]->id);
}

/* The child that stays in its parent's column: the one towards the head, else the last listed. */
static size_t main_child(const struct tree *tree, size_t parent)
{
    size_t found = SIZE_MAX;

    for (size_t i = 0; i < tree->answer->n_checkpoints; i++) {
        if (!is_child(tree->answer, i, parent)) continue;
        found = i;
        if (tree->on_head_path[i]) break;
    }
    return found;
}

/* Draws what hangs below `parent` (SIZE_MAX: the start) in `column`.  Recursion is one level a side
 * branch, and bounded: branches that would not fit on the screen are left out. */
static void print_below(struct tree *tree, size_t column, size_t parent)
{
    const session_answer *answer = tree->answer;

    for (;;) {
        const size_t last = main_child(tree, parent);
        if (last == SIZE_MAX) return;
        for (size_t i = 0; i < answer->n_checkpoints; i++) {
            if (i == last || !is_child(answer, i, parent)) continue;
            if ((column + 1) * 2 >= sizeof(tree->bars)) continue;
            (void)printf("%.*s|\\\n", (int)column * 2, tree->bars);
            memcpy(tree->bars + 2 * column, "| ", 2);
            print_node(tree, column + 1, i);
            print_below(tree, column + 1, i);
        }
        print_node(tree, column, last);
        parent = last;
    }
}

void session_tree_print(const session_answer *answer, bool details)
{
    struct tree tree = {.answer = answer, .details = details};

    tree.on_head_path = calloc(answer->n_checkpoints, sizeof(bool));
    if (!tree.on_head_path) return;
    for (size_t at = find(answer, &answer->head_checkpoint_id);
         at != SIZE_MAX && !tree.on_head_path[at];
         at = find(answer, &answer->checkpoints[at]->parent_id))
        tree.on_head_path[at] = true;
    (void)printf("%s* 0\n", details ? "" : "\n");
    print_below(&tree, 0, SIZE_MAX);
    free(tree.on_head_path);
}
