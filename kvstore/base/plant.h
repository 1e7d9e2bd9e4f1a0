#pragma once

/*
 * Planted bugs: a test that must find a loss is shown one.
 *
 * Only in builds with CACHED_TEST_HOOKS: elsewhere KV_PLANTED is false, and what stands behind it
 * is not compiled in.
 */

#include <string.h>

#define KV_PLANTS(X)                                                                               \
    X(ACK_BEFORE_FLUSH, "ack-before-flush")       /* As soon as the write was submitted. */        \
    X(ACK_BEFORE_SYNC, "ack-before-sync")         /* When the records were handed over. */         \
    X(CHECKSUM_OFF, "checksum-off")               /* A page that was read is believed. */          \
    X(TORN_RECORD, "torn-record")                 /* Nodes before their pages; both are loaded. */ \
    X(REUSE_BEFORE_DELETE, "reuse-before-delete") /* Old places are free before it is recorded. */ \
    X(ACK_BEFORE_DELETE, "ack-before-delete")     /* A deletion, when it was handed over. */

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
