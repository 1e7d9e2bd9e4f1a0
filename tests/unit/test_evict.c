/*
 * What goes when the SSD tier is full.
 *
 * Goal: the order (expired, above their fair share, least recent; leaf first; nothing that is used
 * or saved), how much goes and when it begins, and what follows from them: a user who fills the
 * tier pushes out his own.
 * Method: tables for the rules; then users who fill a tier, played save by save, against one who
 * does not.
 */

#include "kvstore/plan/evict.h"
#include "tests/harness.h"

/* ---- classes and order ---- */

static void test_rank(void)
{
    const struct {
        const char *what;
        struct kv_evict_facts facts;
        enum kv_evict_class kind;
        uint8_t held;
    } cases[] = {
        {"nothing to gain", {.used_ms = 1, .user_pages = 500}, KV_EVICT_NEVER, 0},
        {"nothing to gain, expired", {.is_expired = true}, KV_EVICT_NEVER, 0},
        {"expired", {.pages = 1, .user_pages = 1, .is_expired = true}, KV_EVICT_EXPIRED, 0},
        {"expired, of a user above his share",
         {.pages = 1, .user_pages = 101, .is_expired = true},
         KV_EVICT_EXPIRED,
         0},
        {"above the share", {.pages = 1, .user_pages = 101}, KV_EVICT_ABOVE_SHARE, 0},
        {"exactly the share", {.pages = 100, .user_pages = 100}, KV_EVICT_OTHER, 0},
        {"live, idle", {.pages = 1, .user_pages = 1, .is_idle = true}, KV_EVICT_OTHER, 1},
        {"live, idle, expired",
         {.pages = 1, .user_pages = 1, .is_idle = true, .is_expired = true},
         KV_EVICT_EXPIRED,
         1},
        {"a call works on it",
         {.pages = 9, .user_pages = 101, .is_in_use = true},
         KV_EVICT_NEVER,
         0},
        {"a call works on it, expired",
         {.pages = 9, .user_pages = 9, .is_in_use = true, .is_expired = true},
         KV_EVICT_NEVER,
         0},
        {"it waits for room itself",
         {.pages = 9, .user_pages = 101, .is_in_use = true, .is_saving = true},
         KV_EVICT_ABOVE_SHARE,
         2},
        {"it waits for room itself: what it saves does not expire",
         {.pages = 9, .user_pages = 9, .is_in_use = true, .is_saving = true, .is_expired = true},
         KV_EVICT_OTHER,
         2},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        (void)printf("  %s\n", cases[i].what);
        const struct kv_evict_rank rank = kv_evict_rank(&cases[i].facts, 100);
        EXPECT_EQ_U32(rank.kind, cases[i].kind);
        if (rank.kind != KV_EVICT_NEVER) EXPECT_EQ_U32(rank.held, cases[i].held);
        EXPECT_EQ_U64(rank.used_ms, cases[i].facts.used_ms);
    }
    EXPECT_EQ_U32(kv_evict_share(1000, 3), 333);
    EXPECT_EQ_U32(kv_evict_share(1000, 0), 1000);
}

static void test_before(void)
{
    /* In the order in which they go. */
    static const struct kv_evict_rank order[] = {
        {KV_EVICT_EXPIRED, 0, 90},     {KV_EVICT_EXPIRED, 1, 10},     {KV_EVICT_ABOVE_SHARE, 0, 50},
        {KV_EVICT_ABOVE_SHARE, 0, 60}, {KV_EVICT_ABOVE_SHARE, 1, 40}, {KV_EVICT_ABOVE_SHARE, 2, 5},
        {KV_EVICT_OTHER, 0, 1},        {KV_EVICT_OTHER, 0, 2},        {KV_EVICT_OTHER, 1, 0},
        {KV_EVICT_OTHER, 2, 0},
    };
    const size_t count = sizeof(order) / sizeof(order[0]);
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < count; k++)
            EXPECT(kv_evict_before(&order[i], &order[k]) == (i < k));
    }
}

static struct kv_session_id session(uint32_t number)
{
    struct kv_session_id id = {{0}};
    memcpy(id.bytes, &number, sizeof(number));
    return id;
}

static void offer(struct kv_evict_list *list, enum kv_evict_class kind, uint64_t used_ms,
                  uint32_t number)
{
    const struct kv_evict_rank rank = {.kind = kind, .used_ms = used_ms};
    const struct kv_session_id id = session(number);
    kv_evict_offer(list, &rank, &id);
}

static void test_list(void)
{
    struct kv_evict_list list = {.count = 0};
    offer(&list, KV_EVICT_NEVER, 1, 1);
    EXPECT_EQ_U32(list.count, 0);
    /* 7 is prime to 1000: every age once, in a mixed order. */
    for (uint32_t i = 0; i < 1000; i++)
        offer(&list, KV_EVICT_OTHER, i * 7 % 1000, i * 7 % 1000);
    EXPECT_EQ_U32(list.count, KV_EVICT_CANDIDATES_MAX);
    for (uint32_t i = 0; i < list.count; i++) {
        const struct kv_session_id id = session(i);
        EXPECT_EQ_U64(list.candidates[i].rank.used_ms, i);
        EXPECT(kv_id_equal(list.candidates[i].session.bytes, id.bytes));
    }
    offer(&list, KV_EVICT_ABOVE_SHARE, 5000, 2000);
    offer(&list, KV_EVICT_EXPIRED, 6000, 2001);
    offer(&list, KV_EVICT_OTHER, 999, 2002);
    const struct kv_session_id first = session(2001), second = session(2000), third = session(0);
    EXPECT(kv_id_equal(list.candidates[0].session.bytes, first.bytes));
    EXPECT(kv_id_equal(list.candidates[1].session.bytes, second.bytes));
    EXPECT(kv_id_equal(list.candidates[2].session.bytes, third.bytes));
    EXPECT_EQ_U64(list.candidates[list.count - 1].rank.used_ms, KV_EVICT_CANDIDATES_MAX - 3);
}

