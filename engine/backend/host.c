/*
 * Windows and tails in ordinary memory.
 *
 * A ring addresses rows by position, so nothing moves when a session goes forward or is cut.  Tails
 * lie in a small ring as well: rejected tokens write into other slots than the one they are cut
 * back to.  Only an aborted prefill may run far enough to overwrite the tail it began with, which
 * is therefore kept aside.
 */

#include "engine/backend/host.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

static size_t ring_bytes(const struct eng_model *model)
{
    return (size_t)model->layer_count * model->ring_rows * model->layout.window_row_bytes;
}

size_t eng_host_bytes(const struct eng_model *model)
{
    return (size_t)(kv_round_up(ring_bytes(model), 64) +
                    kv_round_up((size_t)ENG_TAIL_SLOTS * model->tails_bytes, 64) +
                    kv_round_up(model->tails_bytes, 64));
}

void eng_host_init(struct eng_host *host, const struct eng_model *model, uint8_t *memory)
{
    host->ring = memory;
    host->tails = host->ring + kv_round_up(ring_bytes(model), 64);
    host->tails_saved = host->tails + kv_round_up((size_t)ENG_TAIL_SLOTS * model->tails_bytes, 64);
    host->saved_tokens = 0;
}

void eng_host_session_fini(struct eng_session *session)
{
}

void eng_host_copy(struct eng_session *to, const struct eng_session *from)
{
    const struct eng_model *model = from->model;
    memcpy(eng_host_of(to)->ring, eng_host_of(from)->ring, ring_bytes(model));
    memcpy(eng_host_of(to)->tails, eng_host_of(from)->tails,
           (size_t)ENG_TAIL_SLOTS * model->tails_bytes);
}

void eng_host_window_read(const struct eng_session *session, uint32_t layer, uint32_t first,
                          uint32_t count, uint8_t *rows)
{
    const uint32_t bytes = session->model->layout.window_row_bytes;
    for (uint32_t i = 0; i < count; i++)
        memcpy(rows + (size_t)i * bytes, eng_ring_row(session, layer, first + i), bytes);
}

void eng_host_window_write(struct eng_session *session, uint32_t layer, uint32_t first,
                           uint32_t count, const uint8_t *rows)
{
    const uint32_t bytes = session->model->layout.window_row_bytes;
    for (uint32_t i = 0; i < count; i++)
        memcpy(eng_ring_row(session, layer, first + i), rows + (size_t)i * bytes, bytes);
}

void eng_host_tails_read(const struct eng_session *session, uint32_t position, uint8_t *tails)
{
    assert(position % 2 == 0);
    memcpy(tails, eng_tails_at(session, position), session->model->tails_bytes);
}

void eng_host_tails_write(struct eng_session *session, uint32_t position, const uint8_t *tails)
{
    assert(position % 2 == 0);
    memcpy(eng_tails_at(session, position), tails, session->model->tails_bytes);
}

void eng_host_ids_write(struct eng_session *session, uint32_t first, uint32_t count,
                        const uint32_t *ids)
{
    for (uint32_t i = 0; i < count; i++)
        kv_page_set_id(eng_page_at(session, first + i), (first + i) % KV_PAGE_TOKENS, ids[i]);
}

void eng_host_begin(struct eng_session *session)
{
    struct eng_host *host = eng_host_of(session);
    host->saved_tokens = session->tokens % 2 == 1 ? session->tokens : 0;
    if (host->saved_tokens > 0)
        eng_host_tails_read(session, host->saved_tokens - 1, host->tails_saved);
}

void eng_host_rewound(struct eng_session *session)
{
    struct eng_host *host = eng_host_of(session);
    if (host->saved_tokens > 0 && host->saved_tokens == session->tokens)
        eng_host_tails_write(session, session->tokens - 1, host->tails_saved);
}
