/*
 * Live state to image bytes and back.
 *
 * Rows and tails are moved as packed bytes, never re-quantized.  In an image a row stands at
 * position - base; in the ring at position modulo ring size.  What the state does not promise is
 * zero in the image, so equal states give equal images.
 *
 * A session knows one first row for decoder and draft stages, which a prefill clips together.  An
 * image may say another for the drafts; that one is refused, as they would be made from zeros.
 */

#include "engine/backend/backend.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

void eng_session_export(const struct eng_session *session, uint8_t *image)
{
    const struct eng_model *model = session->model;
    const struct kv_layout *layout = &model->layout;
    const struct kv_image_state state = eng_session_state(session);
    const uint32_t base = kv_layout_image_base(layout, state.tokens);
    assert(!session->run.active);

    memset(image + KV_IMAGE_HEADER_BYTES, 0, layout->image_bytes - KV_IMAGE_HEADER_BYTES);
    for (uint32_t layer = 0; layer < model->layer_count; layer++) {
        const uint32_t first =
            layer < layout->encoder_layers ? state.encoder_first : state.decoder_first;
        uint8_t *rows = image + kv_layout_window_offset(layout, layer);
        model->ops->window_read(session, layer, first, state.tokens - first,
                                rows + (size_t)(first - base) * layout->window_row_bytes);
    }
    /* Rows alone know no tails: such a session resumes at an even position. */
    if (state.tokens % 2 == 1 && session->has_windows)
        model->ops->tails_read(session, state.tokens - 1, image + layout->tails_offset);
}

kv_status eng_session_import(struct eng_session *session, const uint8_t *image,
                             const struct kv_image_state *state, const uint32_t *ids,
                             uint32_t tokens)
{
    const struct eng_model *model = session->model;
    const struct kv_layout *layout = &model->layout;
    const uint32_t base = kv_layout_image_base(layout, state->tokens);
    const uint32_t draft_first = layout->draft_stages > 0 ? state->decoder_first : state->tokens;
    const uint32_t need = tokens > layout->window_tokens ? tokens - layout->window_tokens : 0;
    assert(!session->run.active);
    assert(state->encoder_first >= base && state->encoder_first <= state->tokens);
    assert(state->decoder_first >= base && state->decoder_first <= state->tokens);

    if (tokens == 0 || kv_image_cut(layout, state, tokens) != tokens)
        return KV_FAIL(NULL, KV_INVALID, "image at %u does not serve %u", state->tokens, tokens);
    if (state->encoder_first > need)
        return KV_FAIL(NULL, KV_INVALID, "image at %u holds rows from %u only", state->tokens,
                       state->encoder_first);

    if (state->draft_first != draft_first)
        return KV_FAIL(NULL, KV_INVALID, "image at %u: draft_first must be %u, found %u",
                       state->tokens, draft_first, state->draft_first);

    session->tokens = tokens;
    session->has_windows = true;
    session->encoder_first = state->encoder_first;
    session->decoder_first = KV_MIN(state->decoder_first, tokens);
    session->replay_at = state->replay_at;
    session->has_pending = state->has_pending && tokens == state->tokens;
    session->pending = session->has_pending ? state->pending : 0;
    session->has_logits = false;
    session->verify_count = 0;
    for (uint32_t layer = 0; layer < model->layer_count; layer++) {
        const uint8_t *rows = image + kv_layout_window_offset(layout, layer);
        const uint32_t first = eng_layer_first(session, layer);
        model->ops->window_write(session, layer, first, tokens - first,
                                 rows + (size_t)(first - base) * layout->window_row_bytes);
    }
    if (tokens % 2 == 1) model->ops->tails_write(session, tokens - 1, image + layout->tails_offset);
    eng_session_note_ids(session, 0, tokens, ids);
    model->ops->moved(session, ids, image, state);
    return KV_OK;
}

void eng_session_rows_only(struct eng_session *session, const uint32_t *ids, uint32_t tokens)
{
    assert(!session->run.active);
    session->tokens = tokens;
    session->has_windows = tokens == 0;
    session->encoder_first = 0;
    session->decoder_first = 0;
    session->replay_at = 0;
    session->has_pending = false;
    session->has_logits = false;
    session->verify_count = 0;
    eng_session_note_ids(session, 0, tokens, ids);
    session->model->ops->moved(session, ids, NULL, NULL);
}
