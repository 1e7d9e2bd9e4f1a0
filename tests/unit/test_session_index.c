/*
 * Index: users, sessions, nodes, pages.
 *
 * Goal: references of pages, the tree's links, paths through grown and shared pages, and that a
 * user's or session's name never collides with another's (symptom T21: keys must not be plain
 * concatenations).
 */

#include "kvstore/index/session_index.h"
#include "tests/harness.h"

#include <string.h>

struct freed {
    uint32_t count;
    uint32_t last;
};

static void count_freed(void *context, uint32_t page, struct kv_page *object)
{
    struct freed *freed = context;
    (void)object;
    freed->count++;
    freed->last = page;
}

static struct kv_index *make(uint64_t bytes)
{
    struct kv_index *index = NULL;
    struct kv_error err;
    const struct kv_index_options options = {.bytes = bytes, .sessions_max = 8};
    EXPECT(kv_index_create(&options, &index, &err) == KV_OK);
    return index;
}

static struct kv_session *add_session(struct kv_index *index, const char *user, const char *name)
{
    const struct kv_user_id user_id = kv_user_id_of(user);
    struct kv_user *owner = kv_index_user_find(index, &user_id);
    if (owner == NULL) owner = kv_index_user_add(index, &user_id, NULL);
    const struct kv_session_id id = kv_session_id_of(&user_id, name);
    return kv_index_session_add(index, &id, owner, name, "");
}

static void test_names_do_not_collide(void)
{
    struct kv_index *index = make(1u << 20);
    struct kv_session *a = add_session(index, "ab", "c");
    struct kv_session *b = add_session(index, "a", "bc");
    EXPECT(a != NULL && b != NULL && a != b);
    EXPECT(!kv_id_equal(a->id.bytes, b->id.bytes));
    EXPECT(memcmp(a->user->root.bytes, b->user->root.bytes, 32) != 0); /* Own salt each. */
    EXPECT(kv_index_session_find(index, &a->id) == a);
    kv_index_session_remove(index, a);
    EXPECT(kv_index_session_find(index, &b->id) == b);
    kv_index_session_remove(index, b);
    EXPECT_EQ_U32(kv_index_usage(index).sessions, 0);
    kv_index_destroy(index);
}

static uint32_t add_page(struct kv_index *index, struct kv_session *session, uint32_t position,
                         uint32_t count)
{
    const uint32_t page = kv_index_page_add(index, session);
    struct kv_page *object = kv_index_page(index, page);
    object->position = position;
    object->count = count;
    return page;
}

/* 0 -a-> 100 -b-> 300, and a side branch 100 -c-> 200 with its own first page. */
static void test_paths_take_the_deepest_page(void)
{
    struct kv_index *index = make(1u << 20);
    struct kv_session *session = add_session(index, "u", "s");
    const uint32_t grown = add_page(index, session, 0, 128);
    const uint32_t b1 = add_page(index, session, 128, 128), b2 = add_page(index, session, 256, 44);
    const uint32_t c0 = add_page(index, session, 0, 128), c1 = add_page(index, session, 128, 72);
    const uint32_t edge_a[] = {grown}, edge_b[] = {grown, b1, b2}, edge_c[] = {c0, c1};
    struct kv_node *a = kv_index_node_add(index, session, NULL, 100, edge_a, 1);
    struct kv_node *b = kv_index_node_add(index, session, a, 300, edge_b, 3);
    struct kv_node *c = kv_index_node_add(index, session, a, 200, edge_c, 2);
    uint32_t path[3];

    kv_index_path_pages(b, 300, path);
    EXPECT(path[0] == grown && path[1] == b1 && path[2] == b2);
    kv_index_path_pages(b, 130, path);
    EXPECT(path[0] == grown && path[1] == b1);
    kv_index_path_pages(c, 200, path);
    EXPECT(path[0] == c0 && path[1] == c1);
    kv_index_path_pages(a, 100, path);
    EXPECT_EQ_U32(path[0], grown);

    EXPECT(kv_index_ancestor(b, 299) == a && kv_index_ancestor(b, 300) == b);
    EXPECT(kv_index_ancestor(b, 99) == NULL);
    EXPECT(kv_index_is_ancestor(a, c) && !kv_index_is_ancestor(b, c));
    uint32_t seen = 0;
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL)
        seen++;
    EXPECT_EQ_U32(seen, 3);
    kv_index_destroy(index);
}

