#pragma once

/*
 * Faulty: a disk and a manifest that count what passes through them to those they wrap, and make
 * one call, or all from one on, fail.  A fault waits for the first call that it fits: a short read
 * for a read.  Owned by: the thread that runs the disk.  For tests.
 *
 * The first seven are errors a device may report.  The last three are lies of a device that
 * reports success (R10 of the guarantees): a write that went nowhere, one that went to the place of
 * the write before it and that one to its, one that brought back what was written there earlier.
 */

#include "kvstore/base/disk.h"
#include "kvstore/index/manifest.h"

enum fault {
    FAULT_EIO,
    FAULT_ENOSPC,
    FAULT_EINTR,
    FAULT_EAGAIN,
    FAULT_SHORT_WRITE,
    FAULT_SHORT_READ,
    FAULT_LENGTH, /* More than was asked. */
    FAULT_DROP,
    FAULT_SWAP,
    FAULT_REPLAY,
    FAULT_COUNT,
};
#define FAULT_ERRORS ((uint32_t)FAULT_DROP) /* How many are errors. */

struct faulty_state; /* Of the wrappers. */

struct faulty {
    /* Set by the test at any time. */
    bool armed;
    enum fault fault;
    uint64_t from; /* Calls are numbered from 1. */
    bool for_ever; /* Not once. */
    bool flushes;  /* Only flushes of files fail. */
    /* Results. */
    uint64_t calls;              /* Tries of the disk and batches of the manifest. */
    uint64_t fired[FAULT_COUNT]; /* Calls that really failed, or lied. */
    bool fired_sync;             /* One was the SYNC of an op. */
    bool fired_write;            /* One was the WRITE of an op, not of a note. */
    bool fired_batch;
    int fired_call;       /* Verb of the last one; KV_DISK_VERB_COUNT: a batch. */
    bool manifest_failed; /* Later batches fail too, until the test says it was reopened. */
    struct faulty_state *state;
};

const char *fault_name(enum fault fault);

/* Zero *faulty first.  The wrappers own neither what they wrap nor it; faulty_fini() after them. */
struct kv_disk *faulty_disk(struct faulty *faulty, struct kv_disk *inner);
struct kv_manifest *faulty_manifest(struct faulty *faulty, struct kv_manifest *inner);
void faulty_fini(struct faulty *faulty);
