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

int main(void)
{
    test_names_do_not_collide();
    test_paths_take_the_deepest_page();
    test_pages_go_with_their_last_edge();
    test_limits_are_answers();
    test_sessions_take_from_the_budget();
    test_use_keeps_ancestors();
    HARNESS_END();
}
