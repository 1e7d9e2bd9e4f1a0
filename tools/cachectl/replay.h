#pragma once

/* `cachectl trace replay`: the parts of it that more than one file needs. */

#include "tools/cachectl/ctl.h"
#include "tools/cachectl/trace_classes.h"
#include "tools/cachectl/trace_ideal.h"
#include "tools/cachectl/turns.h"

/* A turn falls short when it reuses this many tokens less than the trace allows: one token that was
 * sampled and not yet processed, and one that rounding down to an even position costs, are the
 * design's; a third is a lost hit. */
#define REPLAY_SHORT_TOKENS 3u

struct replay_class {
    uint64_t turns, outcomes[TURN_OUTCOME_COUNT];
    uint64_t prompt_tokens, ideal_tokens, hit_tokens, replayed_tokens;
    uint64_t short_turns;
};

/* Owned by: replay.c's run(). */
struct replay {
    const struct ctl *ctl;
    const struct trace *trace;
    struct client *client;
    struct client *ops; /* NULL: no statistics, no clock. */
    char prefix[32];    /* Of session names: a replay never meets an earlier one. */
    uint32_t window_tokens;
    bool advance_clock;
    uint64_t turns_max; /* Of each session. */
    uint64_t turns_total, turns_done;

    struct replay_class classes[TRACE_CLASS_COUNT];
    struct replay_class all;
    uint32_t worst_tokens; /* Most tokens a turn fell short by. */
    uint64_t worst_sess;
    uint32_t worst_turn, worst_ideal, worst_hit;
    char worst_reason[48];
    uint64_t computed_tokens, decoded_tokens;
    double prefill_ms, decode_ms;
    uint64_t elapsed_ms;
    bool wrong_bytes_known;
    uint64_t wrong_bytes;
};

/* One session on its way through the trace.  Zero-initialised is empty. */
struct replay_session {
    struct replay *replay;
    uint32_t session; /* Index into trace.sessions. */
    uint32_t next;    /* Index into its items. */
    uint32_t vocab_tokens;
    char name[64];
    struct trace_ideal *ideal;
    struct trace_map holders; /* Block id -> newest turn whose prompt holds it. */
    uint32_t *prompt, *answer;
};

/* Opens it at the daemon.  All three return an exit code and have printed why. */
int replay_session_start(struct replay_session *session, struct replay *replay, uint32_t index);
/* The next turn; *ret_more says whether another follows. */
int replay_session_turn(struct replay_session *session, bool *ret_more);
/* Closes it at the daemon (not when `abandoned`) and frees it. */
int replay_session_end(struct replay_session *session, bool abandoned);

/* Prints and returns the exit code the result stands for. */
int replay_report(const struct replay *replay);
