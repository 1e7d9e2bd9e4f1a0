/*
 * Where a session stands, and how it moves without computing: create, reset, cut, state.
 *
 * A live session promises exactly what its image would hold: a cut first gives up the rows that an
 * image taken before it would not have had.  Then a session that never left memory and one that
 * came back from its image are in the same state, field for field, and so compute the same bits.
 */

#include "engine/backend/backend.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>

/* Parts of a session's one allocation, each 64 B aligned. */
struct carve {
    uint8_t *memory; /* NULL: only counts. */
    size_t used;
};

static void *carve_take(struct carve *carve, size_t bytes)
{
    void *part = carve->memory != NULL ? carve->memory + carve->used : NULL;
    carve->used += (size_t)kv_round_up(bytes, 64);
    return part;
}

static size_t session_lay_out(const struct eng_model *model, struct eng_session *session,
                              uint8_t *memory)
{
    const struct kv_layout *layout = &model->layout;
    struct carve carve = {.memory = memory, .used = 0};
    struct eng_session parts = {0};

    (void)carve_take(&carve, sizeof(*session));
    parts.logits =
        carve_take(&carve, (size_t)model->verify_max * layout->vocab_tokens * sizeof(float));
    parts.recent = carve_take(&carve, eng_recent_count(model) * sizeof(*parts.recent));
    parts.backend = carve_take(&carve, model->ops->session_bytes(model));
    if (session != NULL) *session = parts;
    return carve.used;
}

uint64_t eng_model_session_bytes(const struct eng_model *model)
{
    return session_lay_out(model, NULL, NULL);
}

kv_status eng_session_create(struct eng_model *model, struct eng_session **ret_session,
                             struct kv_error *err)
{
    const size_t bytes = session_lay_out(model, NULL, NULL);
    uint8_t *memory = aligned_alloc(64, bytes);
    if (memory == NULL) return KV_FAIL(err, KV_NOMEM, "session of %zu bytes", bytes);

    memset(memory, 0, bytes);
    struct eng_session *session = (struct eng_session *)(void *)memory;
    (void)session_lay_out(model, session, memory);
    session->model = model;
    session->has_windows = true;
    const kv_status status = model->ops->session_init(session, session->backend, err);
    if (status == KV_OK)
        *ret_session = session;
    else
        free(memory);
    return status;
}

void eng_session_destroy(struct eng_session *session)
{
    if (session == NULL) return;
    session->model->ops->session_fini(session);
    free(session);
}

void eng_session_copy(struct eng_session *to, const struct eng_session *from)
{
    const struct eng_model *model = from->model;
    assert(to->model == model);
    assert(!from->run.active);
    assert(!to->run.active);

    to->pages = from->pages;
    to->page_count = from->page_count;
    to->tokens = from->tokens;
    to->has_windows = from->has_windows;
    to->encoder_first = from->encoder_first;
    to->decoder_first = from->decoder_first;
    to->replay_at = from->replay_at;
    to->has_pending = from->has_pending;
    to->pending = from->pending;
    to->has_logits = from->has_logits;
    to->logits_row = 0;
    to->verify_count = 0;
    memcpy(to->recent, from->recent, eng_recent_count(model) * sizeof(*to->recent));
    if (from->has_logits)
        memcpy(to->logits, eng_session_logits(from), model->layout.vocab_tokens * sizeof(float));
    model->ops->session_copy(to, from);
}

void eng_session_reset(struct eng_session *session)
{
    session->run.active = false;
    session->pages = NULL;
    session->page_count = 0;
    session->tokens = 0;
    session->has_windows = true;
    session->encoder_first = 0;
    session->decoder_first = 0;
    session->replay_at = 0;
    session->has_pending = false;
    session->has_logits = false;
    session->verify_count = 0;
    session->model->ops->rewound(session, NULL);
}

void eng_session_set_pages(struct eng_session *session, uint8_t *const *pages, uint32_t count)
{
    session->pages = pages;
    session->page_count = count;
}

struct kv_image_state eng_session_state(const struct eng_session *session)
{
    const struct kv_layout *layout = &session->model->layout;
    const uint32_t tokens = session->tokens;
    const uint32_t base = kv_layout_image_base(layout, tokens);
    struct kv_image_state state = {
        .tokens = tokens,
        .encoder_first = tokens,
        .decoder_first = tokens,
        .draft_first = tokens,
        .replay_at = session->replay_at,
        .has_pending = session->has_pending,
        .pending = session->has_pending ? session->pending : 0,
    };
    if (session->has_windows) {
        state.encoder_first = KV_MAX(session->encoder_first, base);
        state.decoder_first = KV_MAX(session->decoder_first, base);
        if (layout->draft_stages > 0) state.draft_first = state.decoder_first;
    }
    return state;
}

void eng_session_cut(struct eng_session *session, uint32_t tokens)
{
    const struct kv_image_state state = eng_session_state(session);
    assert(!session->run.active);
    assert(kv_image_cut(&session->model->layout, &state, tokens) == tokens);

    if (tokens == session->tokens) return;
    assert(session->has_windows);
    session->encoder_first = state.encoder_first;
    session->decoder_first = KV_MIN(state.decoder_first, tokens);
    session->tokens = tokens;
    session->has_pending = false;
    session->has_logits = false;
    session->verify_count = 0;
    session->model->ops->rewound(session, NULL);
}

/* Only the last eng_recent_count() of them are looked at again. */
void eng_session_note_ids(struct eng_session *session, uint32_t first, uint32_t count,
                          const uint32_t *ids)
{
    const uint32_t slots = eng_recent_count(session->model);
    for (uint32_t i = count > slots ? count - slots : 0; i < count; i++)
        session->recent[(first + i) % slots] = ids[i];
}

bool eng_session_has_logits(const struct eng_session *session)
{
    return session->has_logits;
}

const float *eng_session_logits(const struct eng_session *session)
{
    assert(session->has_logits);
    return session->logits + (size_t)session->logits_row * session->model->layout.vocab_tokens;
}

const float *eng_session_logits_at(const struct eng_session *session, uint32_t i)
{
    assert(i < session->verify_count);
    return session->logits + (size_t)i * session->model->layout.vocab_tokens;
}

void eng_session_set_pending(struct eng_session *session, uint32_t token)
{
    assert(token < session->model->layout.vocab_tokens);
    session->has_pending = true;
    session->pending = token;
}

void eng_session_clear_pending(struct eng_session *session)
{
    session->has_pending = false;
}
