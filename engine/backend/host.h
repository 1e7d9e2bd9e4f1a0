#pragma once

/*
 * Windows, tails and pages in ordinary memory, for the backends that compute there: their session
 * memory begins with a struct eng_host, and their ops are the functions below.  Owned by: worker.
 */

#include "engine/backend/backend.h"
#include "kvstore/format/page.h"

/* Tails kept: those of the last even positions, so that any number of tokens may be rejected. */
#define ENG_TAIL_SLOTS 8u
_Static_assert(ENG_TAIL_SLOTS >= KV_VERIFY_TOKENS_MAX / 2 + 2,
               "a rejected token would take a tail");

struct eng_host {
    uint8_t *ring;         /* layer_count x ring_rows rows; position p at p % ring_rows. */
    uint8_t *tails;        /* ENG_TAIL_SLOTS of tails_bytes; even position p at p / 2 % slots. */
    uint8_t *tails_saved;  /* Of position saved_tokens - 1, as begin() found them. */
    uint32_t saved_tokens; /* Odd, or 0: nothing saved. */
};

size_t eng_host_bytes(const struct eng_model *model);
/* memory: eng_host_bytes(), 64 B aligned. */
void eng_host_init(struct eng_host *host, const struct eng_model *model, uint8_t *memory);
void eng_host_session_fini(struct eng_session *session); /* Nothing to do. */
void eng_host_copy(struct eng_session *to, const struct eng_session *from);
void eng_host_window_read(const struct eng_session *session, uint32_t layer, uint32_t first,
                          uint32_t count, uint8_t *rows);
void eng_host_window_write(struct eng_session *session, uint32_t layer, uint32_t first,
                           uint32_t count, const uint8_t *rows);
void eng_host_tails_read(const struct eng_session *session, uint32_t position, uint8_t *tails);
void eng_host_tails_write(struct eng_session *session, uint32_t position, const uint8_t *tails);
void eng_host_ids_write(struct eng_session *session, uint32_t first, uint32_t count,
                        const uint32_t *ids);
/* A backend's begin() and rewound() call these. */
void eng_host_begin(struct eng_session *session);
void eng_host_rewound(struct eng_session *session);

static inline struct eng_host *eng_host_of(const struct eng_session *session)
{
    return session->backend;
}

static inline uint8_t *eng_ring_row(const struct eng_session *session, uint32_t layer,
                                    uint32_t position)
{
    const struct eng_model *model = session->model;
    const size_t row = (size_t)layer * model->ring_rows + position % model->ring_rows;
    return eng_host_of(session)->ring + row * model->layout.window_row_bytes;
}

/* Tails of the token at `position`, which is even. */
static inline uint8_t *eng_tails_at(const struct eng_session *session, uint32_t position)
{
    const uint32_t slot = position / 2 % ENG_TAIL_SLOTS;
    return eng_host_of(session)->tails + (size_t)slot * session->model->tails_bytes;
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
