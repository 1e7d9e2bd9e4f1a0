/*
 * How a session moves by computing: a run, carried out by passes that many sessions share.
 *
 * Encoder state is a function of the tokens (and of clipped replays), so pieces of any size do.
 * Decoder state also depends on where a prefill ended: it runs over the last window of what was
 * computed, once all of that is encoded.  Decoding a token and verifying drafts are the same thing
 * over few tokens, which is why there is no second path to keep equal.
 */

#include "engine/backend/backend.h"
#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>

static void run_begin(struct eng_session *session, const uint32_t *ids, uint32_t ids_base,
                      uint32_t from, uint32_t to)
{
    const struct eng_model *model = session->model;
    const uint32_t window = model->layout.window_tokens;
    assert(!session->run.active);
    assert(from <= session->tokens);
    assert(to > session->tokens);
    assert(to <= KV_PROMPT_TOKENS_MAX);
    assert(session->page_count >= kv_pages_for(to));
    if (session->has_windows) assert(from == session->tokens);
    /* Without windows the pair that straddles an odd position must be replayed from its start. */
    if (!session->has_windows && session->tokens % 2 == 1) assert(from < session->tokens);

    const bool tail_only = to - from > window && !model->prefill_all;
    const uint32_t decode_first = tail_only ? to - window : from;
    session->run = (struct eng_run){
        .active = true,
        .ids = ids,
        .ids_base = ids_base,
        .from = from,
        .floor = session->tokens,
        .to = to,
        .encode_next = from,
        .decode_first = decode_first,
        .decode_next = decode_first,
        .had_windows = session->has_windows,
        .encoder_first_before = session->encoder_first,
        .decoder_first_before = session->decoder_first,
    };
    if (!session->has_windows) session->encoder_first = from;
    if (session->tokens % 2 == 1)
        memcpy(session->tails_saved, eng_tails_at(session, session->tokens - 1),
               model->tails_bytes);
    session->verify_count = 0;
    model->ops->begin(session);
}

void eng_prefill_begin(struct eng_session *session, const uint32_t *ids, uint32_t replay_from,
                       uint32_t to)
{
    run_begin(session, ids, 0, replay_from, to);
}

void eng_tokens_begin(struct eng_session *session, const uint32_t *tokens, uint32_t count)
{
    assert(session->has_windows);
    assert(count >= 1);
    assert(count <= session->model->verify_max);
    for (uint32_t i = 0; i < count; i++) {
        assert(tokens[i] < session->model->layout.vocab_tokens);
        session->verify_ids[i] = tokens[i];
    }
    run_begin(session, session->verify_ids, session->tokens, session->tokens,
              session->tokens + count);
    session->run.each_logits = true;
}

struct eng_run_left eng_run_left(const struct eng_session *session)
{
    const struct eng_run *run = &session->run;
    if (!run->active) return (struct eng_run_left){0};
    return (struct eng_run_left){.encode = run->to - run->encode_next,
                                 .decode = run->to - run->decode_next};
}

static void encode_piece(struct eng_session *session, uint32_t count)
{
    struct eng_run *run = &session->run;

    session->model->ops->encode(session, run->encode_next, count);
    for (uint32_t p = KV_MAX(run->encode_next, run->floor); p < run->encode_next + count; p++)
        kv_page_set_id(eng_page_at(session, p), p % KV_PAGE_TOKENS, eng_run_id(session, p));
    run->encode_next += count;
}

static void decode_piece(struct eng_session *session, uint32_t count)
{
    struct eng_run *run = &session->run;

    assert(run->decode_next + count <= run->encode_next);
    if (!session->model->prefill_all) assert(run->encode_next == run->to);
    if (run->decode_next == run->decode_first &&
        (run->decode_first > run->from || !run->had_windows))
        session->decoder_first = run->decode_first;
    session->model->ops->decode(session, run->decode_next, run->decode_next + count);
    run->decode_next += count;
}

