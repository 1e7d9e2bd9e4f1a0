/*
 * Sessions: the entry that each has always, what is open of it while it is used, and the trees they
 * have a head in.
 *
 * A million sessions are known and few are used, so an entry is small: it lies in a table mapped
 * once, without reserving memory, and is moved to the heap, as the beginning of a struct
 * kv_session, when the session is opened.  Whoever walks over all of them sees either.
 *
 * A tree is in memory while a session with a head in it is open.  One that cannot be found by the
 * id of its session alone, because it has another id or further heads, stays.
 */

#include "kvstore/index/index_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static struct kv_session *session_of(struct kv_session_entry *entry)
{
    assert(entry->is_open);
    return KV_CONTAINER_OF(entry, struct kv_session, entry);
}

/* ---- entries ---- */

static struct kv_session_entry **bucket_of(struct kv_index *index, const struct kv_session_id *id)
{
    return &index->sessions[kv_load32(id->bytes) % SESSION_BUCKETS];
}

struct kv_session_entry *kv_index_entry_find(const struct kv_index *index,
                                             const struct kv_session_id *id)
{
    struct kv_session_entry *entry = index->sessions[kv_load32(id->bytes) % SESSION_BUCKETS];
    while (entry != NULL && !kv_id_equal(entry->id.bytes, id->bytes))
        entry = entry->next;
    return entry;
}

static struct kv_session_entry *entry_take(struct kv_index *index)
{
    struct kv_session_entry *entry = index->entry_free;
    if (entry != NULL)
        index->entry_free = entry->next;
    else /* There are as many as sessions. */
        entry = &index->entries[index->entries_touched++];
    memset(entry, 0, sizeof(*entry));
    return entry;
}

static void entry_give(struct kv_index *index, struct kv_session_entry *entry)
{
    memset(entry, 0, sizeof(*entry));
    entry->next = index->entry_free;
    index->entry_free = entry;
}

uint32_t kv_index_entry_number(const struct kv_index *index, const struct kv_session_entry *entry)
{
    assert(!entry->is_open && index->open_count == 0);
    return (uint32_t)(entry - index->entries);
}

/* It lies at `to` from now on: in the hash chain and among the heads of its tree. */
static void entry_moved(struct kv_index *index, const struct kv_session_entry *from,
                        struct kv_session_entry *to)
{
    struct kv_session_entry **link = bucket_of(index, &to->id);
    while (*link != from)
        link = &(*link)->next;
    *link = to;
    if (to->tree == NULL) return;
    link = &to->tree->sessions;
    while (*link != from)
        link = &(*link)->tree_next;
    *link = to;
}

struct kv_session_entry *kv_index_entry_next(const struct kv_index *index, uint32_t *bucket,
                                             const struct kv_session_entry *last)
{
    struct kv_session_entry *next = NULL;
    if (last != NULL) {
        next = last->next;
        if (next == NULL) (*bucket)++;
    }
    while (next == NULL && *bucket < SESSION_BUCKETS) {
        next = index->sessions[*bucket];
        if (next == NULL) (*bucket)++;
    }
    return next;
}

const struct kv_session *kv_index_look(const struct kv_session_entry *entry,
                                       struct kv_session *shape)
{
    if (entry->is_open) return session_of((struct kv_session_entry *)(uintptr_t)entry);
    *shape = (struct kv_session){.entry = *entry};
    return shape;
}

void kv_index_session_pages(struct kv_index *index, struct kv_session_entry *entry, uint32_t pages)
{
    struct kv_user *user = entry->user;
    const bool had = user->pages > 0;
    assert(user->pages >= entry->pages);
    user->pages += pages - entry->pages;
    entry->pages = pages;
    if (had && user->pages == 0) index->users_with_pages--;
    if (!had && user->pages > 0) index->users_with_pages++;
}

/* ---- trees ---- */

static struct kv_tree *tree_find(const struct kv_index *index, const struct kv_session_id *id)
{
    struct kv_tree *tree = index->trees[kv_load32(id->bytes) % TREE_BUCKETS];
    while (tree != NULL && !kv_id_equal(tree->id.bytes, id->bytes))
        tree = tree->next;
    return tree;
}

static void tree_join(struct kv_tree *tree, struct kv_session_entry *entry)
{
    entry->tree = tree;
    entry->tree_next = tree->sessions;
    tree->sessions = entry;
    tree->session_count++;
}

