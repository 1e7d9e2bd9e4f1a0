/*
 * Tables of users, sessions, nodes and pages.
 *
 * Nodes and pages live in two arrays mapped once, without reserving memory: an index never moves,
 * costs nothing until it is used, and its size is the configured budget.  Freed entries are chained
 * through a free list.  Half of the budget goes to each table: a node and a page are of like size
 * and a turn makes about one of each.
 */

#include "kvstore/index/index_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/tier/tier_hbm.h"
#include "kvstore/tier/tier_ssd.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

static void *table_map(uint64_t bytes)
{
    void *table = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return table == MAP_FAILED ? NULL : table;
}

kv_status kv_index_create(const struct kv_index_options *options, struct kv_index **ret_index,
                          struct kv_error *err)
{
    struct kv_index *index = calloc(1, sizeof(*index));
    if (index == NULL) return KV_FAIL(err, KV_NOMEM, "allocate the index");
    index->model = options->model;
    index->bytes_max = options->bytes;
    index->kernels = options->kernels;
    index->sessions_max = options->sessions_max;
    index->nodes_max = (uint32_t)KV_MIN(options->bytes / 2 / sizeof(struct kv_node), KV_NODES_MAX);
    index->pages_max =
        (uint32_t)KV_MIN(options->bytes / 2 / sizeof(struct kv_page), UINT32_MAX - 1);
    index->page_free = KV_PAGE_INDEX_NONE;
    index->nodes = table_map((uint64_t)index->nodes_max * sizeof(struct kv_node));
    index->pages = table_map((uint64_t)index->pages_max * sizeof(struct kv_page));
    index->entries = table_map((uint64_t)index->sessions_max * sizeof(*index->entries));
    if (index->nodes == NULL || index->pages == NULL || index->entries == NULL) {
        kv_index_destroy(index);
        return KV_FAIL(err, KV_NOMEM, "map index.ram (%llu bytes)",
                       (unsigned long long)options->bytes);
    }
    *ret_index = index;
    return KV_OK;
}

void kv_index_destroy(struct kv_index *index)
{
    if (index == NULL) return;
    kv_index_sessions_free(index);
    for (uint32_t i = 0; i < USER_BUCKETS; i++) {
        while (index->users[i] != NULL) {
            struct kv_user *user = index->users[i];
            index->users[i] = user->next;
            free(user);
        }
    }
    for (uint32_t i = 0; i < index->nodes_touched; i++)
        free(index->nodes[i].pages);
    if (index->nodes != NULL)
        (void)munmap(index->nodes, (uint64_t)index->nodes_max * sizeof(struct kv_node));
    if (index->entries != NULL)
        (void)munmap(index->entries, (uint64_t)index->sessions_max * sizeof(*index->entries));
    if (index->pages != NULL)
        (void)munmap(index->pages, (uint64_t)index->pages_max * sizeof(struct kv_page));
    free(index);
}

struct kv_user *kv_index_user_find(struct kv_index *index, const struct kv_user_id *id)
{
    struct kv_user *user = index->users[kv_load32(id->bytes) % USER_BUCKETS];
    while (user != NULL && !kv_id_equal(user->id.bytes, id->bytes))
        user = user->next;
    return user;
}

struct kv_user *kv_index_user_add(struct kv_index *index, const struct kv_user_id *id,
                                  const uint8_t salt[32])
{
    assert(kv_index_user_find(index, id) == NULL);
    struct kv_user *user = calloc(1, sizeof(*user));
    if (user == NULL) return NULL;
    user->id = *id;
    if (salt != NULL) {
        memcpy(user->salt, salt, sizeof(user->salt));
    } else if (getrandom(user->salt, sizeof(user->salt), 0) != (ssize_t)sizeof(user->salt)) {
        free(user);
        return NULL;
    }
    user->root = kv_digest_root(&index->model, user->salt);
    struct kv_user **bucket = &index->users[kv_load32(id->bytes) % USER_BUCKETS];
    user->next = *bucket;
    *bucket = user;
    index->user_count++;
    index->session_bytes += sizeof(*user);
    return user;
}

