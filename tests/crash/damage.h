#pragma once

/* One random bit in a state directory: where it can be, and turning it over. */

#include "tests/crash/expect.h"

enum { CR_FILES_MAX = 256, CR_PAGES_MAX = 4096, CR_PATH_BYTES = 400 };

/* Pages of a session in the segment files, current and old ones. */
struct cr_page {
    uint32_t file; /* Of cr_damage.segments. */
    uint64_t offset;
    struct cr_session *owner;
};

struct cr_damage {
    char segments[CR_FILES_MAX][CR_PATH_BYTES];
    uint32_t segment_count;
    char index[CR_FILES_MAX][CR_PATH_BYTES]; /* RocksDB's, but for its logs in words. */
    uint32_t index_count;
    struct cr_page pages[CR_PAGES_MAX];
    uint32_t page_count;
    uint32_t page_bytes;
};

/* Copies a state directory that no daemon uses; `to` must not exist. */
void cr_copy_tree(const char *from, const char *to);

/* Finds files, and pages with the sessions whose tokens they hold, encrypted ones with the master
 * key (NULL: none is).  Files of a copy are found by
 * cr_damage_files(); its segments are those of the original. */
void cr_damage_scan(struct cr_damage *damage, const char *state, uint32_t page_bytes,
                    const uint8_t *master, struct cr_writer *writers, uint32_t writer_count);
void cr_damage_files(struct cr_damage *damage, const char *state);

/* What was done, in words for a failure. */
struct cr_flip {
    char text[CR_PATH_BYTES + 80];
    struct cr_session *owner; /* NULL: not one session's. */
};

/* A bit of a page whose owner is not marked yet, which it marks; false: none is left. */
bool cr_flip_page(struct cr_damage *damage, struct ex_random *random, struct cr_flip *ret_flip);
void cr_flip_segment_header(struct cr_damage *damage, struct ex_random *random,
                            struct cr_flip *ret_flip);
void cr_flip_index(struct cr_damage *damage, struct ex_random *random, struct cr_flip *ret_flip);
/* Of a file of two copies, 4 KiB each: "superblock", "acknowledged". */
void cr_flip_twin(const char *state, const char *name, struct ex_random *random,
                  struct cr_flip *ret_flip);

/* stock.c: one more session of the writer's, of two or three turns, stored.  It ends before a turn
 * whose call fails, which is counted. */
void cr_stock(struct cr_writer *writer);
