/*
 * Open addressing with linear probing, at most half full.
 *
 * The statistics of the agentic file look up 76 million block ids.  Ids of one prompt follow each
 * other, and multiplying by one odd constant keeps a session's table small enough for the cache, so
 * all of them take about a second.
 */

#include "tools/cachectl/trace_map.h"

#include <assert.h>
#include <stdlib.h>

enum { CAPACITY_FIRST = 64 };

static uint32_t slot_of(const struct trace_map *map, uint64_t key)
{
    const uint32_t mask = map->capacity - 1;
    uint32_t at = (uint32_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & mask;

    while (map->slots[at].value != TRACE_MAP_NONE && map->slots[at].key != key)
        at = (at + 1) & mask;
    return at;
}

static kv_status grow(struct trace_map *map)
{
    if (map->capacity > UINT32_MAX / 4) return KV_NOMEM;

    struct trace_map bigger = {.count = map->count};
    bigger.capacity = map->capacity == 0 ? CAPACITY_FIRST : 2 * map->capacity;
    bigger.slots = malloc(bigger.capacity * sizeof(*bigger.slots));
    if (bigger.slots == NULL) return KV_NOMEM;
    for (uint32_t i = 0; i < bigger.capacity; i++)
        bigger.slots[i] = (struct trace_map_slot){0, TRACE_MAP_NONE};
    for (uint32_t i = 0; i < map->capacity; i++) {
        if (map->slots[i].value == TRACE_MAP_NONE) continue;
        bigger.slots[slot_of(&bigger, map->slots[i].key)] = map->slots[i];
    }
    free(map->slots);
    *map = bigger;
    return KV_OK;
}

kv_status trace_map_put(struct trace_map *map, uint64_t key, uint32_t value)
{
    assert(value != TRACE_MAP_NONE);

    if (map->capacity == 0 || map->count + 1 > map->capacity / 2) {
        const kv_status status = grow(map);
        if (status != KV_OK) return status;
    }
    struct trace_map_slot *slot = &map->slots[slot_of(map, key)];
    if (slot->value == TRACE_MAP_NONE) map->count++;
    *slot = (struct trace_map_slot){key, value};
    return KV_OK;
}

uint32_t trace_map_get(const struct trace_map *map, uint64_t key)
{
    if (map->capacity == 0) return TRACE_MAP_NONE;
    return map->slots[slot_of(map, key)].value;
}

void trace_map_fini(struct trace_map *map)
{
    free(map->slots);
    *map = (struct trace_map){0};
}