struct kv_user *kv_index_user_next(struct kv_index *index, uint32_t *bucket, struct kv_user *last)
{
    struct kv_user *user = last == NULL ? NULL : last->next;
    if (last == NULL) user = index->users[*bucket];
    while (user == NULL && *bucket + 1 < USER_BUCKETS)
        user = index->users[++*bucket];
    return user;
}

void kv_index_user_remove(struct kv_index *index, struct kv_user *user)
{
    struct kv_user **link = &index->users[kv_load32(user->id.bytes) % USER_BUCKETS];
    while (*link != user)
        link = &(*link)->next;
    *link = user->next;
    index->user_count--;
    index->session_bytes -= sizeof(*user);
    explicit_bzero(user, sizeof(*user)); /* Salt and name. */
    free(user);
}

struct kv_history *kv_index_history(struct kv_index *index, struct kv_tree *tree)
{
    if (tree->history != NULL) return tree->history;
    tree->history = calloc(1, sizeof(*tree->history));
    if (tree->history != NULL) index->heap_bytes += sizeof(*tree->history);
    return tree->history;
}

void kv_index_history_drop(struct kv_index *index, struct kv_tree *tree)
{
    if (tree->history == NULL) return;
    index->heap_bytes -= sizeof(*tree->history);
    free(tree->history);
    tree->history = NULL;
}

static struct kv_node *node_take(struct kv_index *index)
{
    struct kv_node *node = index->node_free;
    if (node != NULL) {
        index->node_free = node->sibling;
    } else {
        if (index->nodes_touched == index->nodes_max) return NULL;
        node = &index->nodes[index->nodes_touched++];
    }
    memset(node, 0, sizeof(*node));
    node->used = true;
    node->image.slot = KV_POOL_SLOT_NONE;
    index->node_count++;
    return node;
}

static void node_give(struct kv_index *index, struct kv_node *node)
{
    free(node->pages);
    memset(node, 0, sizeof(*node));
    node->sibling = index->node_free;
    index->node_free = node;
    index->node_count--;
}

struct kv_node *kv_index_node_add(struct kv_index *index, struct kv_session *session,
                                  struct kv_node *parent, uint32_t tokens, const uint32_t *pages,
                                  uint32_t page_count)
{
    assert(parent == NULL || (parent->session->tree == session->tree && parent->tokens < tokens));
    struct kv_node *node = node_take(index);
    if (node == NULL) return NULL;
    node->pages = malloc(sizeof(uint32_t) * KV_MAX(page_count, 1u));
    if (node->pages == NULL) {
        node_give(index, node);
        return NULL;
    }
    for (uint32_t i = 0; i < page_count; i++) {
        node->pages[i] = pages[i];
        kv_index_page_ref(index, pages[i]);
    }
    node->page_count = page_count;
    index->heap_bytes += sizeof(uint32_t) * page_count;
    node->session = session;
    node->parent = parent;
    node->tokens = tokens;
    node->kernels = index->kernels;
    struct kv_node **list = parent == NULL ? &session->tree->roots : &parent->child;
    node->sibling = *list;
    *list = node;
    session->node_count++;
    kv_index_node_mark(node, NULL, 0);
    return node;
}

void kv_index_node_mark(struct kv_node *node, const uint32_t *replays, uint32_t count)
{
    assert(count <= KV_REPLAYS_MAX);
    const struct kv_node *parent = node->parent;
    node->replay_count = (uint8_t)count;
    for (uint32_t i = 0; i < count; i++)
        node->replays[i] = replays[i];
    node->replay_total = count + (parent == NULL ? 0 : parent->replay_total);
    node->approx_from = parent == NULL ? UINT32_MAX : parent->approx_from;
    if (node->approx_from == UINT32_MAX && count > 0) node->approx_from = replays[0];
}