static struct kv_tree *tree_make(struct kv_index *index, const struct kv_session_id *id)
{
    struct kv_tree *tree = calloc(1, sizeof(*tree));
    if (tree == NULL) return NULL;
    tree->id = *id;
    struct kv_tree **bucket = &index->trees[kv_load32(id->bytes) % TREE_BUCKETS];
    tree->next = *bucket;
    *bucket = tree;
    index->session_bytes += sizeof(*tree);
    /* The session that made it, where a fork of it was read first. */
    struct kv_session_entry *entry = kv_index_entry_find(index, id);
    if (entry != NULL && entry->tree == NULL) tree_join(tree, entry);
    return tree;
}

static void tree_free(struct kv_index *index, struct kv_tree *tree)
{
    struct kv_tree **link = &index->trees[kv_load32(tree->id.bytes) % TREE_BUCKETS];
    assert(tree->roots == NULL && tree->sessions == NULL && tree->waiters == NULL);
    while (*link != tree)
        link = &(*link)->next;
    *link = tree->next;
    index->session_bytes -= sizeof(*tree);
    kv_index_history_drop(index, tree);
    free(tree);
}

static void tree_leave(struct kv_index *index, struct kv_session_entry *entry)
{
    struct kv_tree *tree = entry->tree;
    struct kv_session_entry **link = &tree->sessions;
    while (*link != entry)
        link = &(*link)->tree_next;
    *link = entry->tree_next;
    entry->tree = NULL;
    entry->tree_next = NULL;
    if (--tree->session_count == 0) tree_free(index, tree);
}

/* Whether its only session leads to it. */
static bool tree_is_plain(const struct kv_tree *tree)
{
    return tree->session_count == 1 && kv_id_equal(tree->id.bytes, tree->sessions->id.bytes);
}

const struct kv_session_id *kv_index_tree_id(const struct kv_session_entry *entry)
{
    return entry->tree == NULL ? &entry->id : &entry->tree->id;
}

const struct kv_session_entry *kv_index_tree_entry(const struct kv_index *index,
                                                   const struct kv_session_id *id)
{
    const struct kv_tree *tree = tree_find(index, id);
    if (tree != NULL) return tree->sessions;
    const struct kv_session_entry *entry = kv_index_entry_find(index, id);
    return entry != NULL && entry->tree == NULL ? entry : NULL;
}

static struct kv_session *session_open(struct kv_index *index, struct kv_session_entry *entry);

struct kv_session *kv_index_tree_session(struct kv_index *index, const struct kv_session_id *tree)
{
    struct kv_session_entry *entry =
        (struct kv_session_entry *)(uintptr_t)kv_index_tree_entry(index, tree);
    return entry == NULL ? NULL : session_open(index, entry);
}

struct kv_session *kv_index_head_next(const struct kv_tree *tree, const struct kv_session *session)
{
    struct kv_session_entry *entry = session == NULL ? tree->sessions : session->tree_next;
    while (entry != NULL && !entry->is_open)
        entry = entry->tree_next;
    return entry == NULL ? NULL : session_of(entry);
}

bool kv_index_tree_open(struct kv_index *index, struct kv_tree *tree)
{
    for (struct kv_session_entry *entry = tree->sessions; entry != NULL;) {
        const struct kv_session *session = session_open(index, entry);
        if (session == NULL) return false;
        entry = session->tree_next;
    }
    return true;
}

struct kv_session *kv_index_stands(const struct kv_node *node, const struct kv_session *but)
{
    const struct kv_tree *tree = node->session->tree;
    struct kv_session *at = kv_index_head_next(tree, NULL);
    while (at != NULL && (at == but || !kv_index_is_ancestor(node, at->head)))
        at = kv_index_head_next(tree, at);
    return at;
}

/* ---- open sessions ---- */

static uint64_t name_bytes(const struct kv_session *session)
{
    if (session->name == NULL) return 0;
    return strlen(session->name) + strlen(session->parent_name) + 2;
}

static void open_append(struct kv_index *index, struct kv_session *session)
{
    session->open_prev = index->open_last;
    session->open_next = NULL;
    if (index->open_last == NULL)
        index->open_first = session;
    else
        index->open_last->open_next = session;
    index->open_last = session;
}

static void open_remove(struct kv_index *index, struct kv_session *session)
{
    if (session->open_prev == NULL)
        index->open_first = session->open_next;
    else
        session->open_prev->open_next = session->open_next;
    if (session->open_next == NULL)
        index->open_last = session->open_prev;
    else
        session->open_next->open_prev = session->open_prev;
}

