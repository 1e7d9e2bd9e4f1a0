#pragma once

/* Per-request memory: grows in chunks, is freed whole.  Owned by one request at a time.
 * Limit: bytes_max in total; beyond it alloc returns NULL. */

#include <stddef.h>
#include <stdint.h>

struct kv_arena;

struct kv_arena *kv_arena_create(size_t bytes_max); /* NULL when out of memory. */
void kv_arena_destroy(struct kv_arena *arena);      /* NULL is fine. */

/* Zeroed, aligned to 16.  NULL when the limit or memory is exhausted. */
void *kv_arena_alloc(struct kv_arena *arena, size_t bytes);
char *kv_arena_strdup(struct kv_arena *arena, const char *text, size_t count);
size_t kv_arena_used(const struct kv_arena *arena);
