#pragma once

/*
 * The embedded engine: turns tokens into rows, windows and logits.  It knows nothing of users,
 * sessions, tiers or checkpoints.
 *
 * Owned by: worker.  One model per process; sessions are independent.  Nothing here blocks on
 * anything but computing.  A session's rows live in pages the caller provides
 * (eng_session_set_pages); its windows, tails and logits live inside the session, allocated by
 * eng_session_create(), scratch inside the model: no call below that computes allocates.
 *
 * A session stands at a position: `tokens` tokens are processed.  It moves by
 *
 *   eng_session_reset      to 0
 *   eng_session_import     to the position of a window image, or a little below (spare rows)
 *   eng_session_rows_only  to H with rows but no windows; the next prefill must replay
 *   eng_session_cut        back a little, using the spare rows of the live windows
 *   a run                  forward over given tokens, by eng_pass(): several sessions together
 *
 * Exactness: every row, window and logit is a function of the tokens, of where prefills ended and
 * of clipped replays; never of chunk size, pass, thread count or what else ran.
 */

#include "engine/backend/kernels/isa.h"
#include "kvstore/base/digest.h"
#include "kvstore/base/status.h"
#include "kvstore/format/image.h"
#include "kvstore/format/layout.h"

#include <stdbool.h>
#include <stdint.h>

struct eng_config;
struct eng_model;
struct eng_session;

enum eng_backend { ENG_BACKEND_CPU, ENG_BACKEND_SYNTHETIC };

struct eng_options {
    enum eng_backend backend;
    /* Directory with config.json and model.safetensors.  For SYNTHETIC: only config.json is
     * read, and NULL stands for that of `tiny`. */
    const char *model_dir;
    uint32_t spare_tokens; /* KV_SPARE_TOKENS_MIN .. _MAX */
    enum eng_isa isa;      /* Of the CPU backend. */
    uint32_t threads;      /* At most KV_ENGINE_THREADS_MAX; 0: one per core. */
    /* Most encoder rows, and most decoder rows, of one pass: 1 .. KV_PASS_ROWS_MAX, 0: the
     * default.  Scratch is sized by it; no bit depends on it. */
    uint32_t pass_rows;
    bool quant_off;   /* No activation is rounded, rows are fp32: to compare with others. */
    bool prefill_all; /* The decoder runs over every token of a prefill, not the last window. */
};

#define ENG_PASS_ROWS_DEFAULT 256u

/* KV_INVALID: the directory is not a model this engine runs (the text names file, field or tensor,
 * what was expected and what was found); KV_IO: it cannot be read; KV_NOMEM. */
kv_status eng_model_open(const struct eng_options *options, struct eng_model **ret_model,
                         struct kv_error *err) KV_MUST_CHECK;
void eng_model_close(struct eng_model *model); /* All sessions must be destroyed. */

const struct kv_layout *eng_model_layout(const struct eng_model *model);

/* Digest of weights, config, layout version, tie rule and numerics revision. */
struct kv_digest eng_model_fingerprint(const struct eng_model *model);
const char *eng_model_name(const struct eng_model *model);    /* "tiny", from config.json */
const char *eng_model_backend(const struct eng_model *model); /* "cpu", "SYNTHETIC" */
/* Kernel family: sessions computed by one differ from another's in rounding.  "fp32", "amx". */
const char *eng_model_family(const struct eng_model *model);
const char *eng_model_isa(const struct eng_model *model); /* What AUTO chose: "avx512". */
/* What config.json says; engine/model/config.h. */
const struct eng_config *eng_model_config(const struct eng_model *model);
uint32_t eng_model_eos(const struct eng_model *model);
uint32_t eng_model_pass_rows(const struct eng_model *model);
uint32_t eng_model_verify_max(const struct eng_model *model); /* Most tokens of a tokens run. */
uint32_t eng_model_draft_max(const struct eng_model *model);  /* Drafts per step; 0: none. */
/* Memory of its own: weights that are not mapped, and scratch. */
uint64_t eng_model_bytes(const struct eng_model *model);
uint64_t eng_model_session_bytes(const struct eng_model *model); /* Memory of one session. */

/* KV_IO, with the file's name: a file of the checkpoint was written to, has another size than when
 * it was opened, or could not be read.  What was computed since the last KV_OK cannot be believed,
 * and must not be kept.  One system call a file; asked after every pass. */
kv_status eng_model_check(const struct eng_model *model, struct kv_error *err) KV_MUST_CHECK;

/* Rows of Engram tables read since the model was opened; any thread. */
uint64_t eng_model_engram_rows(const struct eng_model *model);

/* SYNTHETIC only: rows or windows that came back with other bytes than were written. */
uint64_t eng_model_wrong_bytes(const struct eng_model *model);

kv_status eng_session_create(struct eng_model *model, struct eng_session **ret_session,
                             struct kv_error *err) KV_MUST_CHECK;
void eng_session_destroy(struct eng_session *session);

/* Deep copy of position, windows, tails and logits (not of pages: both then use the same table
 * until set_pages).  For tests that keep a session that never leaves memory. */
void eng_session_copy(struct eng_session *to, const struct eng_session *from);

void eng_session_reset(struct eng_session *session);

/* pages[i] holds tokens 128i.. and is layout.page_bytes long; the array and the pages are borrowed
 * until the next set_pages or reset.  Rows and ids of tokens the session computes are written
 * there; rows below the position the call started from are only read. */
void eng_session_set_pages(struct eng_session *session, uint8_t *const *pages, uint32_t count);

/* Takes over windows, tails and pending token of `image` (verified by the caller with
 * kv_image_decode, whose state is `state`), then stands at `tokens`, which must be
 * kv_image_cut(layout, state, something).  There are no logits afterwards.  KV_INVALID, and the
 * session unmoved: another position, or rows are missing for it, those of drafting included.
 * ids: the tokens [0, tokens), for backends that check content. */
