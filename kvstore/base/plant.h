#pragma once

/*
 * Planted bugs: a test that must find a loss is shown one.  One list for the daemon (cached-test
 * --plant NAME) and for the store on the disks of tests/seam/; the last group are bugs between a
 * store and its disk, which only those disks can play.
 *
 * Only in builds with CACHED_TEST_HOOKS: elsewhere KV_PLANTED is false, and what stands behind it
 * is not compiled in.
 */

#include <string.h>

#define KV_PLANTS(X)                                                                               \
    X(ACK_BEFORE_FLUSH, "ack-before-flush")       /* As soon as the write was submitted. */        \
    X(ACK_BEFORE_SYNC, "ack-before-sync")         /* When the records were handed over. */         \
    X(CHECKSUM_OFF, "checksum-off")               /* Checksums of pages are not compared. */       \
    X(NO_GENERATION, "no-generation")             /* Nor are their generations. */                 \
    X(HEADER_UNBOUND, "header-unbound")           /* Nor user, position and what stands before. */ \
    X(TORN_RECORD, "torn-record")                 /* Nodes before their pages; both are loaded. */ \
    X(REUSE_BEFORE_DELETE, "reuse-before-delete") /* Old places are free before it is recorded. */ \
    X(ACK_BEFORE_DELETE, "ack-before-delete")     /* A deletion, when it was handed over. */       \
    X(SEGMENTS_BEHIND, "segments-behind")         /* They lack what their batch takes. */          \
    X(TTL_ONLY_SWEPT, "ttl-only-swept")           /* Age is judged by the sweep, not at lookup. */ \
    /* No bugs: the process ends in the middle of a rotation, */                                   \
    X(ROTATE_CUT_BEFORE, "rotate-cut-before") /* before the records, */                            \
    X(ROTATE_CUT_AFTER, "rotate-cut-after")   /* and behind them. */                               \
    /* Of disks: tests/seam/plant.h. */                                                            \
    X(SHORT_ACCEPTED, "short-accepted")       /* A short completion is taken for a whole one. */   \
    X(FLUSH_IGNORED, "flush-ignored")         /* A failed flush is taken for a good one. */        \
    X(NAMES_NOT_FLUSHED, "names-not-flushed") /* Names of new files are not flushed. */

enum kv_plant {
    KV_PLANT_NONE,
#define KV_PLANT_ENUM(id, name) KV_PLANT_##id,
    KV_PLANTS(KV_PLANT_ENUM)
#undef KV_PLANT_ENUM
};

#ifdef CACHED_TEST_HOOKS
#define KV_PLANTED(store, id) ((store)->options.plant == KV_PLANT_##id)
#else
#define KV_PLANTED(store, id) false
#endif

/* NONE: no plant of the store's. */
static inline enum kv_plant kv_plant_of(const char *name)
{
#ifdef CACHED_TEST_HOOKS
#define KV_PLANT_FIND(id, text)                                                                    \
    if (name != NULL && strcmp(name, text) == 0) return KV_PLANT_##id;
    KV_PLANTS(KV_PLANT_FIND)
#undef KV_PLANT_FIND
#else
    (void)name;
#endif
    return KV_PLANT_NONE;
}
