/*
 * Per-request memory in chunks.
 *
 * The limit counts what was asked for (rounded to 16), so whether a request fits does not depend on
 * how its allocations fell into chunks.  A piece larger than a quarter of a chunk gets a chunk of
 * its own behind the current one: the rest of the current chunk stays in use, and at most a quarter
 * of any chunk is lost at its end.
 */

#include "kvstore/base/arena.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>

#define ARENA_ALIGN 16u
#define CHUNK_BYTES_FIRST 4096u
#define CHUNK_BYTES_MAX 65536u

struct chunk {
    struct chunk *next;
    size_t used;
    size_t bytes;
    size_t unused; /* Keeps data aligned to 16. */
    uint8_t data[];
};

_Static_assert(sizeof(struct chunk) % ARENA_ALIGN == 0, "data starts aligned");

/* Owned by: the request. */
struct kv_arena {
    struct chunk *current; /* First of the list; the only one that is filled further. */
    size_t chunk_bytes;    /* Size of the next ordinary chunk. */
    size_t used;
    size_t bytes_max;
};

struct kv_arena *kv_arena_create(size_t bytes_max)
{
    struct kv_arena *arena = calloc(1, sizeof(*arena));
    if (arena == NULL) return NULL;
    arena->chunk_bytes = CHUNK_BYTES_FIRST;
    arena->bytes_max = bytes_max;
    return arena;
}

void kv_arena_destroy(struct kv_arena *arena)
{
    if (arena == NULL) return;
    for (struct chunk *chunk = arena->current; chunk != NULL;) {
        struct chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
    free(arena);
}

static struct chunk *chunk_create(size_t bytes)
{
    struct chunk *chunk = calloc(1, sizeof(*chunk) + bytes);
    if (chunk != NULL) chunk->bytes = bytes;
    return chunk;
}

static void *take(struct chunk *chunk, size_t bytes)
{
    assert(chunk->bytes - chunk->used >= bytes);
    void *memory = chunk->data + chunk->used;
    chunk->used += bytes;
    return memory;
}

/* `bytes` is already rounded and within the limit. */
static void *alloc_within(struct kv_arena *arena, size_t bytes)
{
    struct chunk *current = arena->current;
    if (current != NULL && current->bytes - current->used >= bytes) return take(current, bytes);

    if (bytes > arena->chunk_bytes / 4) {
        struct chunk *own = chunk_create(bytes);
        if (own == NULL) return NULL;
        if (current == NULL) {
            arena->current = own;
        } else {
            own->next = current->next;
            current->next = own;
        }
        return take(own, bytes);
    }

    struct chunk *fresh = chunk_create(arena->chunk_bytes);
    if (fresh == NULL) return NULL;
    fresh->next = current;
    arena->current = fresh;
    arena->chunk_bytes = KV_MIN(arena->chunk_bytes * 2, CHUNK_BYTES_MAX);
    return take(fresh, bytes);
}

void *kv_arena_alloc(struct kv_arena *arena, size_t bytes)
{
    if (bytes > arena->bytes_max - arena->used) return NULL;
    /* Zero bytes get memory of their own too: NULL means exhausted and nothing else. */
    const size_t rounded = bytes == 0 ? ARENA_ALIGN : (size_t)kv_round_up(bytes, ARENA_ALIGN);
    if (rounded > arena->bytes_max - arena->used) return NULL;

    void *memory = alloc_within(arena, rounded);
    if (memory != NULL) arena->used += rounded;
    return memory;
}

char *kv_arena_strdup(struct kv_arena *arena, const char *text, size_t count)
{
    if (count == SIZE_MAX) return NULL;
    char *copy = kv_arena_alloc(arena, count + 1);
    if (copy == NULL) return NULL;
    if (count > 0) memcpy(copy, text, count);
    copy[count] = '\0';
    return copy;
}

size_t kv_arena_used(const struct kv_arena *arena)
{
    return arena->used;
}