static void test_pages_go_with_their_last_edge(void)
{
    struct freed freed = {0};
    struct kv_index *index = make(1u << 20);
    kv_index_on_page_free(index, count_freed, &freed);
    struct kv_session *session = add_session(index, "u", "s");
    const uint32_t shared = add_page(index, session, 0, 128);
    struct kv_node *a = kv_index_node_add(index, session, NULL, 60, &shared, 1);
    struct kv_node *b = kv_index_node_add(index, session, a, 128, &shared, 1);
    session->head = b;
    kv_index_page_unref(index, shared); /* The maker's. */
    EXPECT_EQ_U32(freed.count, 0);
    kv_index_node_remove(index, b);
    EXPECT_EQ_U32(freed.count, 0);
    EXPECT(session->head == a); /* The head falls back. */
    kv_index_node_remove(index, a);
    EXPECT_EQ_U32(freed.count, 1);
    EXPECT(freed.last == shared && session->head == NULL && session->tree->roots == NULL);
    EXPECT_EQ_U32(kv_index_page_add(index, session), shared); /* Entries are used again. */
    kv_index_destroy(index);
}

static void test_limits_are_answers(void)
{
    struct kv_index *index = make(8 * sizeof(struct kv_node));
    struct kv_session *session = add_session(index, "u", "s");
    const struct kv_index_usage usage = kv_index_usage(index);
    uint32_t page = 0;
    for (uint32_t i = 0; i < usage.pages_max; i++)
        page = kv_index_page_add(index, session);
    EXPECT_EQ_U32(kv_index_page_add(index, session), KV_PAGE_INDEX_NONE);
    struct kv_node *node = NULL;
    for (uint32_t i = 0; i < usage.nodes_max; i++) {
        node = kv_index_node_add(index, session, node, i + 1, &page, 1);
        EXPECT(node != NULL);
    }
    EXPECT(kv_index_node_add(index, session, node, 999, &page, 1) == NULL);
    kv_index_destroy(index);
}

/* Sessions and trees share the budget; trees keep a quarter of it. */
static void test_sessions_take_from_the_budget(void)
{
    const uint64_t bytes = 64 * sizeof(struct kv_node);
    struct kv_index *index = make(bytes);
    struct kv_session *first = add_session(index, "u", "s");
    const uint64_t each = kv_index_usage(index).bytes_sessions;
    EXPECT(each > sizeof(struct kv_session) && each < 1000); /* It is open. */
    const uint32_t half = 32, quarter = 16;
    EXPECT(kv_index_has_room(index, half - 1, 0));
    EXPECT(!kv_index_has_room(index, half + 1, 0)); /* Of one kind at most half. */
    EXPECT(kv_index_has_room(index, half - 1, 1));
    char name[2] = "a";
    for (uint32_t i = 0; i < 7; i++, name[0]++)
        EXPECT(add_session(index, "u", name) != NULL);
    const uint64_t taken = kv_index_usage(index).bytes_sessions;
    EXPECT(taken > each + 7 * sizeof(struct kv_session));
    EXPECT_EQ_U64(kv_index_usage(index).bytes, taken);
    const uint64_t left = bytes - taken - half * sizeof(struct kv_node);
    const uint32_t pages = (uint32_t)(left / sizeof(struct kv_page));
    EXPECT(pages < kv_index_usage(index).pages_max);
    EXPECT(kv_index_has_room(index, half, pages));
    EXPECT(!kv_index_has_room(index, half, pages + 1));
    kv_index_session_remove(index, first);
    EXPECT(kv_index_usage(index).bytes_sessions < taken);
    kv_index_destroy(index);

    index = make(8 * sizeof(struct kv_node)); /* Fewer bytes than the sessions below. */
    for (name[0] = 'a'; name[0] < 'i'; name[0]++)
        EXPECT(add_session(index, "u", name) != NULL);
    EXPECT(kv_index_usage(index).bytes_sessions > 2 * sizeof(struct kv_node));
    EXPECT(kv_index_has_room(index, quarter / 8, 0));
    kv_index_destroy(index);
}

static void test_use_keeps_ancestors(void)
{
    struct kv_index *index = make(1u << 20);
    struct kv_session *session = add_session(index, "u", "s");
    session->ttl_ms = 1000;
    const uint32_t page = add_page(index, session, 0, 128);
    struct kv_node *a = kv_index_node_add(index, session, NULL, 60, &page, 1);
    struct kv_node *b = kv_index_node_add(index, session, a, 128, &page, 1);
    kv_index_renew(a, 5000);
    kv_index_renew(b, 6000);
    EXPECT(a->used_ms == 6000 && b->used_ms == 6000);
    EXPECT(!kv_index_expired(a, 7000) && kv_index_expired(a, 7001));
    EXPECT(!kv_index_expired(b, 10)); /* A clock that went back expires nothing. */
    kv_index_destroy(index);
}

