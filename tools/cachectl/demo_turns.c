/*
 * The first part of the demo: recorded turns of a few sessions, each through OpenSession, Prefill,
 * Decode and Checkpoint, with one line a turn.
 *
 * A turn that goes on from what its session has held must reuse all of it but two tokens: the last
 * token of an answer is sampled and not yet processed, and resuming at an odd position costs one.
 */

#include "tools/cachectl/demo.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/trace_tokens.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Shorter prompts show little. */
#define PROMPT_TOKENS_MIN 200u

int demo_session_open(struct demo *demo, struct demo_session *session)
{
    struct client_failure failure;
    bool created = false;

    if (!turn_open(demo->user, session->name, &created, &session->vocab_tokens, &failure))
        return ctl_failure(&failure);
    if (session->vocab_tokens >= TRACE_VOCAB_MIN) return CLIENT_EXIT_OK;
    ctl_error("the daemon's model has a vocabulary of %u tokens; the excerpt needs %u",
              session->vocab_tokens, TRACE_VOCAB_MIN);
    return CLIENT_EXIT_FAILED;
}

/* Tokens this prompt shares with the best turn before it, less the one that must be computed. */
static uint32_t reusable_tokens(const struct demo_session *session, const uint32_t *tokens,
                                uint32_t count)
{
    uint32_t best = 0;

    for (uint32_t turn = 0; turn < session->turns; turn++) {
        uint32_t same = 0;
        while (same < count && same < session->turn_end[turn] &&
               session->turn_tokens[turn][same] == tokens[same])
            same++;
        best = KV_MAX(best, same);
    }
    return KV_MIN(best, count - 1);
}

int demo_session_turn(struct demo *demo, struct demo_session *session)
{
    const uint32_t turn = session->turns;
    const uint32_t index = demo->trace->sessions[session->index].items[turn];
    const struct trace_turn *recorded = &demo->trace->items[index].turn;
    const uint32_t in = recorded->in_tokens;
    const uint32_t out = recorded->out_tokens;
    struct turn_prefill prefill;
    struct turn_decode decode;
    struct client_failure failure;
    char what[32];

    uint32_t *tokens = calloc((size_t)in + out + 1, sizeof(*tokens));
    if (!tokens) {
        ctl_error("out of memory");
        return CLIENT_EXIT_FAILED;
    }
    trace_prompt_tokens(demo->trace, index, session->vocab_tokens, tokens);
    trace_answer_tokens(demo->trace, index, session->vocab_tokens, tokens + in);
    const uint32_t reusable = reusable_tokens(session, tokens, in);
    session->turn_tokens[turn] = tokens;
    session->turn_end[turn] = in + out;

    if (!turn_run_prefill(demo->user, session->name, tokens, in, &prefill, &failure) ||
        !turn_run_forced(demo->user, session->name, tokens + in, out, &decode, &failure) ||
        !turn_checkpoint(demo->user, session->name, session->turn_checkpoint[turn],
                         &session->turn_position[turn], &failure))
        return ctl_failure(&failure);
    const bool first = turn == 0;
    /* A prefix of one window or less is computed again: that costs no more and is exact. */
    const bool tiny = reusable <= demo->window_tokens;
    const struct demo_expect expect = {
        .exact = !first,
        .replay = !first,
        .miss = first || tiny,
        .reason = first ? "NEVER_STORED" : NULL,
        .hit_min = first || tiny ? 0 : reusable - DEMO_SLACK_TOKENS,
    };
    (void)snprintf(what, sizeof(what), "turn %u", turn);
    demo_line(demo, what, session, &prefill, &expect);
    session->turns++;
    return CLIENT_EXIT_OK;
}

/* New tokens that the first `turns` turns of a session cost, or UINT64_MAX if it is no good here.
 */
static uint64_t cost(const struct demo *demo, const struct trace_session *session)
{
    uint64_t tokens = 0;

    if (session->is_sub || session->item_count < demo->turns) return UINT64_MAX;
    for (uint32_t i = 0; i < demo->turns; i++) {
        const struct trace_turn *turn = &demo->trace->items[session->items[i]].turn;
        if (turn->in_tokens < KV_MAX(4 * demo->window_tokens, PROMPT_TOKENS_MIN)) return UINT64_MAX;
        if (turn->out_tokens == 0) return UINT64_MAX;
        if (i > 0 && turn->keep_tokens < 2 * demo->window_tokens) return UINT64_MAX;
        tokens += turn->in_tokens - turn->keep_tokens + turn->out_tokens;
    }
    return tokens;
}

/* The cheapest sessions that have enough turns, because a demo is watched. */
static int choose_sessions(struct demo *demo)
{
    enum { WANTED = 3 };

    for (uint32_t n = 0; n < WANTED; n++) {
        uint64_t best_cost = UINT64_MAX;
        uint32_t best = 0;
        for (uint32_t i = 0; i < demo->trace->session_count; i++) {
            bool taken = false;
            for (uint32_t j = 0; j < demo->session_count; j++)
                taken = taken || demo->sessions[j].index == i;
            const uint64_t tokens = taken ? UINT64_MAX : cost(demo, &demo->trace->sessions[i]);
            if (tokens < best_cost) best = i;
            best_cost = KV_MIN(best_cost, tokens);
        }
        if (best_cost == UINT64_MAX) break;
        struct demo_session *session = &demo->sessions[demo->session_count++];
        session->index = best;
        (void)snprintf(session->name, sizeof(session->name), "demo-%u", demo->session_count);
        session->turn_tokens = calloc(DEMO_TURNS_MAX, sizeof(*session->turn_tokens));
        if (!session->turn_tokens) return CLIENT_EXIT_FAILED;
    }
    if (demo->session_count > 0) return CLIENT_EXIT_OK;
    ctl_error("the excerpt has no session of %u turns that is long enough; try --turns",
              demo->turns);
    return CLIENT_EXIT_FAILED;
}

int demo_turns(struct demo *demo)
{
    int code = choose_sessions(demo);

    if (code != 0) return code;
    demo_title(demo, "recorded turns of %u sessions: open, prefill, decode, checkpoint",
               demo->session_count);
    for (uint32_t i = 0; i < demo->session_count && code == 0; i++)
        code = demo_session_open(demo, &demo->sessions[i]);
    /* Turn by turn, as a server sees its users. */
    for (uint32_t turn = 0; turn < demo->turns; turn++) {
        for (uint32_t i = 0; i < demo->session_count && code == 0; i++)
            code = demo_session_turn(demo, &demo->sessions[i]);
    }
    return code;
}
