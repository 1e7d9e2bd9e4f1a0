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
    if (ids_base == 0) eng_session_note_ids(session, 0, from, ids);
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

/* The span of the encoder's part, and what the generic side knows after it. */
static struct eng_span encode_span(struct eng_session *session, uint32_t count)
{
    struct eng_run *run = &session->run;
    const struct eng_span span = {.session = session, .first = run->encode_next, .count = count};
    const uint32_t *ids = run->ids + (run->encode_next - run->ids_base);
    const uint32_t old = run->floor > span.first ? KV_MIN(run->floor - span.first, count) : 0;

    eng_session_note_ids(session, span.first, count, ids);
    if (count > old)
        session->model->ops->ids_write(session, span.first + old, count - old, ids + old);
    run->encode_next += count;
    return span;
}

static struct eng_span decode_span(struct eng_session *session, uint32_t count)
{
    const struct eng_model *model = session->model;
    struct eng_run *run = &session->run;
    const struct eng_span span = {.session = session, .first = run->decode_next, .count = count};

    assert(run->decode_next + count <= run->encode_next);
    if (!model->prefill_all) assert(run->encode_next == run->to);
    if (run->decode_next == run->decode_first &&
        (run->decode_first > run->from || !run->had_windows))
        session->decoder_first = run->decode_first;
    run->decode_next += count;
    return span;
}

/* Oldest position whose rows the ring still has when it has those up to `next`. */
static uint32_t ring_oldest(const struct eng_model *model, uint32_t next)
{
    return next > model->ring_rows ? next - model->ring_rows : 0;
}

/* Windows a replay rebuilt: exact from window - 1 before the floor on if every encoder layer had as
 * far to look back as it reaches; then the rows before that are not part of the state.  Otherwise
 * the session is marked, and no cut goes to the floor or below. */
static void note_replay(struct eng_session *session)
{
    const struct kv_layout *layout = &session->model->layout;
    const struct eng_run *run = &session->run;
    const uint32_t reach = layout->window_tokens - 1;

    session->replay_at = 0;
    if (run->from == 0) return;
    if (run->floor - run->from >= layout->encoder_layers * reach)
        session->encoder_first = KV_MAX(session->encoder_first, run->floor - reach);
    else
        session->replay_at = run->floor;
}

static void run_end(struct eng_session *session)
{
    const struct eng_model *model = session->model;
    const struct eng_run *run = &session->run;
    const uint32_t oldest = ring_oldest(model, run->to);

    session->encoder_first = KV_MAX(session->encoder_first, oldest);
    session->decoder_first = KV_MAX(session->decoder_first, oldest);
    if (!run->had_windows) note_replay(session);
    session->has_windows = true;
    session->tokens = run->to;
    session->has_logits = true;
    session->logits_row = run->each_logits ? run->to - run->from - 1 : 0;
    session->has_pending = false;
    session->verify_first = run->from;
    session->verify_count = run->each_logits ? run->to - run->from : 0;
    session->run.active = false;
}

static void check_pieces(struct eng_model *model, const struct eng_piece *pieces, uint32_t count)
{
    uint32_t encode = 0, decode = 0;

    for (uint32_t i = 0; i < count; i++) {
        struct eng_session *session = pieces[i].session;
        const struct eng_run_left left = eng_run_left(session);
        assert(session->model == model);
        assert(!session->run.in_pass);
        assert(pieces[i].encode <= left.encode);
        assert(pieces[i].decode <= left.decode);
        session->run.in_pass = true;
        encode += pieces[i].encode;
        decode += pieces[i].decode;
    }
    assert(encode <= model->pass_rows);
    assert(decode <= model->pass_rows);
}

void eng_pass(struct eng_model *model, const struct eng_piece *pieces, uint32_t count)
{
    struct eng_span *encode = model->spans;
    struct eng_span *decode = model->spans + model->pass_rows;
    uint32_t encode_count = 0, decode_count = 0;

    check_pieces(model, pieces, count);
    for (uint32_t i = 0; i < count; i++) {
        struct eng_session *session = pieces[i].session;
        if (pieces[i].encode > 0) encode[encode_count++] = encode_span(session, pieces[i].encode);
        if (pieces[i].decode > 0) decode[decode_count++] = decode_span(session, pieces[i].decode);
    }
    if (encode_count + decode_count > 0)
        model->ops->pass(model, &(struct eng_pass_spans){.encode = encode,
                                                         .encode_count = encode_count,
                                                         .decode = decode,
                                                         .decode_count = decode_count});
    for (uint32_t i = 0; i < count; i++) {
        struct eng_session *session = pieces[i].session;
        const struct eng_run_left left = eng_run_left(session);
        session->run.in_pass = false;
        if (model->prefill_all) assert(left.decode - left.encode <= model->layout.window_tokens);
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
