/*
 * Walking the records of a manifest, one tree at a time.
 *
 * Keys are sorted by session, so one scan brings each tree in one piece and memory is bounded by
 * the largest one.  A record that cannot be decoded, or that is not the one its key names, is a
 * line of damage and left out.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct walk {
    struct dump *dump;
    struct dump_tree tree;
    bool has_tree;
    dump_tree_fn *fn;
    void *context;
};

static int compare_nodes(const void *a, const void *b)
{
    const struct dump_node *x = a, *y = b;
    if (x->record.tokens != y->record.tokens) return x->record.tokens < y->record.tokens ? -1 : 1;
    return memcmp(x->record.id.bytes, y->record.id.bytes, 16);
}

static int compare_names(const void *a, const void *b)
{
    return memcmp(((const struct dump_name *)a)->id.bytes, ((const struct dump_name *)b)->id.bytes,
                  16);
}

struct dump_page *dump_page_find(const struct dump_tree *tree, uint64_t uid)
{
    uint32_t low = 0, high = tree->page_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (tree->pages[middle].record.uid < uid)
            low = middle + 1;
        else
            high = middle;
    }
    const bool is_it = low < tree->page_count && tree->pages[low].record.uid == uid;
    return is_it ? &tree->pages[low] : NULL;
}

struct dump_node *dump_node_find(const struct dump_tree *tree, const struct kv_checkpoint_id *id)
{
    const struct dump_name key = {.id = *id};
    if (tree->node_count == 0) return NULL;
    const struct dump_name *name =
        bsearch(&key, tree->names, tree->node_count, sizeof(key), compare_names);
    return name == NULL ? NULL : &tree->nodes[name->index];
}

static kv_status sort_nodes(struct dump_tree *tree)
{
    if (tree->node_count == 0) return KV_OK;
    tree->names = malloc(tree->node_count * sizeof(*tree->names));
    if (tree->names == NULL) return KV_NOMEM;
    qsort(tree->nodes, tree->node_count, sizeof(*tree->nodes), compare_nodes);
    for (uint32_t i = 0; i < tree->node_count; i++)
        tree->names[i] = (struct dump_name){.id = tree->nodes[i].record.id, .index = i};
    qsort(tree->names, tree->node_count, sizeof(*tree->names), compare_names);
    return KV_OK;
}

static void tree_clear(struct dump_tree *tree)
{
    for (uint32_t i = 0; i < tree->node_count; i++) {
        free(tree->nodes[i].uids);
        free(tree->nodes[i].cause);
    }
    for (uint32_t i = 0; i < tree->page_count; i++)
        free(tree->pages[i].cause);
    free(tree->names);
    tree->names = NULL;
    tree->node_count = 0;
    tree->page_count = 0;
    tree->has_history = false;
}

static kv_status tree_end(struct walk *walk)
{
    struct dump_tree *tree = &walk->tree;
    if (!walk->has_tree) return KV_OK;
    walk->has_tree = false;
    tree->session = dump_head_next(walk->dump, &tree->id, NULL);
    kv_status status = sort_nodes(tree);
    if (status == KV_OK) status = walk->fn(walk->dump, tree, walk->context);
    tree_clear(tree);
    return status;
}

static kv_status add_node(struct dump_tree *tree, const struct kv_record_node *record)
{
    if (tree->node_count == tree->node_capacity) {
        const uint32_t capacity = tree->node_capacity == 0 ? 64 : 2 * tree->node_capacity;
        struct dump_node *nodes = realloc(tree->nodes, capacity * sizeof(*nodes));
        if (nodes == NULL) return KV_NOMEM;
        tree->nodes = nodes;
        tree->node_capacity = capacity;
    }
    struct dump_node *node = &tree->nodes[tree->node_count];
    *node = (struct dump_node){.record = *record};
    node->uids = malloc(8u * (size_t)KV_MAX(record->page_count, 1u));
    if (node->uids == NULL) return KV_NOMEM;
    memcpy(node->uids, record->page_uids, 8u * (size_t)record->page_count);
    node->record.page_uids = node->uids;
    tree->node_count++;
    return KV_OK;
}

static kv_status add_page(struct dump_tree *tree, const struct kv_record_page *record)
{
    if (tree->page_count == tree->page_capacity) {
        const uint32_t capacity = tree->page_capacity == 0 ? 64 : 2 * tree->page_capacity;
        struct dump_page *pages = realloc(tree->pages, capacity * sizeof(*pages));
        if (pages == NULL) return KV_NOMEM;
        tree->pages = pages;
        tree->page_capacity = capacity;
    }
    tree->pages[tree->page_count++] = (struct dump_page){.record = *record};
    return KV_OK;
}

static void record_damage(struct dump *dump, const struct kv_manifest_put *put, const char *what)
{
    char key[2 * KV_RECORD_KEY_MAX + 1] = "";
    dump_hex(put->key, KV_MIN(put->key_bytes, KV_RECORD_KEY_MAX), key);
    dump_damage(dump, "manifest: record %s: %s", key, what);
    dump->counts.unread++;
}

static kv_status visit_node(struct walk *walk, const struct kv_manifest_put *put)
{
    struct kv_record_node record;
    if (put->key_bytes != 34 ||
        kv_record_node_decode(put->value, put->value_bytes, &record) != KV_OK) {
        record_damage(walk->dump, put, "a checkpoint, damaged");
        return KV_OK;
    }
    if (!kv_id_equal(record.id.bytes, put->key + 18)) {
        record_damage(walk->dump, put, "a checkpoint under the key of another");
        return KV_OK;
    }
    return add_node(&walk->tree, &record);
}

static kv_status visit_page(struct walk *walk, const struct kv_manifest_put *put)
{
    struct kv_record_page record;
    uint64_t uid = 0;
    for (uint32_t i = 18; put->key_bytes == 26 && i < 26; i++)
        uid = uid << 8 | put->key[i];
    if (put->key_bytes != 26 ||
        kv_record_page_decode(put->value, put->value_bytes, &record) != KV_OK) {
        record_damage(walk->dump, put, "a page, damaged");
        return KV_OK;
    }
    if (record.uid != uid) {
        record_damage(walk->dump, put, "a page under the key of another");
        return KV_OK;
    }
    return add_page(&walk->tree, &record); /* Keys rise with the uid. */
}

