/*
 * How a session moves by computing: a prefill in bounded steps, and one decoded token.
 *
 * Encoder state is a function of the tokens (and of clipped replays), so chunks of any size do.
 * Decoder state also depends on where a prefill ended: it runs once, in end(), over the last window
 * of what was computed.  Decoding a token is the same thing over one token, which is why there is
 * no second path to keep equal.
 */

#include "engine/backend/backend.h"
#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>

static void run_begin(struct eng_session *session, const uint32_t *ids, uint32_t ids_base,
                      uint32_t from, uint32_t to)
{
    assert(!session->run.active);
    assert(from <= session->tokens);
    assert(to > session->tokens);
    assert(to <= KV_PROMPT_TOKENS_MAX);
    assert(session->page_count >= kv_pages_for(to));
    if (session->has_windows) assert(from == session->tokens);
    /* Without windows the pair that straddles an odd position must be replayed from its start. */
    if (!session->has_windows && session->tokens % 2 == 1) assert(from < session->tokens);

    session->run = (struct eng_run){
        .active = true,
        .ids = ids,
        .ids_base = ids_base,
        .from = from,
        .floor = session->tokens,
        .to = to,
        .next = from,
        .had_windows = session->has_windows,
        .encoder_first_before = session->encoder_first,
    };
    if (!session->has_windows) session->encoder_first = from;
    memcpy(session->tails_saved, session->tails, session->model->tails_bytes);
    session->model->ops->begin(session);
}

static void run_encode(struct eng_session *session, uint32_t count)
{
    struct eng_run *run = &session->run;

    session->model->ops->encode(session, run->next, count);
    for (uint32_t p = KV_MAX(run->next, run->floor); p < run->next + count; p++)
        kv_page_set_id(eng_page_at(session, p), p % KV_PAGE_TOKENS, eng_run_id(session, p));
    run->next += count;
}

static void run_end(struct eng_session *session)
{
    const struct eng_model *model = session->model;
    const struct eng_run *run = &session->run;
    const uint32_t window = model->layout.window_tokens;
    const uint32_t oldest = run->to > model->ring_rows ? run->to - model->ring_rows : 0;
    uint32_t first = run->from;
    assert(run->active);
    assert(run->next == run->to);

    if (run->to - run->from > window) first = run->to - window;
    if (first > run->from || !run->had_windows) session->decoder_first = first;
    model->ops->decode(session, first, run->to);

    session->encoder_first = KV_MAX(session->encoder_first, oldest);
    session->decoder_first = KV_MAX(session->decoder_first, oldest);
    if (!run->had_windows) session->replay_at = run->from > 0 ? run->floor : 0;
    session->has_windows = true;
    session->tokens = run->to;
    session->has_logits = true;
    session->has_pending = false;
    session->run.active = false;
}

void eng_prefill_begin(struct eng_session *session, const uint32_t *ids, uint32_t replay_from,
                       uint32_t to)
{
    run_begin(session, ids, 0, replay_from, to);
}

uint32_t eng_prefill_left(const struct eng_session *session)
{
    return session->run.active ? session->run.to - session->run.next : 0;
}

void eng_prefill_chunk(struct eng_session *session, uint32_t count_max)
{
    assert(session->run.active);
    assert(count_max > 0);
    run_encode(session, KV_MIN(count_max, session->run.to - session->run.next));
}

void eng_prefill_end(struct eng_session *session)
{
    run_end(session);
}

bool eng_prefill_abort(struct eng_session *session)
{
    const struct eng_model *model = session->model;
    const struct eng_run run = session->run;
    const uint32_t oldest = run.next > model->ring_rows ? run.next - model->ring_rows : 0;
    const uint32_t window = model->layout.window_tokens;
    const uint32_t need = run.floor > window ? run.floor - window : 0;
    assert(run.active);

    session->run.active = false;
    session->encoder_first = run.encoder_first_before;
    memcpy(session->tails, session->tails_saved, model->tails_bytes);
    if (run.had_windows && run.next > run.floor) {
        if (KV_MAX(session->encoder_first, oldest) > need) return false;
        session->encoder_first = KV_MAX(session->encoder_first, oldest);
        /* Rows computed meanwhile lie in the ring beyond the position and will be overwritten. */
    }
    model->ops->rewound(session, run.ids);
    return true;
}

void eng_decode_token(struct eng_session *session, uint32_t token)
{
    assert(session->has_windows);
    assert(token < session->model->layout.vocab_tokens);

    session->decode_token = token;
    run_begin(session, &session->decode_token, session->tokens, session->tokens,
              session->tokens + 1);
    run_encode(session, 1);
    run_end(session);
}