struct kv_node *kv_index_node_split(struct kv_index *index, struct kv_node *node, uint32_t tokens)
{
    struct kv_session *session = node->session;
    struct kv_node *parent = node->parent;
    const uint32_t start = parent == NULL ? 0 : parent->tokens;
    assert(tokens > start && tokens < node->tokens);
    const uint32_t first = start / KV_PAGE_TOKENS;
    struct kv_node *upper = kv_index_node_add(index, session, parent, tokens, node->pages,
                                              kv_pages_for(tokens) - first);
    if (upper == NULL) return NULL;
    uint32_t below = 0;
    while (below < node->replay_count && node->replays[below] < tokens)
        below++;
    kv_index_node_mark(upper, node->replays, below);

    struct kv_node **link = parent == NULL ? &session->tree->roots : &parent->child;
    while (*link != node)
        link = &(*link)->sibling;
    *link = node->sibling;
    node->sibling = NULL;
    node->parent = upper;
    upper->child = node;

    const uint32_t drop = tokens / KV_PAGE_TOKENS - first;
    for (uint32_t i = 0; i < drop; i++)
        kv_index_page_unref(index, node->pages[i]);
    node->page_count -= drop;
    memmove(node->pages, node->pages + drop, sizeof(*node->pages) * node->page_count);
    index->heap_bytes -= sizeof(*node->pages) * drop;
    node->replay_count = (uint8_t)(node->replay_count - below);
    memmove(node->replays, node->replays + below, sizeof(*node->replays) * node->replay_count);
    upper->kernels = node->kernels;
    upper->created_ms = node->created_ms;
    upper->used_ms = node->used_ms;
    return upper;
}

uint32_t kv_index_replays(const struct kv_node *node, uint32_t from, uint32_t below, uint32_t *out,
                          uint32_t max)
{
    uint32_t count = 0;
    for (const struct kv_node *up = node; up != NULL && up->tokens > from; up = up->parent) {
        for (uint32_t i = 0; i < up->replay_count; i++)
            count += up->replays[i] >= from && up->replays[i] < below;
    }
    uint32_t at = count; /* The path is walked from its end: filled from the back. */
    for (const struct kv_node *up = node; up != NULL && up->tokens > from; up = up->parent) {
        for (uint32_t i = up->replay_count; i-- > 0;) {
            if (up->replays[i] < from || up->replays[i] >= below) continue;
            if (--at < max) out[at] = up->replays[i];
        }
    }
    return count;
}

void kv_index_node_recorded(struct kv_node *node)
{
    if (node->recorded) return;
    node->recorded = true;
    node->session->recorded_nodes++;
}

void kv_index_node_remove(struct kv_index *index, struct kv_node *node)
{
    assert(node->used && node->child == NULL);
    assert(node->image.slot == KV_POOL_SLOT_NONE);
    struct kv_session *session = node->session;
    struct kv_node **link = node->parent == NULL ? &session->tree->roots : &node->parent->child;
    while (*link != node)
        link = &(*link)->sibling;
    *link = node->sibling;
    session->node_count--;
    if (node->recorded) session->recorded_nodes--;
    session->tree->removals++;
    for (struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at))
        if (at->head == node) at->head = node->parent;
    for (uint32_t i = 0; i < node->page_count; i++)
        kv_index_page_unref(index, node->pages[i]);
    index->heap_bytes -= sizeof(uint32_t) * node->page_count;
    node_give(index, node);
}

bool kv_index_may_join(const struct kv_node *node, const struct kv_node *below)
{
    return node->session == below->session && node->kernels == below->kernels &&
           node->foreign == below->foreign &&
           node->replay_count + below->replay_count <= KV_REPLAYS_MAX;
}

