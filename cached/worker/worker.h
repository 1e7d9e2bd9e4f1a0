#pragma once

/*
 * The worker thread: owns the engine's sessions (one per slot) and runs jobs for the shard.
 *
 * A job is embedded in a request's flow.  worker_post() hands it over; when it is finished its msg
 * is posted to the mailbox named in it, with run set by the shard, and the worker no longer touches
 * it.  Jobs of different slots are computed together, pass by pass: every decode job makes one step
 * in each, prefills and replays share the rest fairly between users (batch.h).
 *
 * The job names everything it needs: HBM pages, token ids, image bytes, slots to export into.  All
 * of it stays valid and untouched by the shard until the job comes back.
 */

#include "cached/worker/batch.h"
#include "engine/engine.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/log.h"
#include "kvstore/base/mailbox.h"

#include <stdatomic.h>

struct worker;

/* Whether tokens are proposed and verified several at a time; never changes what is generated. */
enum worker_draft {
    WORKER_DRAFT_AUTO, /* Where it was measured to pay (draft_policy.h). */
    WORKER_DRAFT_ON,   /* As many as the model can, always. */
    WORKER_DRAFT_OFF,
};

struct worker_options {
    struct eng_model *model;
    uint32_t slots;        /* Sessions that can hold windows at once. */
    uint32_t chunk_tokens; /* Prefill rows that others wait for at most; <= pass_rows of the model,
                            * which is at least 2. */
    enum worker_draft draft;
    struct kv_log *log;
    const char *plant; /* Test builds: name of a planted bug; NULL. */
};

kv_status worker_create(const struct worker_options *options, struct worker **ret_worker,
                        struct kv_error *err) KV_MUST_CHECK;
void worker_destroy(struct worker *worker); /* After join. */
void worker_run(void *worker);              /* The thread's body; returns after worker_stop. */
void worker_stop(struct worker *worker);    /* Any thread; running jobs are cancelled first. */

/* How the slot gets to its start position. */
enum worker_start {
    WORKER_CONTINUE,  /* It stands there: nothing to do. */
    WORKER_RESET,     /* To 0. */
    WORKER_CUT,       /* eng_session_cut(start_tokens). */
    WORKER_IMPORT,    /* eng_session_import(image, image_state, ids, start_tokens). */
    WORKER_ROWS_ONLY, /* eng_session_rows_only(ids, start_tokens). */
};

/* A place of a prefill where it stops as if the call ended there, and an image may be exported. */
struct worker_stop_point {
    uint32_t tokens;             /* Ascending; the last one is the end of the prefill. */
    uint8_t *export;             /* image_bytes; NULL: no image. */
    bool done;                   /* Result: reached and exported. */
    struct kv_image_state state; /* Result. */
};

struct worker_job {
    struct kv_msg msg;        /* Owner sets run: called on the shard when finished. */
    struct kv_mailbox *reply; /* The shard's. */
    struct kv_user_id user;   /* Whose turn of a pass it takes. */
    const atomic_bool *cancelled;
    uint64_t deadline_ns; /* kv_clock_stopwatch_ns(); 0: none.  Like cancelled when passed. */

    uint32_t slot;
    enum worker_start start;
    uint32_t start_tokens;
    const uint8_t *image;
    struct kv_image_state image_state;
    uint8_t *const *pages;
    uint32_t page_count;

    /* Prefill part: runs first when prefill_to > start_tokens. */
    const uint32_t *ids;  /* [0, prefill_to) */
    uint32_t replay_from; /* start_tokens, or below it after ROWS_ONLY. */
    uint32_t prefill_to;
    struct worker_stop_point stops[KV_STOPS_MAX];
    uint32_t stop_count; /* At least 1 with a prefill part: the end. */

    /* Decode part: runs after it when decode_max > 0.  Needs logits or a pending token.
     * A pending token is processed first (it was sent before); then up to decode_max tokens are
     * taken (forced, else sampled): each is written to out_tokens, and all but the last are
     * processed; the last is left pending. */
    uint32_t decode_max;
    struct eng_sampling sampling;
    const uint32_t *forced; /* forced_count ids; the decode ends with them, and not at a stop token
                             * before.  NULL: sample. */
    uint32_t forced_count;
    uint32_t stops_at[KV_STOP_TOKENS_MAX + 1u]; /* Ids that end the decode; eos is the last. */
    uint32_t stops_at_count;
    uint32_t *out_tokens;        /* decode_max */
    uint32_t *out_crcs;          /* decode_max: kv_checksum of the logits each was taken from. */
    atomic_uint out_count;       /* Release-stored after the entry is written. */
    struct kv_msg progress;      /* Posted to reply after a token when progress_posted was false. */
    atomic_bool progress_posted; /* The shard clears it in progress.run. */
    uint8_t *decode_export;      /* Image at the end (with the pending token); NULL: none.  Written
                                  * whenever the slot is kept, also when cancelled. */

    /* An export-only job: WORKER_CONTINUE, no prefill, no decode: writes decode_export of the
     * present state, also between two steps of a decode that runs in the slot; behind a prefill it
     * waits.  start_tokens is not looked at.  KV_CANCELLED: the slot was lost meanwhile. */

    /* Results. */
    kv_status status; /* KV_OK, or KV_CANCELLED; KV_CORRUPT: import refused; KV_IO: model lost. */
    bool kept;        /* The slot stands at `state`; false: the shard must forget the slot. */
    bool stopped;     /* Decode ended on a stop token. */
    bool has_logits;
    struct kv_image_state state; /* eng_session_state() at the end. */
    uint64_t queue_ns, run_ns;   /* Stopwatch: until its first row was computed, and from there. */

    /* Owned by the worker. */
    struct kv_msg inbox; /* msg keeps the shard's run function on the way in. */
    struct worker *worker;
    struct worker_job *next;
    struct batch_job batch;
    uint64_t posted_ns, begun_ns;
    bool computed; /* Some row of it. */
    uint32_t phase, stop_index, decode_done;
};

void worker_post(struct worker *worker, struct worker_job *job);

/* Since the start.  *_ns: share of the passes' time, by rows. */
struct worker_stats {
    uint64_t prefill_tokens, replay_tokens, decode_tokens, chunks, jobs;
    uint64_t prefill_rows, replay_rows, decode_rows; /* Of both halves. */
    uint64_t prefill_ns, replay_ns, decode_ns;
    uint64_t passes, pass_rows, pass_rows_max; /* Rows of either half; the most of one pass. */
    uint64_t pass_sessions, pass_sessions_max; /* Sessions in a pass. */
    uint64_t drafts_proposed, drafts_accepted; /* Of those that were compared. */
};
struct worker_stats worker_stats(struct worker *worker); /* Any thread: atomics. */
/* Any thread: which file of the model is gone or changed, and how: every job ends with KV_IO.
 * NULL: none.  Stays as long as the worker. */
const char *worker_model_lost(struct worker *worker);
uint32_t worker_slots(const struct worker *worker);
