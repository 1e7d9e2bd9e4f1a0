#pragma once

/* Everything between a store and its disk in these tests, from the bottom up: a disk and a manifest
 * in memory, faults, recording, a planted bug.  The disk is recorded above its faults, because a
 * failed flush is part of what happened to it; the manifest below, because a batch that failed is
 * there or not there, and the next start finds out.  Owned by: the thread that calls it. */

#include "tests/seam/faulty.h"
#include "tests/seam/plant.h"
#include "tests/seam/record.h"

#define STACK_DIR "/state"

struct stack {
    struct recorder *recorder;
    struct faulty faulty;
    struct kv_disk *memory, *failing, *recording, *disk; /* The last is what a store is given. */
    struct kv_manifest *records, *recording_records, *manifest; /* Likewise. */
};

/* On a mem_disk, which is the stack's from here on. */
void stack_init(struct stack *stack, enum kv_plant plant, struct kv_disk *memory);
void stack_fini(struct stack *stack);
