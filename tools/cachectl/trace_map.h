#pragma once

/* Map from a 64-bit id to a 32-bit number that grows as needed.  Zero-initialised is empty.  Owned
 * by: whoever embeds it; no locking. */

#include "kvstore/base/status.h"

#include <stdint.h>

/* No value may be this: it marks a free slot. */
#define TRACE_MAP_NONE UINT32_MAX

struct trace_map_slot {
    uint64_t key;
    uint32_t value;
};

struct trace_map {
    struct trace_map_slot *slots;
    uint32_t capacity; /* A power of two, or 0. */
    uint32_t count;
};

/* Inserts or replaces. */
KV_MUST_CHECK kv_status trace_map_put(struct trace_map *map, uint64_t key, uint32_t value);

/* TRACE_MAP_NONE when the key is not there. */
uint32_t trace_map_get(const struct trace_map *map, uint64_t key);

void trace_map_fini(struct trace_map *map);
