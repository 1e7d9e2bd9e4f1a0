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

struct eng_backend_ops {
    const char *name;
    const char *revision; /* Numerics: part of the fingerprint. */

    /* model->config and layout are set.  Fills model->backend, bytes and weights_digest. */
    kv_status (*open)(struct eng_model *model, const char *model_dir, struct kv_error *err);
    void (*close)(struct eng_model *model);

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
    /* Decoder (and draft) layers over [first, to), all encoded in this run, and logits of to-1. */
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
    void *backend;
};

/* What a prefill in progress knows. */
struct eng_run {
    bool active;
    const uint32_t *ids;
    uint32_t ids_base; /* Position of ids[0]. */
    uint32_t from;     /* First computed position. */
    uint32_t floor;    /* Rows below are read, never written: the position begin() found. */
    uint32_t to;
    uint32_t next; /* [from, next) is encoded. */
    bool had_windows;
    uint32_t encoder_first_before;
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
    uint32_t decode_token; /* The id eng_decode_token() runs over. */
    struct eng_run run;

    uint8_t *ring;        /* layer_count x ring_rows rows; position p at p % ring_rows. */
    uint8_t *tails;       /* Sources in order; valid when tokens is odd. */
    uint8_t *tails_saved; /* As begin() found them. */
    float *logits;
    float *sample_values;   /* vocab_tokens, for sampling. */
    uint32_t *sample_order; /* vocab_tokens. */
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

/* Offset of a source's tail in session->tails (and, from layout.tails_offset, in an image). */
static inline uint32_t eng_tail_offset(const struct eng_model *model, uint32_t source)
{
    uint32_t offset = 0;
    for (uint32_t i = 0; i < source; i++)
        offset += model->layout.sources[i].tail_bytes;
    return offset;
}

/* First position whose row of `layer` is part of the state. */
static inline uint32_t eng_layer_first(const struct eng_session *session, uint32_t layer)
{
    return layer < session->model->layout.encoder_layers ? session->encoder_first
                                                         : session->decoder_first;
}
