#pragma once

/*
 * What a power cut could leave of a recorded run, at any tick of it.
 *
 * A write is there if a later flush of its file had succeeded by then; of the others each is there,
 * or not, or torn at 512 B or 4 KiB.  A flush that failed covers nothing, and what it should have
 * covered stays uncertain for good.  A size is durable with a flush of the file, a name with one of
 * its folder.  Of the manifest all batches that were answered are there, and of those under way a
 * prefix.
 *
 * A lie goes further: a device that said it was flushed and lost, tore, or changed one page all the
 * same.  Then the store may have lost checkpoints, but must not give back a wrong byte.
 * Pure, but for the random numbers drawn.
 */

#include "kvstore/base/disk.h"
#include "kvstore/index/manifest.h"
#include "tests/driver/random.h"
#include "tests/seam/record.h"

enum image_lie {
    IMAGE_HONEST,
    IMAGE_LOST, /* A flushed page is what it was before. */
    IMAGE_TORN, /* Half of it is. */
    IMAGE_SWAP, /* Two flushed pages lie in each other's place. */
    IMAGE_FLIP, /* A bit of it is another. */
    IMAGE_LIES,
};

struct image {
    struct kv_disk *disk; /* mem_disk; the caller's. */
    uint32_t batches;     /* How many of the run's are in the manifest. */
    enum image_lie lie;   /* HONEST also where there was nothing to lie about. */
    uint64_t tick;
};

/* Folder `dir` exists on it. */
void image_build(const struct recorder *recorder, uint64_t tick, enum image_lie lie,
                 const char *dir, struct ex_random *random, struct image *ret_image);

/* Writes the image's batches, the first of the recorder, to an empty manifest. */
kv_status image_manifest(const struct recorder *recorder, const struct image *image,
                         struct kv_manifest *manifest) KV_MUST_CHECK;
