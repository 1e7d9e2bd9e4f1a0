#pragma once

/*
 * A fixed random script of saves, restores, deletes and restarts on one store, and the record of
 * what the store promised: when each checkpoint was asked for, acknowledged, deleted.  Times are
 * ticks of the recorder, so they compare with its log.  Owned by: the thread that calls it.
 */

#include "tests/driver/random.h"
#include "tests/seam/content.h"
#include "tests/seam/faulty.h"
#include "tests/seam/record.h"
#include "tests/seam/space.h"
#include "tests/seam/world.h"

#define WORK_POINTS_MAX 1024u
#define WORK_NEVER UINT64_MAX

/* A checkpoint somebody asked for. */
struct work_point {
    struct kv_checkpoint_id id;
    uint32_t session, life, tokens;
    uint64_t saved;        /* Acknowledged. */
    uint64_t drop_begun;   /* Deletion decided. */
    uint64_t drop_durable; /* Deletion acknowledged. */
};

struct work_session {
    uint32_t life, lives;
    bool known; /* Its user and itself are recorded. */
    uint32_t busy;
};

struct work_options {
    struct kv_disk *disk; /* As the store sees it; borrowed, like all of these. */
    struct kv_manifest *manifest;
    struct recorder *recorder;
    struct faulty *faulty; /* NULL: none. */
    const char *dir;
    uint64_t seed;
    uint32_t rounds;
};

struct work {
    struct work_options options;
    struct ex_random random;
    struct world world;
    struct work_session sessions[CONTENT_SESSIONS];
    struct work_point points[WORK_POINTS_MAX];
    uint32_t point_count;
    uint64_t saves, saves_failed, restores, pages_missed, drops, moves;
    uint64_t erased; /* Pages; of free ones. */
    uint64_t damaged, wrong;          /* Pages given back that are not what was saved. */
    kv_status open_status;            /* Of the last start. */
    bool read_only;                   /* The tier was, before a restart or at the end. */
    uint64_t restarted;               /* Tick. */
    bool stuck;                       /* Something never ended. */
    bool uneven;                      /* Space was not what records say, */
    char uneven_why[SPACE_WHY_BYTES]; /* the first time. */
};

/* Runs all of it, and leaves the store closed. */
void work_run(struct work *work, const struct work_options *options);
/* The same once more, after `before` was cut off at a tick of its recorder: on what is left of it,
 * with its promises, and with a recorder of its own. */
void work_resume(struct work *work, const struct work_options *options, const struct work *before,
                 uint64_t tick);

/* NULL: nobody asked for such a checkpoint. */
const struct work_point *work_find(const struct work *work, uint32_t session,
                                   const struct kv_checkpoint_id *id);
