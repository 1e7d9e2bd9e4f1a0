#pragma once

/*
 * The seam between "where a session stands" (session/, exec/, ckpt/) and "what the bytes are"
 * (cpu.c, synthetic.c).
 *
 * The generic side owns positions, token ids, logits and the rules of engine.h; a backend owns the
 * bytes of windows and tails, and is the only one to look behind a page's address: both may lie in
 * memory of its own, which the generic side reaches through window_*, tails_* and ids_write alone.
 * Logits are handed over in ordinary memory.  No call blocks or allocates but open() and
 * session_init().
 */

#include "engine/engine.h"
#include "engine/model/config.h"
#include "engine/probe.h"

#include <stdatomic.h>

/* Rows a ring holds beyond window and spare, so that rejected drafts never overwrite a spare row.
 */
#define ENG_RING_EXTRA 8u

/* Of a tokens run all but one may be rejected. */
_Static_assert(KV_DRAFTS_MAX <= ENG_RING_EXTRA, "a rejected token would take a spare row");

/* Token ids before a position that stay known: what an Engram lookup looks back. */
#define ENG_LOOKBACK 3u

/* Positions [first, first + count) of one session. */
struct eng_span {
    struct eng_session *session;
    uint32_t first, count;
};

/* What one pass computes.  At most one span per session in each list; each list's counts sum to at
 * most model->pass_rows. */
struct eng_pass_spans {
    const struct eng_span *encode;
    uint32_t encode_count;
    const struct eng_span *decode;
    uint32_t decode_count;
};

struct eng_backend_ops {
    const char *name;
    const char *revision; /* Numerics: part of the fingerprint. */

    /* model->config, layout and options are set.  Fills model->backend, bytes and weights_digest.
     */
    kv_status (*open)(struct eng_model *model, const char *model_dir, struct kv_error *err);
    void (*close)(struct eng_model *model);
    const char *(*family)(const struct eng_model *model);
    const char *(*isa)(const struct eng_model *model);
    /* eng_model_check(); NULL: there are no files. */
    kv_status (*check)(const struct eng_model *model, struct kv_error *err);
    uint64_t (*engram_rows)(const struct eng_model *model); /* Any thread; NULL: none. */

    /* Memory a session of this backend needs; 64 B aligned, zeroed, given to session_init. */
    size_t (*session_bytes)(const struct eng_model *model);
    kv_status (*session_init)(struct eng_session *session, void *memory, struct kv_error *err);
    void (*session_fini)(struct eng_session *session);
    /* Windows and tails; not pages. */
    void (*session_copy)(struct eng_session *to, const struct eng_session *from);

    /* Packed window rows [first, first + count) of `layer`, consecutive in `rows`. */
    void (*window_read)(const struct eng_session *session, uint32_t layer, uint32_t first,
                        uint32_t count, uint8_t *rows);
    void (*window_write)(struct eng_session *session, uint32_t layer, uint32_t first,
                         uint32_t count, const uint8_t *rows);
    /* Tails of the token at `position`, which is even: model->tails_bytes, sources in order. */
    void (*tails_read)(const struct eng_session *session, uint32_t position, uint8_t *tails);
    void (*tails_write)(struct eng_session *session, uint32_t position, const uint8_t *tails);
    /* Into the pages. */
    void (*ids_write)(struct eng_session *session, uint32_t first, uint32_t count,
                      const uint32_t *ids);

    /* The session was moved to session->tokens: ids are its history.  image may be NULL (rows
     * only).  Backends that check content do it here. */
    void (*moved)(struct eng_session *session, const uint32_t *ids, const uint8_t *image,
                  const struct kv_image_state *state);
    /* The session was put back to session->tokens, by a cut, an abort or rejected tokens.  ids as
     * above, or NULL.  After an abort at an odd position the tails are those begin() found. */
    void (*rewound)(struct eng_session *session, const uint32_t *ids);
    /* A run begins (session->run is set). */
    void (*begin)(struct eng_session *session);

    /* First the encoder layers and the decoder's row source over the encode spans: window rows of
     * encoder layers, tails, and rows of positions at or beyond session->run.floor.  Then decoder
     * layers over the decode spans, which this run has encoded, and logits where
     * eng_wants_logits(). */
    void (*pass)(struct eng_model *model, const struct eng_pass_spans *spans);
    /* eng_draft(); NULL: this backend does not draft. */
    void (*draft)(struct eng_model *model, const struct eng_draft_item *items, uint32_t count);
};

extern const struct eng_backend_ops eng_backend_cpu;
extern const struct eng_backend_ops eng_backend_synthetic;

/* Owned by: whoever opened it; immutable but for wrong_bytes, which any session's thread adds to,
 * and scratch, which belongs to the thread that computes. */
