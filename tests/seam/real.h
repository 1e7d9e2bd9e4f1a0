#pragma once

/* An image on a real file system, with a real RocksDB: what every now and then stands in for
 * memory. Owned by: the thread that calls it. */

#include "tests/seam/image.h"

struct real {
    char dir[128]; /* A fresh folder below the working directory. */
    struct kv_disk *disk;
    struct kv_manifest *manifest;
};

/* Writes the image's files, and its batches through RocksDB, closes and opens it.  KV_IO with
 * words: the folder's file system failed. */
kv_status real_open(struct real *real, const struct recorder *recorder, const struct image *image,
                    const char *image_dir, struct kv_error *err) KV_MUST_CHECK;
/* Removes the folder. */
void real_close(struct real *real);