/* What nobody uses is an entry of 96 B; opened again it is the same session. */
static void test_sessions_at_rest_are_entries(void)
{
    struct kv_index *index = make(1u << 20);
    struct kv_session *session = add_session(index, "u", "s");
    const struct kv_session_id id = session->id;
    session->tree->load = KV_LOAD_DONE;
    session->used_ms = 7;
    session->epoch = 3;
    session->fell_back = true;
    const uint64_t open_bytes = kv_index_usage(index).bytes_sessions;
    session->flows = 1;
    kv_index_close_idle(index, 8, 0);
    EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 1); /* In use. */
    session->flows = 0;
    const uint32_t held = add_page(index, session, 0, 128); /* By a read that is late. */
    session->tree->load = KV_LOAD_NONE;
    kv_index_close_idle(index, 8, 0);
    EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 1); /* The page points to it. */
    kv_index_page_unref(index, held);
    session->sweep_after_ms = 10;
    kv_index_close_idle(index, 8, 9);
    EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 1); /* It is not to be swept again yet. */
    kv_index_close_idle(index, 8, 10);
    EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 0);
    EXPECT_EQ_U64(kv_index_usage(index).bytes_entries, 96);
    EXPECT(kv_index_usage(index).bytes_sessions < open_bytes - sizeof(struct kv_session) + 96);
    const struct kv_session_entry *entry = kv_index_entry_find(index, &id);
    struct kv_session shape;
    EXPECT(entry != NULL && !entry->is_open && entry->tree == NULL);
    EXPECT(kv_index_look(entry, &shape) == &shape && shape.used_ms == 7 && shape.live == NULL);
    EXPECT(kv_id_equal(kv_index_tree_id(entry)->bytes, id.bytes));
    session = kv_index_session_find(index, &id);
    EXPECT(session != NULL && session->epoch == 3 && session->fell_back && !session->has_details);
    EXPECT(session->tree->load == KV_LOAD_NONE && session->tree->session_count == 1);
    EXPECT(kv_index_session_detail(index, session, "s", ""));
    EXPECT_EQ_U64(kv_index_usage(index).bytes_sessions, open_bytes);
    kv_index_session_remove(index, session);
    EXPECT(kv_index_entry_find(index, &id) == NULL);
    kv_index_destroy(index);
}

/* A session without a ttl of its own lives as its user's say, which may change. */
static void test_ttl_of_the_user(void)
{
    struct kv_index *index = make(1u << 20);
    struct kv_session *plain = add_session(index, "u", "plain");
    struct kv_session *own = add_session(index, "u", "own");
    own->ttl_ms = 50;
    const uint32_t first = add_page(index, plain, 0, 128), second = add_page(index, own, 0, 128);
    struct kv_node *a = kv_index_node_add(index, plain, NULL, 60, &first, 1);
    struct kv_node *b = kv_index_node_add(index, own, NULL, 60, &second, 1);
    kv_index_page_unref(index, first);
    kv_index_page_unref(index, second);
    kv_index_renew(a, 1000);
    kv_index_renew(b, 1000);
    for (uint64_t ttl_ms = 10; ttl_ms <= 1000; ttl_ms *= 10) {
        plain->user->ttl_ms = ttl_ms;
        EXPECT_EQ_U64(kv_index_session_ttl_ms(&plain->entry), ttl_ms);
        EXPECT_EQ_U64(kv_index_session_ttl_ms(&own->entry), 50);
        EXPECT_EQ_U64(kv_index_ttl_ms(a), ttl_ms);
        EXPECT(!kv_index_expired(a, 1000 + ttl_ms) && kv_index_expired(a, 1001 + ttl_ms));
        EXPECT(!kv_index_expired(b, 1050) && kv_index_expired(b, 1051));
    }
    kv_index_destroy(index);
}

static struct kv_session *add_fork(struct kv_index *index, struct kv_session *of, const char *name)
{
    const struct kv_session_id id = kv_session_id_of(&of->user->id, name);
    return kv_index_session_fork(index, of, &id, name, of->name);
}

