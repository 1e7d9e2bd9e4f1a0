#pragma once

/*
 * Planted bugs: what the store would do if one rule were broken.  Some are wrappers between the
 * store and its disk and manifest, some replace a function of kvstore when the test is linked
 * (meson.build: --wrap); the code that is installed knows nothing of them.
 * Owned by: the thread that runs the disk.
 */

#include "kvstore/base/disk.h"
#include "kvstore/index/manifest.h"

enum plant {
    PLANT_NONE,
    PLANT_SHORT_OK,      /* A short completion is taken for a whole one. */
    PLANT_FLUSH_IGNORED, /* A failed flush is taken for a good one. */
    PLANT_ACK_FLUSH,     /* A save goes on before its flush is over. */
    PLANT_ACK_MANIFEST,  /* A save is acknowledged before its records are synced. */
    PLANT_NAMES,         /* Names of new files are not flushed. */
    PLANT_REUSE,         /* Space is reused before its deletion is durable. */
    PLANT_GENERATION,    /* Generations of pages are not compared. */
    PLANT_CHECKSUM,      /* Checksums of pages are not compared. */
    PLANT_SEGMENTS,      /* Segment records lack the places that their batch takes. */
    PLANT_COUNT,
};

/* PLANT_COUNT: no such name. */
enum plant plant_of(const char *name);
const char *plant_name(enum plant plant);
/* For the functions that are replaced; the wrappers are told. */
void plant_set(enum plant plant);

/* They own nothing but themselves. */
struct kv_disk *plant_disk(enum plant plant, struct kv_disk *inner);
struct kv_manifest *plant_manifest(enum plant plant, struct kv_manifest *inner);
