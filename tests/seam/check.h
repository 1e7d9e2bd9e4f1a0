#pragma once

/* Opens a store on what is left of a run, and compares it with what was promised by a tick of it.
 * Owned by: the thread that calls it. */

#include "tests/seam/work.h"

struct check {
    uint64_t acknowledged; /* Checkpoints that had to be there. */
    uint64_t found;        /* Of these, whole and right. */
    uint64_t lost;         /* Of these, not there. */
    uint64_t torn;         /* There, but not whole. */
    uint64_t wrong;        /* There, with other bytes than were saved; or never asked for. */
    uint64_t undead;       /* There, although their deletion had been acknowledged. */
    uint64_t refused;      /* Pages that the store refused to give. */
    uint64_t uneven;       /* Stores whose space in use was not what their records say. */
    uint64_t unopened;     /* Stores that did not open. */
    uint64_t alarms;       /* Stores that said acknowledged records were lost, and they were not. */
    bool may_read_trees;   /* Input: else a start that had to is uneven. */
    uint64_t lost_batches; /* What stores said of lost batches. */
    char first[256];       /* What was found wrong first; empty: nothing. */
};

/* Adds to *check.  `lying`: the device lost pages it had flushed, so checkpoints may be lost or not
 * whole, but not wrong. */
void check_store(struct check *check, const struct work *work, struct kv_disk *disk,
                 struct kv_manifest *manifest, uint64_t tick, bool lying);

/* Sum of what may never be. */
uint64_t check_failures(const struct check *check);
