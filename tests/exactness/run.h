#pragma once

/*
 * One history while it runs: its sessions, what the reference knows of each, its log and counters.
 *
 * States of the reference are kept by two kinds of key: the live head of a session, and the id of a
 * checkpoint ("an image is always the last state that passed").
 */

#include "kvstore/base/status.h"
#include "tests/driver/calls.h"
#include "tests/exactness/reference.h"
#include "tests/exactness/setup.h"

/* Sessions of a history: a few, or a crowd that all call at once. */
enum { EX_SESSIONS_FEW = 3, EX_SESSIONS_MAX = 6, EX_PROMPT_MAX = 1000 };

/* Exit codes of a worker process. */
enum { EX_EXIT_WRONG = 1, EX_EXIT_DIFFERENT = 3 };

struct ex_counts {
    uint64_t histories, turns, outcomes[4];
    uint64_t crcs;   /* Logits compared. */
    uint64_t differ; /* Of these, or of the tokens, not equal. */
    uint64_t from_live, from_image, from_image_cut, from_image_odd; /* Of EXACT. */
    uint64_t restored; /* Decodes on a head that had left memory. */
    uint64_t beside;   /* Turns that ran beside another one. */
    uint64_t restarts, kills, expiries;
    uint64_t missed; /* Plans that overlooked a window on another branch. */
    uint64_t marked; /* REPLAY over approximate rows where exact ones reached as far. */
};

struct ex_point {
    struct ex_id id;
    uint32_t position;
    struct ref_state *image; /* The last state that passed; NULL: none was exported. */
    struct ref_state *rows;  /* Any state with these tokens and replays. */
    bool acknowledged;       /* As durable: it must survive. */
};

struct ex_session {
    char name[48];
    uint32_t user;
    struct ref_state *live; /* What the engine would hold; NULL: nothing. */
    struct ex_point points[EX_POINTS_MAX];
    uint32_t point_count;
    uint32_t talk[EX_TOKENS_MAX]; /* The last prompt and its answer, as the client knows it. */
    uint32_t talk_count, prompt_count;
};

struct ex_run {
    uint64_t seed;
    uint32_t history, turn;
    bool verbose;
    bool crowd;        /* --schedule random. */
    bool strict;       /* A window on another branch must be found, too. */
    const char *plant; /* NULL: none. */
    int report_fd;
    struct ex_random random;
    struct ex_setup setup;
    struct ex_daemon *daemon;
    struct ref_model *model;
    struct ex_session sessions[EX_SESSIONS_MAX];
    uint32_t session_count;
    struct ex_counts counts;
    char log[32768];
    uint32_t log_used;
};

/* A line of the operation log, printed when something is wrong. */
void ex_log(struct ex_run *run, const char *fmt, ...) KV_PRINTF(2, 3);

/* Prints what is wrong with the log and ends the process: a fact that does not hold, or bits. */
_Noreturn void ex_wrong(struct ex_run *run, const char *fmt, ...) KV_PRINTF(2, 3);
_Noreturn void ex_different(struct ex_run *run, uint64_t differ, const char *fmt, ...)
    KV_PRINTF(3, 4);

/* exactness.c: hands the counters to the process that adds them up. */
void ex_report(struct ex_run *run);

/* history.c: runs one history on a daemon that runs; sessions are named after it. */
void ex_history(struct ex_run *run, uint32_t history);

/* ---- script.c: what to do ---- */

/* A whole prompt of 1 .. EX_PROMPT_MAX tokens; ids has room for EX_TOKENS_MAX. */
uint32_t script_prompt(struct ex_run *run, struct ex_session *session, uint32_t *ids,
                       const char **ret_what);
uint32_t script_suffix(struct ex_run *run, const struct ex_session *session, uint32_t at,
                       uint32_t count, uint32_t *ids);
/* Stops, level and checkpoint of a prefill over `count` tokens. */
void script_prefill(struct ex_run *run, uint32_t count, struct ex_prefill *call);
void script_decode(struct ex_run *run, struct ex_decode *call);

/* ---- check.c, bits.c: what must hold ---- */

/* What a view means for the reference: checkpoints are known, the live head is where it should be.
 * Clears view->live when the live session is past its time, which the next prefill enforces. */
void check_view(struct ex_run *run, struct ex_session *session, struct ex_view *view);
struct ex_point *check_point_find(struct ex_session *session, const struct ex_id *id);

/* What the daemon says a resume did. */
struct ex_said {
    enum ex_outcome outcome;
    uint32_t hit_tokens;
    bool has_resumed;
    struct ex_id resumed;
};

/* From the whole prompt and the view before the call: the plan that kvstore/plan/plan.h asks for,
 * for a call that ran alone; and in any case that nothing is claimed that never was. */
void check_plan(struct ex_run *run, struct ex_session *session, const struct ex_view *view,
                const uint32_t *ids, uint32_t count, const struct ex_said *said, bool alone);

/* The reference's own state at H, to go on from.  named: a checkpoint beyond H that the call left,
 * which tells one branch of equal tokens from another; NULL: none. */
struct ref_state *check_source(struct ex_run *run, struct ex_session *session,
                               const struct ex_view *view, const uint32_t *ids, uint32_t count,
                               const struct ex_said *said, const struct ex_checkpoint *named);

/* Notes a checkpoint the daemon answered with. image: the state that passed (NULL: rows only). */
void check_checkpoint(struct ex_run *run, struct ex_session *session,
                      const struct ex_checkpoint *checkpoint, struct ref_state *image,
                      struct ref_state *rows);

/* The whole prompt in call->ids resolved to ids.  The session's live state is the result. */
void check_prefill(struct ex_run *run, struct ex_session *session, const struct ex_view *view,
                   const uint32_t *ids, uint32_t count, const struct ex_prefill *call,
                   const struct ex_prefill_answer *answer, const struct ex_checkpoint *named,
                   bool alone);

/* state: where the head stands with logits or a pending token; taken over. */
void check_decode(struct ex_run *run, struct ex_session *session, struct ref_state *state,
                  const struct ex_decode *call, const struct ex_decode_answer *answer);
