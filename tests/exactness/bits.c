/*
 * The same calls on the session that never left memory, and the comparison bit for bit.
 *
 * A prefill splits at anchors and at the stable position, as if each piece were a call; what passes
 * such a stop above the hit is what an image taken there holds.  Chunk sizes of the reference are
 * drawn by themselves: they must not matter.
 */

#include "tests/exactness/run.h"

#include "kvstore/base/bytes.h"

#include <string.h>

/* ---- prefill ---- */

static void prefill_facts(struct ex_run *run, const struct ex_prefill *call, uint32_t count,
                          const struct ex_prefill_answer *answer)
{
    const uint32_t window = ref_model_layout(run->model)->window_tokens;
    const uint32_t replayed = answer->outcome == EX_REPLAY ? window : 0;
    if (answer->prompt_tokens != count)
        ex_wrong(run, "prompt of %u tokens, sent %u", answer->prompt_tokens, count);
    if (answer->computed_tokens != count - answer->hit_tokens)
        ex_wrong(run, "computed %u of %u with a hit of %u", answer->computed_tokens, count,
                 answer->hit_tokens);
    if (answer->replayed_tokens != replayed)
        ex_wrong(run, "%s replayed %u tokens", ex_outcome_name(answer->outcome),
                 answer->replayed_tokens);
    if (answer->weakened != 0) ex_wrong(run, "weakened %u times", answer->weakened);
    if (answer->save_reason[0] != '\0') ex_wrong(run, "not saved: %s", answer->save_reason);
    if ((answer->outcome == EX_EXACT) != (answer->reason[0] == '\0'))
        ex_wrong(run, "%s with reason '%s'", ex_outcome_name(answer->outcome), answer->reason);
    for (uint32_t i = 0; i < answer->point_count; i++)
        if (call->level == 0 && !answer->points[i].durable)
            ex_wrong(run, "answered before the checkpoint at %u was durable",
                     answer->points[i].position);
}

/* Anchors and the end, ascending, each once. */
static uint32_t stops_of(const struct ex_prefill *call, uint32_t count, uint32_t *ret_stops)
{
    uint32_t stops = 0;
    for (uint32_t i = 0; i < call->anchor_count; i++)
        ret_stops[stops++] = call->anchors[i];
    if (call->no_checkpoint) return stops;
    const uint32_t end = call->stable_tokens == 0 ? count : call->stable_tokens;
    uint32_t at = 0;
    while (at < stops && ret_stops[at] < end)
        at++;
    if (at < stops && ret_stops[at] == end) return stops;
    memmove(ret_stops + at + 1, ret_stops + at, sizeof(*ret_stops) * (stops - at));
    ret_stops[at] = end;
    return stops + 1;
}

static const struct ex_checkpoint *
answer_at(struct ex_run *run, const struct ex_prefill_answer *answer, uint32_t position)
{
    for (uint32_t i = 0; i < answer->point_count; i++)
        if (answer->points[i].position == position) return &answer->points[i];
    ex_wrong(run, "the answer names no checkpoint at %u", position);
}

static void check_marks(struct ex_run *run, const struct ref_state *state, bool approximate,
                        uint32_t approx_from)
{
    const uint32_t *replays;
    const uint32_t count = ref_replays(state, UINT32_MAX, &replays);
    const uint32_t from = count > 0 ? replays[0] : 0;
    if (approximate != (count > 0) || approx_from != from)
        ex_wrong(run, "approximate %d from %u, expected %d from %u", approximate, approx_from,
                 count > 0, from);
}

void check_prefill(struct ex_run *run, struct ex_session *session, const struct ex_view *view,
                   const uint32_t *ids, uint32_t count, const struct ex_prefill *call,
                   const struct ex_prefill_answer *answer, const struct ex_checkpoint *named,
                   bool alone)
{
    static const uint32_t chunks[] = {1, 5, 32, 100, 128};
    const struct ex_said said = {answer->outcome, answer->hit_tokens, answer->has_resumed,
                                 answer->resumed};
    uint32_t stops[8];
    const uint32_t stop_count = stops_of(call, count, stops);
    const uint32_t chunk = chunks[ex_random_below(&run->random, 5)];
    uint32_t from = answer->hit_tokens - answer->replayed_tokens;

    prefill_facts(run, call, count, answer);
    check_plan(run, session, view, ids, count, &said, alone);
    if (answer->point_count != stop_count)
        ex_wrong(run, "%u checkpoints, asked for %u", answer->point_count, stop_count);
    struct ref_state *state = check_source(run, session, view, ids, count, &said, named);
    for (uint32_t i = 0; i < stop_count; i++) {
        if (stops[i] <= answer->hit_tokens) continue;
        ref_prefill(state, ids, from, stops[i], chunk);
        from = stops[i];
        check_checkpoint(run, session, answer_at(run, answer, stops[i]), state, state);
        struct ref_state *next = ref_copy(state); /* The one that stands here stays. */
        ref_free(state);
        state = next;
    }
    if (from < count) ref_prefill(state, ids, from, count, chunk);
    for (uint32_t i = 0; i < stop_count && stops[i] <= answer->hit_tokens; i++)
        check_checkpoint(run, session, answer_at(run, answer, stops[i]), NULL, state);
    check_marks(run, state, answer->approximate, answer->approx_from);
    ref_free(session->live);
    session->live = state;
}

