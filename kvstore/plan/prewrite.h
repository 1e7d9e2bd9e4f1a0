#pragma once

/*
 * How far ahead of its use space on SSD is made.
 *
 * A page written for the first time into reserved space makes the file system note that it is
 * written now, and the next flush waits for that note: several times as long as a flush of pages
 * that were written before.  So free pages are written through (with zeros) before anybody needs
 * them: as much again as is in use, at most two segments, and at least a little.  A small or new
 * store writes little ahead, one that grows never catches up.
 *
 * Pure: no I/O, no clock, no allocation, any thread.
 */

#include <stdbool.h>
#include <stdint.h>

#define KV_PREWRITE_SEGMENTS 2u

struct kv_prewrite {
    uint32_t used;          /* Pages. */
    uint32_t free;          /* Pages of segments that are there, */
    uint32_t written;       /* and those of them that were written through. */
    uint32_t segment_pages; /* Of one segment. */
    uint32_t least;         /* Pages kept ahead even when nothing is in use. */
    bool may_make;          /* Another segment is allowed, and making the last one did not fail. */
};

enum kv_prewrite_step {
    KV_PREWRITE_NOTHING,
    KV_PREWRITE_PAGES,   /* Write free pages through. */
    KV_PREWRITE_SEGMENT, /* Make another one. */
};

enum kv_prewrite_step kv_prewrite_next(const struct kv_prewrite *state);
