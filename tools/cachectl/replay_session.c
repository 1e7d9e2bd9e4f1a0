/*
 * One session of a trace against the daemon, turn by turn.
 *
 * What a turn could have reused is counted on the tokens that were really sent: the longest common
 * prefix of the prompt with anything the session has held, prompts and answers, and at most the
 * prompt less one token, because one must be computed to have something to answer from.
 */

#include "tools/cachectl/replay.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/trace_tokens.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int no_memory(void)
{
    ctl_error("out of memory");
    return CLIENT_EXIT_FAILED;
}

int replay_session_start(struct replay_session *session, struct replay *replay, uint32_t index)
{
    const struct trace_session *recorded = &replay->trace->sessions[index];
    struct client_failure failure;
    uint32_t prompt_max = 1, answer_max = 1;
    bool created = false;

    *session = (struct replay_session){.replay = replay, .session = index};
    (void)snprintf(session->name, sizeof(session->name), "%s-%" PRIu64, replay->prefix,
                   recorded->sess);
    for (uint32_t i = 0; i < recorded->item_count; i++) {
        const struct trace_turn *turn = &replay->trace->items[recorded->items[i]].turn;
        prompt_max = KV_MAX(prompt_max, turn->in_tokens);
        answer_max = KV_MAX(answer_max, turn->out_tokens);
    }
    session->ideal = trace_ideal_create();
    session->prompt = calloc(prompt_max, sizeof(uint32_t));
    session->answer = calloc(answer_max, sizeof(uint32_t));
    if (!session->ideal || !session->prompt || !session->answer) return no_memory();
    if (!turn_open(replay->client, session->name, &created, &session->vocab_tokens, &failure))
        return ctl_failure(&failure);
    if (!created) {
        ctl_error("session %s was there already: its hits would not be this replay's",
                  session->name);
        return CLIENT_EXIT_FAILED;
    }
    if (session->vocab_tokens >= TRACE_VOCAB_MIN) return CLIENT_EXIT_OK;
    ctl_error("the daemon's model has a vocabulary of %u tokens; a trace needs %u",
              session->vocab_tokens, TRACE_VOCAB_MIN);
    return CLIENT_EXIT_FAILED;
}

/* Leading blocks that an earlier prompt of the session had, and the newest turn that had the last.
 */
static uint32_t joined_blocks(const struct trace_map *holders, const struct trace_runs *blocks,
                              uint32_t *ret_holder)
{
    uint32_t joined = 0;

    *ret_holder = TRACE_MAP_NONE;
    for (uint32_t i = 0; i < blocks->run_count; i++) {
        for (uint32_t j = 0; j < blocks->runs[i].count; j++) {
            const uint32_t holder = trace_map_get(holders, blocks->runs[i].first + j);
            if (holder == TRACE_MAP_NONE) return joined;
            *ret_holder = holder;
            joined++;
        }
    }
    return joined;
}

static bool hold_blocks(struct trace_map *holders, const struct trace_runs *blocks, uint32_t turn)
{
    for (uint32_t i = 0; i < blocks->run_count; i++) {
        for (uint32_t j = 0; j < blocks->runs[i].count; j++) {
            if (trace_map_put(holders, blocks->runs[i].first + j, turn) != KV_OK) return false;
        }
    }
    return true;
}

static enum trace_class class_of(const struct replay_session *session,
                                 const struct trace_item *item)
{
    const struct trace *trace = session->replay->trace;
    const struct trace_session *recorded = &trace->sessions[session->session];
    uint32_t holder = TRACE_MAP_NONE;

    if (session->next == 0) return TRACE_CLASS_FIRST;
    const uint32_t joined = joined_blocks(&session->holders, &item->blocks, &holder);
    const struct trace_join join = {
        .joined_blocks = joined,
        .block_tokens = (uint64_t)trace->header.block_tokens * trace->header.scale,
        .parent_in_tokens =
            holder == TRACE_MAP_NONE ? 0 : trace->items[recorded->items[holder]].turn.raw_in_tokens,
        .tail_tokens = trace->header.tail_tokens,
        .prefix_tokens = (uint64_t)item->turn.sys_tokens * trace->header.scale,
        .parent_is_last = holder + 1 == session->next,
    };
    return trace_classify(join);
}

/* 3 or more tokens less than the trace allows.  A prefix of at most one window is excepted: it
 * costs no more to compute than to replay, and is exact. */
static bool is_short(const struct turn_prefill *result, uint32_t ideal, uint32_t window_tokens)
{
    const uint32_t lost = ideal - KV_MIN(ideal, result->hit_tokens);
    return lost >= REPLAY_SHORT_TOKENS && ideal > window_tokens;
}

static void count(struct replay_class *class, const struct turn_prefill *result, uint32_t ideal,
                  bool fell_short)
{
    class->turns++;
    class->outcomes[result->outcome]++;
    class->prompt_tokens += result->prompt_tokens;
    class->ideal_tokens += ideal;
    class->hit_tokens += result->hit_tokens;
    class->replayed_tokens += result->replayed_tokens;
    class->short_turns += fell_short ? 1 : 0;
}