static struct kv_session *session_open(struct kv_index *index, struct kv_session_entry *entry)
{
    if (entry->is_open) return session_of(entry);
    struct kv_session *session = calloc(1, sizeof(*session));
    if (session != NULL && entry->tree == NULL) (void)tree_make(index, &entry->id);
    if (session == NULL || entry->tree == NULL) {
        free(session);
        return NULL;
    }
    session->entry = *entry;
    session->is_open = true;
    entry_moved(index, entry, &session->entry);
    entry_give(index, entry);
    open_append(index, session);
    index->open_count++;
    index->session_bytes += sizeof(*session);
    return session;
}

static void session_free(struct kv_index *index, struct kv_session *session)
{
    open_remove(index, session);
    index->open_count--;
    index->session_bytes -= sizeof(*session);
    if (session->has_details) index->session_bytes -= name_bytes(session);
    free(session->name);
    free(session->parent_name);
    free(session);
}

/* Its entry is enough: nobody uses it, and what its record says is all there is to know. */
static bool is_idle(const struct kv_session *session, uint64_t now_ms)
{
    const struct kv_tree *tree = session->tree;
    if (session->live != NULL || session->busy != NULL || session->flows > 0) return false;
    if (session->deleting || session->sweep_after_ms > now_ms) return false;
    if (session->page_objects > 0) return false;
    if (tree->commits > 0 || tree->waiters != NULL || tree->load == KV_LOAD_RUNNING) return false;
    if (tree->load == KV_LOAD_NONE) return true;
    return tree->session_count == 1 && tree->roots == NULL && !tree->unreadable;
}

static void session_close(struct kv_index *index, struct kv_session *session)
{
    struct kv_tree *tree = session->tree;
    struct kv_session_entry *entry = entry_take(index);
    tree->load = KV_LOAD_NONE;
    *entry = session->entry;
    entry->is_open = false;
    entry_moved(index, &session->entry, entry);
    if (tree_is_plain(tree)) tree_leave(index, entry);
    session_free(index, session);
}

void kv_index_close_idle(struct kv_index *index, uint32_t count, uint64_t now_ms)
{
    struct kv_session *session = index->open_first;
    for (count = KV_MIN(count, index->open_count); count > 0; count--) {
        struct kv_session *next = session->open_next;
        if (is_idle(session, now_ms)) {
            session_close(index, session);
        } else { /* The others first, next time. */
            open_remove(index, session);
            open_append(index, session);
        }
        session = next;
    }
}

struct kv_session *kv_index_open_next(const struct kv_index *index,
                                      const struct kv_session *session)
{
    return session == NULL ? index->open_first : session->open_next;
}

struct kv_session *kv_index_session_find(struct kv_index *index, const struct kv_session_id *id)
{
    struct kv_session_entry *entry = kv_index_entry_find(index, id);
    return entry == NULL ? NULL : session_open(index, entry);
}

bool kv_index_session_detail(struct kv_index *index, struct kv_session *session, const char *name,
                             const char *parent_name)
{
    assert(!session->has_details);
    session->name = strdup(name);
    session->parent_name = strdup(parent_name);
    if (session->name == NULL || session->parent_name == NULL) {
        free(session->name);
        free(session->parent_name);
        session->name = session->parent_name = NULL;
        return false;
    }
    session->has_details = true;
    index->session_bytes += name_bytes(session);
    return true;
}

/* ---- they come and go ---- */

static void entry_link(struct kv_index *index, struct kv_session_entry *entry,
                       const struct kv_session_id *id, struct kv_user *user)
{
    struct kv_session_entry **bucket = bucket_of(index, id);
    entry->id = *id;
    entry->user = user;
    entry->next = *bucket;
    *bucket = entry;
    index->session_count++;
    index->session_bytes += sizeof(*entry);
}

struct kv_session_entry *kv_index_entry_add(struct kv_index *index, const struct kv_session_id *id,
                                            struct kv_user *user, const struct kv_session_id *tree)
{
    assert(kv_index_entry_find(index, id) == NULL);
    if (index->session_count >= index->sessions_max) return NULL;
    struct kv_tree *joined = tree_find(index, tree == NULL ? id : tree);
    if (tree != NULL && joined == NULL) joined = tree_make(index, tree);
    if (tree != NULL && joined == NULL) return NULL;
    struct kv_session_entry *entry = entry_take(index);
    entry_link(index, entry, id, user);
    if (joined != NULL) tree_join(joined, entry);
    return entry;
}

