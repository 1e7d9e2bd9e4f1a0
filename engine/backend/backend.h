#pragma once

/*
 * The seam between "where a session stands" (session/, exec/, ckpt/) and "what the bytes are"
 * (cpu.c, synthetic.c).
 *
 * The generic side owns positions, rings, tails, logits and the rules of engine.h; a backend fills
 * bytes for positions it is told.  No call blocks or allocates but open() and session_init().
 */

#include "engine/engine.h"
#include "engine/model/config.h"

#include <stdatomic.h>

/* Rows a ring holds beyond window and spare, so that rejected drafts never overwrite a spare row.
 */
#define ENG_RING_EXTRA 8u

/* Most tokens of one tokens run.  All but one may be rejected. */
#define ENG_VERIFY_MAX 8u
_Static_assert(ENG_VERIFY_MAX - 1 <= ENG_RING_EXTRA, "a rejected token would take a spare row");

/* Tails kept: those of the last even positions, so that any number of tokens may be rejected. */
#define ENG_TAIL_SLOTS 8u
_Static_assert(ENG_TAIL_SLOTS >= ENG_VERIFY_MAX / 2 + 2, "a rejected token would take a tail");

struct eng_backend_ops {
    const char *name;
    const char *revision; /* Numerics: part of the fingerprint. */

    /* model->config and layout are set.  Fills model->backend, bytes and weights_digest. */
    kv_status (*open)(struct eng_model *model, const char *model_dir, struct kv_error *err);
    void (*close)(struct eng_model *model);
    const char *(*family)(const struct eng_model *model);
    const char *(*isa)(const struct eng_model *model);

    /* Memory a session of this backend needs; 64 B aligned, zeroed, given to session_init. */
    size_t (*session_bytes)(const struct eng_model *model);
    void (*session_init)(struct eng_session *session, void *memory);
    void (*session_copy)(struct eng_session *to, const struct eng_session *from);

    /* The session was moved to session->tokens: ids are its history.  image may be NULL (rows
     * only).  Backends that check content do it here. */
    void (*moved)(struct eng_session *session, const uint32_t *ids, const uint8_t *image,
                  const struct kv_image_state *state);
    /* The session was cut or put back to session->tokens.  ids as above, or NULL after a cut. */
    void (*rewound)(struct eng_session *session, const uint32_t *ids);
    /* A prefill begins (session->run is set). */
    void (*begin)(struct eng_session *session);

    /* Encoder layers and the decoder's row source over [first, first + count): window rows of
     * encoder layers, tails, and rows of positions at or beyond session->run.floor. */
    void (*encode)(struct eng_session *session, uint32_t first, uint32_t count);
    /* Decoder (and draft) layers over [first, to), all encoded in this run, and logits where
     * eng_wants_logits(). */
    void (*decode)(struct eng_session *session, uint32_t first, uint32_t to);
};

extern const struct eng_backend_ops eng_backend_cpu;
extern const struct eng_backend_ops eng_backend_synthetic;

/* Owned by: whoever opened it; immutable but for wrong_bytes, which any session's thread adds to.
 */
struct eng_model {
    const struct eng_backend_ops *ops;
    struct eng_config config;
    struct kv_layout layout;
    struct kv_digest config_digest, weights_digest, fingerprint;
    uint64_t bytes;
    _Atomic uint64_t wrong_bytes;
    uint32_t layer_count; /* Encoder, decoder and draft: those with a window. */
    uint32_t ring_rows;
    uint32_t tails_bytes;
    uint32_t pass_rows;
    uint32_t verify_max;
    bool prefill_all;
    float *sample_values;   /* vocab_tokens, for sampling. */
    uint32_t *sample_order; /* vocab_tokens. */
    void *backend;
};

/* A movement in progress. */
struct eng_run {
    bool active;
    bool each_logits; /* A tokens run: logits of every row. */
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
    uint8_t *const *pages; /* Borrowed. */
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
    uint32_t verify_ids[ENG_VERIFY_MAX];

    uint8_t *ring;        /* layer_count x ring_rows rows; position p at p % ring_rows. */
    uint8_t *tails;       /* ENG_TAIL_SLOTS of tails_bytes; even position p at p / 2 % slots. */
    uint8_t *tails_saved; /* Of the position begin() found, if odd. */
    float *logits;        /* verify_max x vocab_tokens */
    void *backend;
};

static inline uint8_t *eng_ring_row(const struct eng_session *session, uint32_t layer,
                                    uint32_t position)
{
    const struct eng_model *model = session->model;
    const size_t row = (size_t)layer * model->ring_rows + position % model->ring_rows;
    return session->ring + row * model->layout.window_row_bytes;
}

static inline uint8_t *eng_page_at(const struct eng_session *session, uint32_t position)
{
    return session->pages[position / KV_PAGE_TOKENS];
}

/* Row of the entry that covers `position`. */
static inline uint8_t *eng_main_row(const struct eng_session *session, uint32_t source,
                                    uint32_t position)
{
    const struct kv_layout *layout = &session->model->layout;
    const uint32_t entry = position % KV_PAGE_TOKENS / layout->sources[source].ratio;
    return eng_page_at(session, position) + layout->main_offset[source] +
           (size_t)entry * layout->sources[source].main_bytes;
}

static inline uint8_t *eng_index_row(const struct eng_session *session, uint32_t source,
                                     uint32_t position)
{
    const struct kv_layout *layout = &session->model->layout;
    const uint32_t entry = position % KV_PAGE_TOKENS / layout->sources[source].ratio;
    return eng_page_at(session, position) + layout->index_offset[source] +
           (size_t)entry * layout->sources[source].index_bytes;
}

static inline uint32_t eng_run_id(const struct eng_session *session, uint32_t position)
{
    return session->run.ids[position - session->run.ids_base];
}

/* Offset of a source's tail among the tails of a position. */
static inline uint32_t eng_tail_offset(const struct eng_model *model, uint32_t source)
{
    uint32_t offset = 0;
    for (uint32_t i = 0; i < source; i++)
        offset += model->layout.sources[i].tail_bytes;
    return offset;
}

/* Tails of the token at `position`, which is even. */
static inline uint8_t *eng_tails_at(const struct eng_session *session, uint32_t position)
{
    const uint32_t slot = position / 2 % ENG_TAIL_SLOTS;
    return session->tails + (size_t)slot * session->model->tails_bytes;
}

static inline bool eng_wants_logits(const struct eng_session *session, uint32_t position)
{
    return session->run.each_logits || position + 1 == session->run.to;
}

/* Where the logits of a row of the run go. */
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

/* exec/sample.c: the token of `position`, from its logits.  Uses the model's scratch. */
uint32_t eng_sample(const struct eng_model *model, const float *logits, uint32_t position,
                    const struct eng_sampling *sampling);