/* 0 -a-> 100 made by s, which stands there; f below it at 200. */
static void test_heads_share_a_tree(void)
{
    struct kv_index *index = make(1u << 20);
    struct kv_session *s = add_session(index, "u", "s");
    struct kv_session *f = add_fork(index, s, "f");
    const struct kv_session_id tree_id = s->tree->id, f_id = f->id;
    s->ttl_ms = 10;
    f->ttl_ms = 100;
    const uint32_t first = add_page(index, s, 0, 100), second = add_page(index, f, 128, 72);
    const uint32_t edge[] = {first, second};
    struct kv_node *a = kv_index_node_add(index, s, NULL, 100, edge, 1);
    struct kv_node *b = kv_index_node_add(index, f, a, 200, edge, 2);
    kv_index_page_unref(index, first);
    kv_index_page_unref(index, second);
    kv_index_node_recorded(a);
    kv_index_node_recorded(b);
    s->head = a;
    f->head = b;
    s->tree->load = KV_LOAD_DONE;
    EXPECT(s->tree == f->tree && s->tree->session_count == 2);
    EXPECT(s->node_count == 1 && f->node_count == 1 && s->pages == 1 && f->pages == 1);
    EXPECT(kv_index_stands(a, s) == f && kv_index_stands(b, f) == NULL);
    EXPECT_EQ_U64(kv_index_ttl_ms(a), 100); /* The fork stands below it. */
    kv_index_renew(b, 1000);
    EXPECT(!kv_index_expired(a, 1100) && kv_index_expired(a, 1101));
    kv_index_close_idle(index, 8, 0);
    EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 2); /* Its tree is in memory. */

    /* The maker leaves: what is left is the fork's, under the id of a session that is gone. */
    const uint64_t removals = s->tree->removals;
    kv_index_node_give(index, a, f);
    EXPECT(a->session == f && f->node_count == 2 && f->recorded_nodes == 2 && f->pages == 2);
    EXPECT(s->node_count == 0 && s->recorded_nodes == 0 && s->pages == 0);
    kv_index_session_remove(index, s);
    EXPECT(kv_id_equal(f->tree->id.bytes, tree_id.bytes) && f->tree->removals == removals);
    EXPECT(kv_index_tree_session(index, &tree_id) == f);
    EXPECT(kv_index_tree_session(index, &f_id) == NULL); /* It has no tree of that id. */
    struct kv_session *again = add_session(index, "u", "s");
    EXPECT(again->tree != f->tree && !kv_id_equal(again->tree->id.bytes, tree_id.bytes));
    kv_index_node_remove(index, b);
    EXPECT(f->head == a && f->tree->removals == removals + 1);
    kv_index_node_remove(index, a);
    f->tree->load = KV_LOAD_NONE;
    kv_index_close_idle(index, 8, 0);
    const struct kv_session_entry *entry = kv_index_entry_find(index, &f_id);
    EXPECT(entry != NULL && !entry->is_open &&
           entry->tree != NULL); /* Its id does not lead there. */
    f = kv_index_session_find(index, &f_id);
    EXPECT(f != NULL && kv_id_equal(f->tree->id.bytes, tree_id.bytes));
    kv_index_session_remove(index, f);
    EXPECT(kv_index_tree_entry(index, &tree_id) == NULL);
    kv_index_destroy(index);
}

/* As a start reads them: the fork before or after the session whose tree it is in. */
static void test_entries_find_their_tree(void)
{
    const struct kv_user_id user_id = kv_user_id_of("u");
    const struct kv_session_id s = kv_session_id_of(&user_id, "s"),
                               f = kv_session_id_of(&user_id, "f");
    for (int order = 0; order < 2; order++) {
        struct kv_index *index = make(1u << 20);
        struct kv_user *user = kv_index_user_add(index, &user_id, NULL);
        for (int i = 0; i < 2; i++) {
            const bool is_fork = i == order;
            EXPECT(kv_index_entry_add(index, is_fork ? &f : &s, user, is_fork ? &s : NULL) != NULL);
        }
        const struct kv_session_entry *entry = kv_index_entry_find(index, &s);
        EXPECT(entry->tree != NULL && entry->tree == kv_index_entry_find(index, &f)->tree);
        EXPECT_EQ_U32(entry->tree->session_count, 2);
        EXPECT(kv_index_tree_open(index, entry->tree));
        EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 2);
        kv_index_close_idle(index, 8, 0);
        EXPECT_EQ_U32(kv_index_usage(index).sessions_open, 0);
        EXPECT_EQ_U32(kv_index_entry_find(index, &f)->tree->session_count, 2);
        kv_index_destroy(index);
    }
}

int main(void)
{
    test_names_do_not_collide();
    test_paths_take_the_deepest_page();
    test_pages_go_with_their_last_edge();
    test_limits_are_answers();
    test_sessions_take_from_the_budget();
    test_use_keeps_ancestors();
    test_sessions_at_rest_are_entries();
    test_ttl_of_the_user();
    test_heads_share_a_tree();
    test_entries_find_their_tree();
    HARNESS_END();
}