/* The id of its own, where no other tree has that: one that was forked outlives its maker. */
static struct kv_session_id tree_id_for(const struct kv_index *index,
                                        const struct kv_session_id *id)
{
    struct kv_digest hash;
    struct kv_session_id tree = *id;
    while (kv_index_tree_entry(index, &tree) != NULL) {
        kv_sha256(tree.bytes, sizeof(tree.bytes), &hash);
        memcpy(tree.bytes, hash.bytes, sizeof(tree.bytes));
    }
    return tree;
}

static struct kv_session *add_to(struct kv_index *index, const struct kv_session_id *tree,
                                 const struct kv_session_id *id, struct kv_user *user,
                                 const char *name, const char *parent_name)
{
    struct kv_session_entry *entry = kv_index_entry_add(index, id, user, tree);
    if (entry == NULL) return NULL;
    struct kv_session *session = session_open(index, entry);
    if (session == NULL || !kv_index_session_detail(index, session, name, parent_name)) {
        if (session != NULL) kv_index_session_remove(index, session);
        return NULL;
    }
    return session;
}

struct kv_session *kv_index_session_add(struct kv_index *index, const struct kv_session_id *id,
                                        struct kv_user *user, const char *name,
                                        const char *parent_name)
{
    const struct kv_session_id tree = tree_id_for(index, id);
    return add_to(index, &tree, id, user, name, parent_name);
}

struct kv_session *kv_index_session_fork(struct kv_index *index, const struct kv_session *source,
                                         const struct kv_session_id *id, const char *name,
                                         const char *parent_name)
{
    return add_to(index, &source->tree->id, id, source->user, name, parent_name);
}

static void page_give(struct kv_index *index, struct kv_page *page, struct kv_session *to)
{
    struct kv_session *from = page->session;
    page->session = to;
    from->page_objects--;
    to->page_objects++;
    kv_index_session_pages(index, &from->entry, from->pages - 1);
    kv_index_session_pages(index, &to->entry, to->pages + 1);
}

void kv_index_page_give(struct kv_index *index, uint32_t page, struct kv_session *to)
{
    page_give(index, kv_index_page(index, page), to);
}

void kv_index_pages_give(struct kv_index *index, struct kv_session *from, struct kv_session *to)
{
    for (uint32_t i = 0; i < index->pages_touched && from->page_objects > 0; i++) {
        struct kv_page *page = &index->pages[i];
        if (page->used && page->session == from) page_give(index, page, to);
    }
}

void kv_index_entry_kind(struct kv_session_entry *entry, uint8_t kind)
{
    struct kv_user *user = entry->user;
    if (entry->kind == KV_SESSION_MAIN) user->mains--;
    if (entry->kind > KV_SESSION_MAIN) user->others--;
    entry->kind = kind;
    if (kind == KV_SESSION_MAIN) user->mains++;
    if (kind > KV_SESSION_MAIN) user->others++;
}

void kv_index_session_remove(struct kv_index *index, struct kv_session *session)
{
    struct kv_session_entry **link = bucket_of(index, &session->id);
    struct kv_session *other = kv_index_head_next(session->tree, NULL);
    assert(session->node_count == 0);
    if (other == session) other = kv_index_head_next(session->tree, other);
    if (other != NULL) kv_index_pages_give(index, session, other);
    assert(session->page_objects == 0);
    kv_index_entry_kind(&session->entry, 0);
    kv_index_session_pages(index, &session->entry, 0);
    while (*link != &session->entry)
        link = &(*link)->next;
    *link = session->next;
    index->session_count--;
    index->session_bytes -= sizeof(struct kv_session_entry);
    tree_leave(index, &session->entry);
    session_free(index, session);
}

void kv_index_node_give(struct kv_index *index, struct kv_node *node, struct kv_session *to)
{
    struct kv_session *from = node->session;
    assert(from->tree == to->tree);
    node->session = to;
    from->node_count--;
    to->node_count++;
    if (node->recorded) {
        from->recorded_nodes--;
        to->recorded_nodes++;
    }
    for (uint32_t i = 0; i < node->page_count; i++) {
        struct kv_page *page = kv_index_page(index, node->pages[i]);
        if (page->session == from) page_give(index, page, to);
    }
}

void kv_index_sessions_free(struct kv_index *index)
{
    while (index->open_first != NULL)
        session_free(index, index->open_first);
    for (uint32_t i = 0; i < TREE_BUCKETS; i++) {
        while (index->trees[i] != NULL) {
            struct kv_tree *tree = index->trees[i];
            index->trees[i] = tree->next;
            free(tree->history);
            free(tree);
        }
    }
}