/* Judges one turn. */
static void judge(struct replay_session *session, enum trace_class class, uint32_t ideal,
                  const struct turn_prefill *result)
{
    struct replay *replay = session->replay;
    const uint64_t sess = replay->trace->sessions[session->session].sess;
    const uint32_t lost = ideal - KV_MIN(ideal, result->hit_tokens);
    const bool fell_short = is_short(result, ideal, replay->window_tokens);

    count(&replay->all, result, ideal, fell_short);
    count(&replay->classes[class], result, ideal, fell_short);
    replay->computed_tokens += result->computed_tokens;
    replay->prefill_ms += result->total_ms;
    if (!fell_short) return;
    char diverged[48] = "";
    if (result->diverged)
        (void)snprintf(diverged, sizeof(diverged), ", diverged at %u", result->diverged_at);
    ctl_say(replay->ctl,
            "session %" PRIu64 " turn %u (%s): %u of %u tokens could be reused, %u were: %s %s; "
            "the daemon found %u stored%s",
            sess, session->next, trace_class_name(class), ideal, result->prompt_tokens,
            result->hit_tokens, turn_outcome_name(result->outcome), result->reason,
            result->stored_tokens, diverged);
    if (lost <= replay->worst_tokens) return;
    replay->worst_tokens = lost;
    replay->worst_sess = sess;
    replay->worst_turn = session->next;
    replay->worst_ideal = ideal;
    replay->worst_hit = result->hit_tokens;
    (void)snprintf(replay->worst_reason, sizeof(replay->worst_reason), "%s", result->reason);
}

/* Lets as much time pass as did before this turn. */
static bool pass_time(struct replay_session *session, const struct trace_item *item,
                      struct client_failure *failure)
{
    const struct trace *trace = session->replay->trace;
    const struct trace_session *recorded = &trace->sessions[session->session];
    uint64_t gap_ms = item->turn.gap_ms;

    if (!session->replay->advance_clock || session->next == 0) return true;
    if (!item->turn.has_gap) {
        const struct trace_turn *before = &trace->items[recorded->items[session->next - 1]].turn;
        gap_ms = item->turn.t_ms - KV_MIN(item->turn.t_ms, before->t_ms + before->dur_ms);
    }
    return turn_advance_clock(session->replay->ops, gap_ms, failure);
}

int replay_session_turn(struct replay_session *session, bool *ret_more)
{
    struct replay *replay = session->replay;
    const struct trace_session *recorded = &replay->trace->sessions[session->session];
    const uint32_t index = recorded->items[session->next];
    const struct trace_item *item = &replay->trace->items[index];
    const uint32_t in = item->turn.in_tokens;
    const uint32_t out = item->turn.out_tokens;
    struct turn_prefill prefill = {.outcome = TURN_NONE};
    struct turn_decode decode = {.tokens = 0};
    struct client_failure failure;

    trace_prompt_tokens(replay->trace, index, session->vocab_tokens, session->prompt);
    trace_answer_tokens(replay->trace, index, session->vocab_tokens, session->answer);
    const uint32_t match = trace_ideal_match(session->ideal, session->prompt, in);
    const uint32_t ideal = KV_MIN(match, KV_MAX(in, 1u) - 1);

    if (in > 0 && (!pass_time(session, item, &failure) ||
                   !turn_run_prefill(replay->client, session->name, session->prompt, in, &prefill,
                                     &failure) ||
                   !turn_run_forced(replay->client, session->name, session->answer, out, &decode,
                                    &failure))) {
        ctl_error("session %" PRIu64 ", turn %u, prompt of %u tokens:", recorded->sess,
                  session->next, in);
        return ctl_failure(&failure);
    }
    if (in > 0) judge(session, class_of(session, item), ideal, &prefill);
    replay->decoded_tokens += decode.tokens;
    replay->decode_ms += decode.total_ms;
    replay->turns_done++;
    if (trace_ideal_add(session->ideal, session->prompt, in, session->answer, out) != KV_OK ||
        !hold_blocks(&session->holders, &item->blocks, session->next))
        return no_memory();
    session->next++;
    *ret_more = session->next < recorded->item_count && session->next < replay->turns_max;
    return CLIENT_EXIT_OK;
}

int replay_session_end(struct replay_session *session, bool abandoned)
{
    struct client_failure failure;
    int code = CLIENT_EXIT_OK;

    if (!session->replay) return CLIENT_EXIT_OK;
    if (!abandoned && !turn_close(session->replay->client, session->name, &failure))
        code = ctl_failure(&failure);
    trace_ideal_destroy(session->ideal);
    trace_map_fini(&session->holders);
    free(session->prompt);
    free(session->answer);
    *session = (struct replay_session){0};
    return code;
}
