#pragma once

/*
 * A disk in memory, for tests: folders by path, files by name, no kernel.  Ops finish in a random
 * order that only the seed decides, a few per run.  Like O_DIRECT it refuses transfers that are not
 * a multiple of 512 B.  Owned by: the thread that runs it.
 */

#include "kvstore/base/disk.h"

/* The folder `dir` is there already; NULL when out of memory.  kv_disk_destroy() frees it. */
struct kv_disk *mem_disk_create(const char *dir, uint64_t seed);

/* Puts a file there before anybody runs it (its folder is made if need be); takes the bytes over.
 */
void mem_disk_add(struct kv_disk *disk, const char *dir, const char *name, uint8_t *bytes,
                  uint64_t size);

struct mem_disk_file {
    const char *dir;
    const char *name;
    uint8_t *bytes; /* The disk's; tests may damage them. */
    uint64_t size;
};
/* The i-th file that has a name; false: there are no more. */
bool mem_disk_file(struct kv_disk *disk, uint32_t i, struct mem_disk_file *ret_file);