/* Oldest position whose rows the ring still has when it has those up to `next`. */
static uint32_t ring_oldest(const struct eng_model *model, uint32_t next)
{
    return next > model->ring_rows ? next - model->ring_rows : 0;
}

static void run_end(struct eng_session *session)
{
    const struct eng_model *model = session->model;
    const struct eng_run *run = &session->run;
    const uint32_t oldest = ring_oldest(model, run->to);

    session->encoder_first = KV_MAX(session->encoder_first, oldest);
    session->decoder_first = KV_MAX(session->decoder_first, oldest);
    if (!run->had_windows) session->replay_at = run->from > 0 ? run->floor : 0;
    session->has_windows = true;
    session->tokens = run->to;
    session->has_logits = true;
    session->logits_row = run->each_logits ? run->to - run->from - 1 : 0;
    session->has_pending = false;
    session->verify_first = run->from;
    session->verify_count = run->each_logits ? run->to - run->from : 0;
    session->run.active = false;
}

void eng_pass(struct eng_model *model, const struct eng_piece *pieces, uint32_t count)
{
    uint32_t encode = 0, decode = 0;

    for (uint32_t i = 0; i < count; i++) {
        const struct eng_run_left left = eng_run_left(pieces[i].session);
        assert(pieces[i].session->model == model);
        assert(pieces[i].encode <= left.encode);
        assert(pieces[i].decode <= left.decode);
        encode += pieces[i].encode;
        decode += pieces[i].decode;
    }
    assert(encode <= model->pass_rows);
    assert(decode <= model->pass_rows);
    for (uint32_t i = 0; i < count; i++) {
        struct eng_session *session = pieces[i].session;
        if (pieces[i].encode > 0) encode_piece(session, pieces[i].encode);
        if (pieces[i].decode > 0) decode_piece(session, pieces[i].decode);
        const struct eng_run_left left = eng_run_left(session);
        if (left.encode == 0 && left.decode == 0) run_end(session);
    }
}

bool eng_run_abort(struct eng_session *session)
{
    const struct eng_model *model = session->model;
    const struct eng_run run = session->run;
    const uint32_t window = model->layout.window_tokens;
    const uint32_t need = run.floor > window ? run.floor - window : 0;
    assert(run.active);

    session->run.active = false;
    session->encoder_first = run.encoder_first_before;
    session->decoder_first = run.decoder_first_before;
    if (run.had_windows) {
        /* Rows computed meanwhile lie in the ring beyond the position and will be overwritten; what
         * they have overwritten is lost. */
        const uint32_t encoded = run.encode_next > run.from ? run.encode_next : run.from;
        const uint32_t decoded = run.decode_next > run.decode_first ? run.decode_next : run.from;
        session->encoder_first = KV_MAX(session->encoder_first, ring_oldest(model, encoded));
        if (session->encoder_first > need) return false;
        if (ring_oldest(model, decoded) > KV_MAX(need, session->decoder_first)) return false;
        session->decoder_first = KV_MAX(session->decoder_first, ring_oldest(model, decoded));
        if (run.each_logits && decoded > run.from) session->has_logits = false;
    }
    if (session->tokens % 2 == 1)
        memcpy(eng_tails_at(session, session->tokens - 1), session->tails_saved,
               model->tails_bytes);
    model->ops->rewound(session, run.ids_base == 0 ? run.ids : NULL);
    return true;
}

void eng_verify_keep(struct eng_session *session, uint32_t kept)
{
    assert(!session->run.active);
    assert(session->verify_count > 0);
    assert(kept >= 1);
    assert(kept <= session->verify_count);
    assert(session->tokens == session->verify_first + session->verify_count);

    if (kept == session->verify_count) return;
    session->tokens = session->verify_first + kept;
    session->decoder_first = KV_MIN(session->decoder_first, session->tokens);
    session->has_pending = false;
    session->logits_row = kept - 1;
    session->model->ops->rewound(session, NULL);
}
