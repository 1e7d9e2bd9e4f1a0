#pragma once

/* `cachectl demo`: the parts of it that more than one file needs. */

#include "tools/cachectl/ctl.h"
#include "tools/cachectl/trace_load.h"
#include "tools/cachectl/turns.h"

struct json_t;

#define DEMO_SESSIONS_MAX 4u
#define DEMO_TURNS_MAX 16u
/* Fewer are reused by design: one sampled and not yet processed, one lost to an odd position. */
#define DEMO_SLACK_TOKENS 2u
/* New tokens of the turns that the demo adds to a recorded session. */
#define DEMO_NEW_TOKENS 8u

/* One session of the excerpt.  Owned by: struct demo. */
struct demo_session {
    char name[64];
    uint32_t index; /* Into trace.sessions. */
    uint32_t vocab_tokens;
    uint32_t turns;
    uint32_t turn_end[DEMO_TURNS_MAX]; /* Tokens of prompt and answer of each turn, */
    uint32_t **turn_tokens;            /* and the tokens. */
    uint8_t turn_checkpoint[DEMO_TURNS_MAX][TURN_ID_BYTES];
    uint32_t turn_position[DEMO_TURNS_MAX];
};

/* Owned by: run(). */
struct demo {
    struct ctl *ctl;
    const char *other_token_file, *ops_token_file, *pid_file, *restart;
    struct trace *trace;
    struct client *user, *ops; /* Opened again after the restart. */
    uint32_t window_tokens;
    struct demo_session sessions[DEMO_SESSIONS_MAX];
    uint32_t session_count;
    uint32_t turns;
    struct json_t *lines; /* NULL: text. */
    bool wrong;           /* A line was not what it should be. */
};

/* What a line must show.  false in *ok makes the demo exit 1. */
struct demo_expect {
    bool exact, replay, miss; /* Outcomes allowed. */
    const char *reason;       /* NULL: any. */
    uint32_t hit_min;
};

/* Prints one line of a prefill and checks it. */
void demo_line(struct demo *demo, const char *what, const struct demo_session *session,
               const struct turn_prefill *result, const struct demo_expect *expect);
/* Prints "-- text" between the parts. */
void demo_title(struct demo *demo, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Prints a line that is a sentence; ok false: it is not what it should be. */
void demo_say(struct demo *demo, bool ok, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The parts, in order.  Each returns an exit code and has printed why it is not 0. */
int demo_turns(struct demo *demo);
int demo_expiry(struct demo *demo);
int demo_restart(struct demo *demo);
int demo_rollback(struct demo *demo);
int demo_other_user(struct demo *demo);

int demo_connect(struct demo *demo);
void demo_disconnect(struct demo *demo);

/* The recorded turns of a session, at demo_turns.c. */
int demo_session_open(struct demo *demo, struct demo_session *session);
int demo_session_turn(struct demo *demo, struct demo_session *session);
