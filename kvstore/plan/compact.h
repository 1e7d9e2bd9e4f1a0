#pragma once

/*
 * Compaction: which segments are emptied, and how fast.
 *
 * A segment of which less than a part still lives is emptied: what lives in it is written
 * elsewhere, beside what belongs with it, and the whole file is one free run again.  Chosen are
 * those with the least to move, and only as many as the free pages of the others can take, less a
 * reserve, so that compaction never takes the room that saves need.  The segment that is being
 * filled is no candidate: what is in it was just written.
 *
 * Pure: no I/O, no clock, no allocation.
 */

#include <stdbool.h>
#include <stdint.h>

/* Emptied together, because finding their records is one scan. */
#define KV_COMPACT_SEGMENTS_MAX 8u

struct kv_compact_segment {
    uint32_t number;
    uint32_t pages;  /* 0: no such file. */
    uint32_t used;   /* 0: nothing to move. */
    bool is_filling; /* The lowest one with free pages. */
};

struct kv_compact_options {
    uint32_t below_thousandths; /* Of its pages; 0: never. */
    uint32_t reserve;           /* Pages that stay free outside of what is emptied. */
};

/* Returns how many, at most KV_COMPACT_SEGMENTS_MAX, with their numbers, least used first. */
uint32_t kv_compact_choose(const struct kv_compact_segment *segments, uint32_t count,
                           const struct kv_compact_options *options,
                           uint32_t ret_numbers[KV_COMPACT_SEGMENTS_MAX]);

/* Whether nothing in a segment can be used any more: its latest use is longer ago than any session
 * of the store keeps what it has.  It goes as a whole then, whatever lives in the others. */
bool kv_compact_expired(uint64_t used_ms, uint64_t life_ms, uint64_t now_ms);

/* Since nothing may be saved up, a pause does not make the next second faster.  Returns when the
 * next bytes may move; next_ns: what the last call returned, 0 at first. */
uint64_t kv_compact_next_ns(uint64_t next_ns, uint64_t now_ns, uint64_t bytes,
                            uint64_t bytes_per_second);
