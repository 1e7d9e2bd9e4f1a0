/*
 * Per-request memory.
 *
 * Goal: pieces are zeroed, aligned and disjoint whatever their sizes; the limit is exact and does
 * not depend on chunks; an exhausted arena still serves what fits.
 */

#include "kvstore/base/arena.h"
#include "tests/harness.h"

#define PIECES 2000u

static void test_pieces(void)
{
    static uint8_t *pieces[PIECES];
    static size_t sizes[PIECES];
    struct kv_arena *arena = kv_arena_create(64u << 20);
    uint32_t state = 7;
    size_t used = 0;
    for (uint32_t i = 0; i < PIECES; i++) {
        state = state * 1664525u + 1013904223u;
        sizes[i] = (state >> 8) % (i % 50 == 0 ? 100000u : 300u);
        pieces[i] = kv_arena_alloc(arena, sizes[i]);
        EXPECT(pieces[i] != NULL);
        EXPECT((uintptr_t)pieces[i] % 16 == 0);
        for (size_t j = 0; j < sizes[i]; j++)
            if (pieces[i][j] != 0) EXPECT(false);
        memset(pieces[i], (int)(i % 255 + 1), sizes[i]);
        used += sizes[i] == 0 ? 16 : (sizes[i] + 15) / 16 * 16;
        EXPECT_EQ_U64(kv_arena_used(arena), used);
    }
    for (uint32_t i = 0; i < PIECES; i++)
        for (size_t j = 0; j < sizes[i]; j++)
            if (pieces[i][j] != i % 255 + 1) EXPECT(false);
    kv_arena_destroy(arena);
    kv_arena_destroy(NULL);
}

static void test_limit(void)
{
    struct kv_arena *arena = kv_arena_create(1000);
    EXPECT(kv_arena_alloc(arena, 1001) == NULL);
    EXPECT(kv_arena_alloc(arena, SIZE_MAX) == NULL);
    EXPECT(kv_arena_alloc(arena, SIZE_MAX - 8) == NULL);
    EXPECT(kv_arena_alloc(arena, 900) != NULL); /* 912 */
    EXPECT(kv_arena_alloc(arena, 89) == NULL);
    EXPECT(kv_arena_alloc(arena, 80) != NULL); /* 992 */
    EXPECT(kv_arena_alloc(arena, 1) == NULL);
    EXPECT(kv_arena_alloc(arena, 0) == NULL);
    EXPECT_EQ_U64(kv_arena_used(arena), 992);
    kv_arena_destroy(arena);

    /* Exactly full, in pieces that fit no chunk well. */
    arena = kv_arena_create(16u * 1000);
    for (int i = 0; i < 10; i++)
        EXPECT(kv_arena_alloc(arena, 1600) != NULL);
    EXPECT(kv_arena_alloc(arena, 1) == NULL);
    kv_arena_destroy(arena);

    arena = kv_arena_create(0);
    EXPECT(kv_arena_alloc(arena, 1) == NULL);
    EXPECT(kv_arena_alloc(arena, 0) == NULL);
    kv_arena_destroy(arena);
}

static void test_strdup(void)
{
    struct kv_arena *arena = kv_arena_create(100);
    EXPECT_EQ_STR(kv_arena_strdup(arena, "session/7", 7), "session");
    EXPECT_EQ_STR(kv_arena_strdup(arena, NULL, 0), "");
    EXPECT(kv_arena_strdup(arena, "x", SIZE_MAX) == NULL);
    kv_arena_destroy(arena);
}

int main(void)
{
    test_pieces();
    test_limit();
    test_strdup();
    HARNESS_END();
}