static void test_leaf(void)
{
    static const struct kv_evict_leaf order[] = {
        {.used_ms = 1, .tokens = 10},
        {.used_ms = 2, .tokens = 900}, /* Of one age the deeper. */
        {.used_ms = 2, .tokens = 100},
        {.used_ms = 0, .tokens = 5, .is_kept = true},
    };
    for (size_t i = 0; i < 4; i++) {
        for (size_t k = 0; k < 4; k++)
            if (i != k) EXPECT(kv_evict_leaf_before(&order[i], &order[k]) == (i < k));
    }
}

/* ---- how much ---- */

static void test_need(void)
{
    const struct {
        const char *what;
        struct kv_evict_space space;
        uint32_t need;
    } cases[] = {
        {"empty", {.limit = 3200}, 0},
        {"the reserve is free", {.limit = 3200, .used = 3100}, 0},
        {"one page less", {.limit = 3200, .used = 3101}, 51},
        {"begun: on until half as much again", {3200, 3100, 0, 0, true}, 50},
        {"begun: done", {3200, 3050, 0, 0, true}, 0},
        {"what is on its way counts", {3200, 3200, 100, 0, false}, 0},
        {"full", {.limit = 3200, .used = 3200}, 150},
        {"a save waits", {3200, 3200, 0, 40, false}, 190},
        {"a save waits and fits", {3200, 3000, 0, 40, false}, 0},
        {"a save waits for more than there is", {3200, 100, 0, 9000, false}, 100},
        {"the limit fell below what is used", {.limit = 320, .used = 400}, 95},
        {"no room at all", {.limit = 0, .used = 7}, 7},
        {"a tier of a few pages has no reserve", {.limit = 31, .used = 31}, 0},
        {"nothing can be had of nothing", {0}, 0},
        {"more is being freed than used", {10, 5, 9, 0, true}, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        (void)printf("  %s\n", cases[i].what);
        EXPECT_EQ_U32(kv_evict_need(&cases[i].space), cases[i].need);
    }
}

/* ---- what follows ---- */

enum { PLAY_USERS = 4, PLAY_SESSIONS = 400, PLAY_PAGES = 1000, PLAY_EACH = 10 };

struct play {
    struct {
        uint32_t user, pages;
        uint64_t used_ms;
    } sessions[PLAY_SESSIONS];
    uint32_t used, user_pages[PLAY_USERS];
};

static bool evict_one(struct play *play)
{
    struct kv_evict_list list = {.count = 0};
    uint32_t users = 0, victim;
    for (uint32_t u = 0; u < PLAY_USERS; u++)
        users += play->user_pages[u] > 0;
    const uint32_t share = kv_evict_share(PLAY_PAGES, users);
    for (uint32_t i = 0; i < PLAY_SESSIONS; i++) {
        const struct kv_evict_facts facts = {.used_ms = play->sessions[i].used_ms,
                                             .pages = play->sessions[i].pages,
                                             .user_pages =
                                                 play->user_pages[play->sessions[i].user]};
        const struct kv_evict_rank rank = kv_evict_rank(&facts, share);
        const struct kv_session_id id = session(i);
        kv_evict_offer(&list, &rank, &id);
    }
    if (list.count == 0) return false;
    memcpy(&victim, list.candidates[0].session.bytes, sizeof(victim));
    play->used -= play->sessions[victim].pages;
    play->user_pages[play->sessions[victim].user] -= play->sessions[victim].pages;
    play->sessions[victim].pages = 0;
    return true;
}

static void save(struct play *play, uint32_t number, uint32_t user, uint64_t now_ms)
{
    play->user_pages[user] += PLAY_EACH; /* What is being saved counts from the start. */
    while (play->used + PLAY_EACH > PLAY_PAGES)
        EXPECT(evict_one(play));
    play->sessions[number].user = user;
    play->sessions[number].pages = PLAY_EACH;
    play->sessions[number].used_ms = now_ms;
    play->used += PLAY_EACH;
}

/* User 0 saved his share long ago; others fill the tier many times over. */
static void test_a_flood_is_its_own_victim(void)
{
    struct play play = {.used = 0};
    uint64_t now_ms = 0;
    uint32_t next = 0;
    for (; next < 25; next++)
        save(&play, next, 0, ++now_ms);
    for (uint32_t i = 0; i < 3000; i++) {
        const uint32_t user = 1 + i % (PLAY_USERS - 1);
        uint32_t at = 25 + i % (PLAY_SESSIONS - 25);
        while (play.sessions[at].pages > 0)
            at = at + 1 < PLAY_SESSIONS ? at + 1 : 25;
        save(&play, at, user, ++now_ms);
        EXPECT_EQ_U32(play.user_pages[0], 25 * PLAY_EACH);
        EXPECT(play.used <= PLAY_PAGES);
    }
    for (uint32_t u = 1; u < PLAY_USERS; u++)
        EXPECT_EQ_U32(play.user_pages[u], 250);
}

int main(void)
{
    test_rank();
    test_before();
    test_list();
    test_leaf();
    test_need();
    test_a_flood_is_its_own_victim();
    HARNESS_END();
}