struct eng_model {
    const struct eng_backend_ops *ops;
    struct eng_config config;
    struct kv_layout layout;
    struct kv_digest config_digest;
    struct kv_digest weights_digest;
    struct kv_digest fingerprint;
    uint64_t bytes;
    _Atomic uint64_t wrong_bytes;
    uint32_t layer_count; /* Encoder, decoder and draft: those with a window. */
    uint32_t ring_rows;
    uint32_t tails_bytes;
    uint32_t verify_max;
    enum eng_isa isa; /* As asked for. */
    uint32_t threads;
    uint32_t pass_rows;
    bool quant_off;
    bool prefill_all;
    const struct eng_probe *probe; /* Borrowed, or NULL. */
    float *sample_values;          /* vocab_tokens, for sampling. */
    uint32_t *sample_order;        /* vocab_tokens. */
    struct eng_span *spans;        /* 2 x pass_rows, for a pass. */
    void *backend;
};

/* A movement in progress. */
struct eng_run {
    bool active;
    bool each_logits; /* A tokens run: logits of every row. */
    bool in_pass;
    const uint32_t *ids;
    uint32_t ids_base; /* Position of ids[0]. */
    uint32_t from;     /* First computed position. */
    uint32_t floor;    /* Rows below are read, never written: the position begin() found. */
    uint32_t to;
    uint32_t encode_next;  /* [from, encode_next) is encoded. */
    uint32_t decode_first; /* The decoder runs over [decode_first, to). */
    uint32_t decode_next;
    bool had_windows;
    uint32_t encoder_first_before, decoder_first_before;
};

/* Owned by: worker. */
struct eng_session {
    struct eng_model *model;
    uint8_t *const *pages; /* Borrowed; the backend's to dereference. */
    uint32_t page_count;

    uint32_t tokens;
    bool has_windows; /* False after rows_only: encoder_first and decoder_first mean nothing. */
    uint32_t encoder_first;
    uint32_t decoder_first;
    uint32_t replay_at;
    bool has_pending;
    uint32_t pending;
    bool has_logits;
    uint32_t logits_row; /* Which row of `logits` is that of token tokens-1. */
    struct eng_run run;

    /* The last tokens run: its logits, and what it may be cut to. */
    uint32_t verify_first, verify_count; /* 0: there is none, or the session has moved. */
    uint32_t verify_ids[KV_VERIFY_TOKENS_MAX];

    float *logits;    /* verify_max x vocab_tokens */
    uint32_t *recent; /* eng_recent_count() ids, that of position p at p % count. */
    void *backend;
};

/* As far back as a session can be put, and the lookback of an Engram before that. */
static inline uint32_t eng_recent_count(const struct eng_model *model)
{
    return model->ring_rows + ENG_LOOKBACK;
}

/* The id at a position of the run, or at most ENG_LOOKBACK before its first. */
static inline uint32_t eng_run_id(const struct eng_session *session, uint32_t position)
{
    const struct eng_run *run = &session->run;
    return position >= run->ids_base ? run->ids[position - run->ids_base]
                                     : session->recent[position % eng_recent_count(session->model)];
}

/* Offset of a source's tail among the tails of a position. */
static inline uint32_t eng_tail_offset(const struct eng_model *model, uint32_t source)
{
    uint32_t offset = 0;
    for (uint32_t i = 0; i < source; i++)
        offset += model->layout.sources[i].tail_bytes;
    return offset;
}

static inline bool eng_wants_logits(const struct eng_session *session, uint32_t position)
{
    return session->run.each_logits || position + 1 == session->run.to;
}

/* Where the logits of such a row go. */
static inline float *eng_logits_of(const struct eng_session *session, uint32_t position)
{
    const struct eng_run *run = &session->run;
    const size_t row = run->each_logits ? position - run->from : 0;
    return session->logits + row * session->model->layout.vocab_tokens;
}

/* First position whose row of `layer` is part of the state. */
static inline uint32_t eng_layer_first(const struct eng_session *session, uint32_t layer)
{
    return layer < session->model->layout.encoder_layers ? session->encoder_first
                                                         : session->decoder_first;
}

/* engine.c: eng_model_open() with any backend. */
kv_status eng_model_open_with(const struct eng_options *options, const struct eng_backend_ops *ops,
                              struct eng_model **ret_model, struct kv_error *err) KV_MUST_CHECK;

/* session/state.c: notes ids of positions [first, first + count) for later lookback. */
void eng_session_note_ids(struct eng_session *session, uint32_t first, uint32_t count,
                          const uint32_t *ids);

/* exec/sample.c: the token of `position`, from its logits.  Uses the model's scratch. */
uint32_t eng_sample(const struct eng_model *model, const float *logits, uint32_t position,
                    const struct eng_sampling *sampling);
