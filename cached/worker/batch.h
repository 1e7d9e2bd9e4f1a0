#pragma once

/*
 * What the next pass of the engine computes: which jobs, and how many rows of each.
 *
 * A pass has room for `pass_rows` encoder rows and as many decoder rows.  The rules, in order:
 *
 *   1. Every step (a decoding session) gets its first row, whoever it belongs to.  With more steps
 *      than room they take turns, and prefills keep a quarter of the pass, so neither starves.
 *   2. What steps ask for beyond it (drafts to verify) comes next, as far as there is room.
 *   3. Prefills and replays get the rest, fair between users by deficit round robin in rows of
 *      either half, first come first served within a user.  With a step in the pass, or of one
 * user, they get no more than `chunk_tokens` encoder rows and as many decoder rows: so a step waits
 *      one chunk at most, and whoever comes next waits for one chunk of any one user.
 *
 * Decoder rows of a job are given only behind its last encoder row (the engine's rule for runs).
 *
 * Pure: no clock, no allocation; the caller owns all entries, and the lists are those of its jobs.
 * Owned by: worker.
 */

#include "kvstore/format/ids.h"

#include <stdbool.h>
#include <stdint.h>

struct batch_user;

/* A job, embedded in its owner; a job is in one batch at most. */
struct batch_job {
    struct kv_user_id user;
    bool is_step;
    /* Rows it still needs, by the owner before each plan.  A step: the same number in both. */
    uint32_t encode, decode;
    /* Result of the last plan: 0 and 0 when it is not in the pass.  A step: both equal. */
    uint32_t take_encode, take_decode;

    /* Owned by the batch. */
    struct batch_job *next, *prev;
    struct batch_user *of; /* NULL: not in a batch, or a step. */
};

struct batch_list {
    struct batch_job *first, *last;
};

/* A user with prefills; memory of the owner of the batch. */
struct batch_user {
    struct kv_user_id id;
    struct batch_list jobs;  /* In the order in which they came. */
    uint32_t deficit;        /* Rows it may still take at this visit. */
    uint32_t encode, decode; /* Rows it took in this pass. */
    bool visited;            /* The visit is not over. */
    struct batch_user *next; /* In the ring, or of the free ones. */
};

struct batch {
    uint32_t pass_rows, chunk_tokens;
    struct batch_list steps; /* Those served last stand last. */
    struct batch_user *ring_first, *ring_last;
    struct batch_user *free;
    uint32_t step_count, user_count;
};

/* users: one entry for each job that can be in the batch at once; they stay the batch's.
 * pass_rows >= chunk_tokens >= 1, and pass_rows >= 2. */
void batch_init(struct batch *batch, uint32_t pass_rows, uint32_t chunk_tokens,
                struct batch_user *users, uint32_t user_count);

void batch_add(struct batch *batch, struct batch_job *job);    /* Behind those that wait. */
void batch_remove(struct batch *batch, struct batch_job *job); /* Nothing if it is not in it. */

/* Fills take_encode and take_decode of all jobs.  False: there is nothing to compute. */
bool batch_plan(struct batch *batch);

bool batch_is_empty(const struct batch *batch);