/* Both lists of pages, without the page that the two share: the child's is the fuller one. */
static bool join_pages(struct kv_index *index, const struct kv_node *node, struct kv_node *below)
{
    const uint32_t first = node->page_count - (node->tokens % KV_PAGE_TOKENS != 0);
    uint32_t *pages = malloc(sizeof(*pages) * (first + below->page_count));
    if (pages == NULL) return false;
    for (uint32_t i = 0; i < first; i++) {
        pages[i] = node->pages[i];
        kv_index_page_ref(index, pages[i]);
    }
    memcpy(pages + first, below->pages, sizeof(*pages) * below->page_count);
    free(below->pages);
    below->pages = pages;
    below->page_count += first;
    index->heap_bytes += sizeof(*pages) * first;
    return true;
}

bool kv_index_node_join(struct kv_index *index, struct kv_node *node)
{
    struct kv_session *session = node->session;
    struct kv_node *below = node->child;
    assert(node->used && below != NULL && below->sibling == NULL && below->session == session);
    assert(node->image.slot == KV_POOL_SLOT_NONE && kv_index_may_join(node, below));
    if (!join_pages(index, node, below)) return false;
    memmove(below->replays + node->replay_count, below->replays,
            sizeof(*below->replays) * below->replay_count);
    memcpy(below->replays, node->replays, sizeof(*below->replays) * node->replay_count);
    below->replay_count = (uint8_t)(below->replay_count + node->replay_count);

    struct kv_node **link = node->parent == NULL ? &session->tree->roots : &node->parent->child;
    while (*link != node)
        link = &(*link)->sibling;
    *link = below;
    below->sibling = node->sibling;
    below->parent = node->parent;
    session->node_count--;
    session->tree->removals++;
    if (node->recorded) session->recorded_nodes--;
    for (uint32_t i = 0; i < node->page_count; i++)
        kv_index_page_unref(index, node->pages[i]);
    index->heap_bytes -= sizeof(uint32_t) * node->page_count;
    node_give(index, node);
    return true;
}

struct kv_node *kv_index_node_find(struct kv_session *session, const struct kv_checkpoint_id *id)
{
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        if (kv_id_equal(node->id.bytes, id->bytes)) return node;
    }
    return NULL;
}

struct kv_node *kv_index_node_next(struct kv_session *session, struct kv_node *node)
{
    if (node == NULL) return session->tree->roots;
    if (node->child != NULL) return node->child;
    while (node != NULL && node->sibling == NULL)
        node = node->parent;
    return node == NULL ? NULL : node->sibling;
}

struct kv_node *kv_index_ancestor(struct kv_node *node, uint32_t limit)
{
    while (node != NULL && node->tokens > limit)
        node = node->parent;
    return node;
}

bool kv_index_is_ancestor(const struct kv_node *ancestor, const struct kv_node *node)
{
    while (node != NULL && node != ancestor)
        node = node->parent;
    return node != NULL;
}

uint32_t kv_index_page_add(struct kv_index *index, struct kv_session *session)
{
    uint32_t page = index->page_free;
    if (page != KV_PAGE_INDEX_NONE) {
        index->page_free = index->pages[page].position;
    } else {
        if (index->pages_touched == index->pages_max) return KV_PAGE_INDEX_NONE;
        page = index->pages_touched++;
    }
    index->pages[page] = (struct kv_page){.session = session,
                                          .refs = 1,
                                          .ssd_page = KV_SSD_PAGE_NONE,
                                          .hbm_slot = KV_HBM_SLOT_NONE,
                                          .used = true};
    kv_index_session_pages(index, &session->entry, session->pages + 1);
    session->page_objects++;
    index->page_count++;
    return page;
}

struct kv_page *kv_index_page(struct kv_index *index, uint32_t page)
{
    assert(page < index->pages_touched && index->pages[page].used);
    return &index->pages[page];
}

void kv_index_page_ref(struct kv_index *index, uint32_t page)
{
    kv_index_page(index, page)->refs++;
}

void kv_index_page_unref(struct kv_index *index, uint32_t page)
{
    struct kv_page *object = kv_index_page(index, page);
    assert(object->refs > 0);
    if (--object->refs > 0) return;
    if (index->page_freed != NULL) index->page_freed(index->page_freed_context, page, object);
    kv_index_session_pages(index, &object->session->entry, object->session->pages - 1);
    object->session->page_objects--;
    object->used = false;
    object->position = index->page_free;
    index->page_free = page;
    index->page_count--;
}

