#pragma once

/* Private to worker/: the worker's own structs, and what its files need of each other.
 * Owned by: worker. */

#include "cached/worker/draft_policy.h"
#include "cached/worker/worker.h"

enum phase { PHASE_WAITING, PHASE_PREFILL, PHASE_DECODE };

enum plant { PLANT_NONE, PLANT_WINDOW, PLANT_TAIL, PLANT_IMPORT };

struct job_list {
    struct worker_job *first;
    struct worker_job *last;
};

struct slot {
    struct eng_session *session;
    struct worker_job *job;     /* The one that moves the session now. */
    bool lost;                  /* Stands nowhere until a job says where to start. */
    struct draft_policy policy; /* Of that session. */
    uint32_t
        step_tokens[KV_VERIFY_TOKENS_MAX]; /* Of the step in this pass: the pending one, drafts. */
};

/* Written by the worker, read by any thread. */
struct worker_counters {
    _Atomic uint64_t prefill_tokens, replay_tokens, decode_tokens, chunks, jobs;
    _Atomic uint64_t prefill_rows, replay_rows, decode_rows;
    _Atomic uint64_t prefill_ns, replay_ns, decode_ns;
    _Atomic uint64_t passes, pass_rows, pass_rows_max, pass_sessions, pass_sessions_max;
    _Atomic uint64_t drafts_proposed, drafts_accepted;
};

/* Owned by: worker, but for the mailbox and the counters. */
struct worker {
    struct eng_model *model;
    struct kv_log *log;
    uint32_t slot_count;
    uint32_t step_max; /* Tokens of one step: a pending one and drafts. */
    enum worker_draft draft;
    enum plant plant;
    uint8_t *plant_image; /* Scratch: an image on its way to import, damaged on purpose. */
    struct slot *slots;

    struct kv_mailbox *mailbox;
    struct kv_msg stop_msg;
    atomic_bool stop_posted;
    bool stopping;

    struct job_list waiting; /* Their slot is busy. */
    uint32_t running;        /* Jobs that have a slot; all of them are in the batch. */
    struct batch batch;
    struct batch_user *users;        /* One per slot. */
    struct eng_piece *pieces;        /* One per slot. */
    struct eng_draft_item *items;    /* One per slot. */
    struct draft_costs costs;        /* Of passes of steps only. */
    struct draft_costs costs_beside; /* Of those with prefill rows besides. */
    const char *_Atomic model_lost;  /* lost_text, or NULL; read by any thread. */
    char lost_text[sizeof(((struct kv_error *)0)->text) + 48];
    struct worker_counters counters;
};

static inline void worker_count(_Atomic uint64_t *counter, uint64_t more)
{
    (void)atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static inline void worker_count_max(_Atomic uint64_t *counter, uint64_t value)
{
    if (value > atomic_load_explicit(counter, memory_order_relaxed))
        atomic_store_explicit(counter, value, memory_order_relaxed);
}

/* ---- worker.c ---- */

/* One turn of the loop: what arrived, then one pass, if there is anything to compute. */
void worker_turn(struct worker *worker);

/* ---- worker_job.c: one job, between passes ---- */

/* Takes its slot, which is free, and moves the session to its start. */
void job_begin(struct worker *worker, struct worker_job *job);
/* Back to the last finished stop, or with the last sent token pending. */
void job_cancel(struct worker *worker, struct worker_job *job);
/* Ends with KV_IO: what it computed cannot be believed. */
void job_lose(struct worker *worker, struct worker_job *job);
bool job_is_cancelled(const struct worker *worker, const struct worker_job *job);
/* Writes an image of where the session of its slot stands. */
void job_export(struct worker *worker, struct worker_job *job);
/* What follows a pass that had rows of it. */
void job_prefill_passed(struct worker *worker, struct worker_job *job);
void job_step_passed(struct worker *worker, struct worker_job *job, uint32_t rows);

/* ---- worker_pass.c ---- */

/* One pass of the engine over all jobs that run. */
void worker_pass(struct worker *worker);
/* Tokens to propose behind the pending one in the job's next step. */
uint32_t worker_drafts_wanted(struct worker *worker, struct worker_job *job, uint32_t tokens_left);

/* ---- worker_plant.c ---- */

enum plant worker_plant_of(const char *name);
/* The image to import: the job's own, or a damaged copy. */
const uint8_t *worker_image(struct worker *worker, const struct worker_job *job);