/* ---- decode ---- */

static void decode_facts(struct ex_run *run, const struct ex_decode *call,
                         const struct ex_decode_answer *answer)
{
    if (!answer->ended || answer->torn) ex_wrong(run, "the stream of a decode is torn");
    if (answer->count == 0 || answer->count > call->max_tokens)
        ex_wrong(run, "%u tokens of at most %u", answer->count, call->max_tokens);
    if (answer->end_tokens != answer->count)
        ex_wrong(run, "%u tokens sent, %u at the end", answer->count, answer->end_tokens);
    if (answer->save_reason[0] != '\0') ex_wrong(run, "not saved: %s", answer->save_reason);
    if (answer->point_count != (call->no_checkpoint ? 0u : 1u))
        ex_wrong(run, "%u checkpoints of a decode", answer->point_count);
}

static void compare(struct ex_run *run, uint32_t first, const struct ex_decode_answer *answer,
                    const uint32_t *tokens, const uint32_t *crcs, uint32_t count)
{
    const uint32_t both = KV_MIN(count, answer->count);
    uint64_t differ = 0;
    uint32_t at = both;
    for (uint32_t i = 0; i < both; i++) {
        const bool same = crcs[i] == answer->crcs[i] && tokens[i] == answer->tokens[i];
        run->counts.crcs++;
        if (same) continue;
        differ++;
        at = KV_MIN(at, i);
        if (tokens[i] != answer->tokens[i]) break; /* What follows continues other tokens. */
    }
    if (differ > 0)
        ex_different(run, differ,
                     "position %u (token %u of the answer): logits %08x, expected %08x; token %u, "
                     "expected %u",
                     first + at, at, answer->crcs[at], crcs[at], answer->tokens[at], tokens[at]);
    if (count != answer->count)
        ex_wrong(run, "an answer of %u tokens, expected %u", answer->count, count);
}

void check_decode(struct ex_run *run, struct ex_session *session, struct ref_state *state,
                  const struct ex_decode *call, const struct ex_decode_answer *answer)
{
    uint32_t tokens[EX_ANSWER_MAX], crcs[EX_ANSWER_MAX], stops[17];
    uint32_t stop_count = 0;
    const struct kv_image_state at = ref_image_state(state);
    const uint32_t first = at.tokens + (at.has_pending ? 1 : 0);

    decode_facts(run, call, answer);
    for (; stop_count < call->stop_count; stop_count++)
        stops[stop_count] = call->stops[stop_count];
    if (!call->ignore_eos) stops[stop_count++] = ref_model_eos(run->model);
    const struct ref_decode how = {
        .sampling = {.temperature = call->temperature,
                     .top_p = call->top_p > 0.0f ? call->top_p : 1.0f,
                     .top_k = call->top_k,
                     .seed = call->seed},
        .max_tokens = call->max_tokens,
        .forced = call->forced_count > 0 ? call->forced : NULL,
        .forced_count = call->forced_count,
        .stops = stops,
        .stop_count = stop_count,
    };
    if (answer->first_position != first)
        ex_wrong(run, "the answer begins at %u, expected %u", answer->first_position, first);
    const uint32_t count = ref_decode(state, &how, tokens, crcs);
    compare(run, first, answer, tokens, crcs, count);
    if (answer->head_position != ref_tokens(state))
        ex_wrong(run, "the head is at %u, expected %u", answer->head_position, ref_tokens(state));
    ref_free(session->live);
    session->live = state;
    if (answer->point_count == 0) return;
    if (answer->points[0].position != ref_tokens(state))
        ex_wrong(run, "the checkpoint is at %u, the head at %u", answer->points[0].position,
                 ref_tokens(state));
    check_checkpoint(run, session, &answer->points[0], state, state);
}