/* Histories: why something is gone.  Nothing depends on one, so a bad one is damage and no more. */
static kv_status visit_history(struct walk *walk, const struct kv_manifest_put *put)
{
    if (put->key_bytes != KV_KEY_HISTORY_BYTES ||
        kv_record_history_decode(put->value, put->value_bytes, &walk->tree.history) != KV_OK) {
        record_damage(walk->dump, put, "a history of removals, damaged");
        return KV_OK;
    }
    walk->tree.has_history = true;
    if ((walk->dump->superblock.features & KV_FEATURE_HISTORY) == 0)
        record_damage(walk->dump, put, "a history of removals, and features lack bit 5");
    return KV_OK;
}

static bool is_of_tree(const struct kv_manifest_put *put)
{
    return put->key_bytes >= 18 &&
           (put->key[17] == 'N' || put->key[17] == 'P' || put->key[17] == 'H');
}

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct walk *walk = context;
    const uint8_t letter = put->key_bytes > 0 ? put->key[0] : 0;
    if (letter != 0 && strchr("MCWUSGQDLYB", letter) != NULL) return KV_OK; /* Read before. */
    if (letter == 'K' && walk->dump->keys != NULL) return KV_OK;
    if (letter != 'T' || !is_of_tree(put)) {
        record_damage(walk->dump, put, "a kind of record that layout version 1 does not have");
        return KV_OK;
    }
    if (!walk->has_tree || !kv_id_equal(walk->tree.id.bytes, put->key + 1)) {
        const kv_status status = tree_end(walk);
        if (status != KV_OK) return status;
        memcpy(walk->tree.id.bytes, put->key + 1, sizeof(walk->tree.id.bytes));
        walk->has_tree = true;
    }
    if (put->key[17] == 'H') return visit_history(walk, put);
    return put->key[17] == 'N' ? visit_node(walk, put) : visit_page(walk, put);
}

kv_status dump_trees(struct dump *dump, const struct kv_session_id *only, dump_tree_fn *fn,
                     void *context, struct kv_error *err)
{
    struct walk walk = {.dump = dump, .fn = fn, .context = context};
    uint8_t prefix[KV_RECORD_KEY_MAX] = {0};
    const uint32_t prefix_bytes = only == NULL ? 0 : kv_key_tree(only, prefix);
    kv_status status =
        kv_manifest_scan_now(dump->manifest, prefix, prefix_bytes, visit, &walk, err);
    if (status == KV_OK) status = tree_end(&walk);
    if (status == KV_NOMEM) (void)KV_FAIL(err, KV_NOMEM, "read a tree: no memory");
    tree_clear(&walk.tree);
    free(walk.tree.nodes);
    free(walk.tree.pages);
    return status;
}
