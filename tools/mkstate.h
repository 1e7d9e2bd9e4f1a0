#pragma once

/*
 * mkstate: writes a state directory of many users, sessions and checkpoints, for tests and
 * benchmarks of a daemon's start.
 *
 * mkstate.c reads the command line; mkstate_write.c saves through the real store;
 * mkstate_content.c says what the sessions hold.
 */

#include "kvstore/base/status.h"

#include <stdint.h>

#define MKSTATE_CHECKPOINTS_MAX 100000000u
#define MKSTATE_PER_SESSION_MAX 4096u /* Checkpoints. */

struct mkstate_plan {
    const char *dir;
    const char *master_key; /* File; NULL: nothing is encrypted. */
    uint64_t checkpoints, seed;
    uint32_t users, sessions; /* Sessions of each user. */
};

struct mkstate_made {
    uint64_t checkpoints, sessions, users, pages, bytes;
    uint32_t segments;
};

/* Checkpoints of the session with this number over all users: they differ by a quarter up and
 * down, and their sum over all sessions is plan->checkpoints. */
uint32_t mkstate_checkpoints_of(const struct mkstate_plan *plan, uint64_t session);

/* dir is empty.  KV_IO, KV_INVALID, KV_NOMEM with a sentence; what was saved stays. */
kv_status mkstate_write(const struct mkstate_plan *plan, struct mkstate_made *ret_made,
                        struct kv_error *err) KV_MUST_CHECK;