void kv_index_on_page_free(struct kv_index *index, kv_index_page_free_fn *fn, void *context)
{
    index->page_freed = fn;
    index->page_freed_context = context;
}

void kv_index_path_pages(const struct kv_node *node, uint32_t tokens, uint32_t *ret_pages)
{
    const uint32_t want = kv_pages_for(tokens);
    uint32_t filled_from = want; /* Entries from here on are set. */

    for (; node != NULL && filled_from > 0; node = node->parent) {
        const uint32_t start = (node->parent == NULL ? 0 : node->parent->tokens) / KV_PAGE_TOKENS;
        for (uint32_t i = node->page_count; i-- > 0;) {
            const uint32_t k = start + i;
            if (k < filled_from) ret_pages[k] = node->pages[i];
        }
        if (start < filled_from) filled_from = start;
    }
    assert(filled_from == 0);
}

void kv_index_renew(struct kv_node *node, uint64_t now_ms)
{
    for (; node != NULL; node = node->parent)
        node->used_ms = KV_MAX(node->used_ms, now_ms);
}

uint64_t kv_index_session_ttl_ms(const struct kv_session_entry *session)
{
    return session->ttl_ms != 0 ? session->ttl_ms : session->user->ttl_ms;
}

uint64_t kv_index_ttl_ms(const struct kv_node *node)
{
    const struct kv_tree *tree = node->session->tree;
    uint64_t ttl_ms = kv_index_session_ttl_ms(&node->session->entry);
    if (tree->session_count == 1) return ttl_ms;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        const uint64_t its_ms = kv_index_session_ttl_ms(&at->entry);
        if (its_ms > ttl_ms && kv_index_is_ancestor(node, at->head)) ttl_ms = its_ms;
    }
    return ttl_ms;
}

bool kv_index_expired(const struct kv_node *node, uint64_t now_ms)
{
    const uint64_t age = now_ms > node->used_ms ? now_ms - node->used_ms : 0;
    return age > kv_index_session_ttl_ms(&node->session->entry) && age > kv_index_ttl_ms(node);
}

struct kv_index_usage kv_index_usage(const struct kv_index *index)
{
    return (struct kv_index_usage){
        .users = index->user_count,
        .users_with_pages = index->users_with_pages,
        .sessions = index->session_count,
        .nodes = index->node_count,
        .nodes_max = index->nodes_max,
        .pages = index->page_count,
        .pages_max = index->pages_max,
        .bytes_sessions = index->session_bytes,
        .bytes_entries = (uint64_t)index->session_count * sizeof(struct kv_session_entry),
        .sessions_open = index->open_count,
        .bytes = index->session_bytes + index->heap_bytes +
                 (uint64_t)index->nodes_touched * sizeof(struct kv_node) +
                 (uint64_t)index->pages_touched * sizeof(struct kv_page),
    };
}

bool kv_index_has_room(const struct kv_index *index, uint32_t nodes, uint32_t pages)
{
    const uint64_t node_count = index->node_count + (uint64_t)nodes;
    const uint64_t page_count = index->page_count + (uint64_t)pages;
    const uint64_t beside = KV_MIN(index->session_bytes, index->bytes_max / 4 * 3);
    return node_count <= index->nodes_max && page_count <= index->pages_max &&
           node_count * sizeof(struct kv_node) + page_count * sizeof(struct kv_page) <=
               index->bytes_max - beside;
}

uint64_t kv_index_kernels(const struct kv_index *index)
{
    return index->kernels;
}

uint64_t kv_index_kernels_at(const struct kv_node *node, uint32_t tokens)
{
    while (node->parent != NULL && node->parent->tokens >= tokens)
        node = node->parent;
    return node->kernels;
}

uint64_t kv_index_model_tag(const struct kv_index *index)
{
    return kv_load64(index->model.bytes);
}