kv_status eng_session_import(struct eng_session *session, const uint8_t *image,
                             const struct kv_image_state *state, const uint32_t *ids,
                             uint32_t tokens) KV_MUST_CHECK;

void eng_session_rows_only(struct eng_session *session, const uint32_t *ids, uint32_t tokens);

/* kv_image_cut() of the live state; tokens must be its result.  Logits and pending are dropped
 * unless tokens is the present position. */
void eng_session_cut(struct eng_session *session, uint32_t tokens);

/* What an image taken now would say, base included: *_first are at least
 * kv_layout_image_base(tokens), so that a live session promises no more than its image holds. */
struct kv_image_state eng_session_state(const struct eng_session *session);

/* Writes everything of an image but its header (layout.image_bytes; unused parts zeroed). */
void eng_session_export(const struct eng_session *session, uint8_t *image);

/*
 * A run is one movement forward, begun by one of the two calls below and carried out by passes.  It
 * encodes [from, to), then decodes part of it; eng_run_left() says how much of each is to come.
 * When both reach 0 the run has ended: the session stands at `to`, has logits of token to-1 and no
 * pending token.
 *
 * A prefill: ids are the tokens [0, to) and stay valid until the run ends.  Tokens [replay_from,
 * position) are rerun: their rows are read and never written, windows are clipped at replay_from
 * (only after rows_only; otherwise replay_from must equal the position).  Tokens [position, to) are
 * new.  The decoder runs over the last window_tokens of what this run computes (replayed included;
 * with prefill_all over all of it), clipped at their start, except when these are all it computed
 * and decoder rows up to there were present: then it continues them.  to > position.
 *
 * A replay that begins at 0, or encoder_layers x (window_tokens - 1) tokens before the position or
 * earlier, is exact: its rows and encoder windows are those of a run that never lost its windows,
 * and it leaves no mark (replay_at is 0).
 */
void eng_prefill_begin(struct eng_session *session, const uint32_t *ids, uint32_t replay_from,
                       uint32_t to);

/* Decode of one token, or verification of one and some drafts: count <= eng_model_verify_max().
 * All layers over all of them, logits after each.  The session has windows; tokens are copied. */
void eng_tokens_begin(struct eng_session *session, const uint32_t *tokens, uint32_t count);

struct eng_run_left {
    uint32_t encode; /* Tokens the encoder has still to run over. */
    uint32_t decode; /* Rows the decoder has; they may begin when encode is 0 (prefill_all: as far
                        as it is encoded). */
};

/* Zeros when no run is active. */
struct eng_run_left eng_run_left(const struct eng_session *session);

struct eng_piece {
    struct eng_session *session; /* With an active run; at most one piece per session. */
    uint32_t encode;
    uint32_t decode;
};

/* Computes the pieces together: first the next `encode` tokens of each through the encoder, then
 * the next `decode` rows of each through the decoder, which this pass may just have encoded.  Both
 * sums are at most eng_model_pass_rows().  With prefill_all the encoder is at most window_tokens
 * ahead of the decoder after a pass. */
void eng_pass(struct eng_model *model, const struct eng_piece *pieces, uint32_t count);

/* Gives up between passes: back to the position the run began from when that is still possible (its
 * windows within the spare rows), else the session must be reset.  Returns true if kept. */
bool eng_run_abort(struct eng_session *session);

/* After a tokens run of n tokens and before anything else moves the session: keeps the first `kept`
 * (1..n).  The session then is as if only these had been run, with the logits after the last. */
void eng_verify_keep(struct eng_session *session, uint32_t kept);

bool eng_session_has_logits(const struct eng_session *session);
/* layout.vocab_tokens values; valid while has_logits. */
const float *eng_session_logits(const struct eng_session *session);
/* The same after tokens[i] of the last tokens run; valid until the next run begins. */
const float *eng_session_logits_at(const struct eng_session *session, uint32_t i);

struct eng_sampling {
    float temperature; /* 0: greedy (largest logit, then smallest id). */
    float top_p;       /* 0 < top_p <= 1; 1: off. */
    uint32_t top_k;    /* 0: off. */
    uint64_t seed;
};

/* The token for position `tokens`, from the logits; the random number is a function of (seed,
 * position).  Does not move the session. */
uint32_t eng_session_sample(const struct eng_session *session, const struct eng_sampling *sampling);
/* The token that follows tokens[i] of the last tokens run. */
uint32_t eng_session_sample_at(const struct eng_session *session, uint32_t i,
                               const struct eng_sampling *sampling);

struct eng_draft_item {
    struct eng_session *session; /* At a position > 0, with windows and without an active run. */
    uint32_t first;              /* The token for position `tokens`: sampled, not yet processed. */
    struct eng_sampling sampling;
    uint32_t max;      /* Drafts wanted, 1 .. draft_block; eng_model_draft_max() can be verified. */
    uint32_t *tokens;  /* `max` of them are written: ids for the positions behind `first`. */
    float *confidence; /* Likewise, or NULL: estimate that a draft is accepted if those before it
                          are, before the sigmoid. */
};

/* Drafts what may follow, for many sessions together; moves none of them.  Draft i uses the random
 * number of its position, as the model will: where both agree it is the token the model samples.
 * Nothing depends on which sessions are drafted for together. */
void eng_draft(struct eng_model *model, const struct eng_draft_item *items, uint32_t count);

/* Notes a sampled (or forced), not yet processed token; it travels in the image. */
void eng_session_set_pending(struct eng_session *session, uint32_t token);
void eng_session_clear_pending(struct eng_session *session);
