#pragma once

/* The calls a turn is made of, as plain values: for replay and demo. */

#include "tools/client/client.h"

enum turn_outcome { TURN_NONE, TURN_EXACT, TURN_REPLAY, TURN_MISS, TURN_OUTCOME_COUNT };

#define TURN_ID_BYTES 16u

struct turn_prefill {
    enum turn_outcome outcome;
    char reason[48];      /* "" for EXACT. */
    char save_reason[48]; /* Why its checkpoint is not stored; "": it is. */
    uint32_t prompt_tokens, hit_tokens, replayed_tokens, computed_tokens, stored_tokens;
    uint32_t hbm_tokens, ssd_tokens;
    bool diverged;
    uint32_t diverged_at;
    double queue_ms, lookup_ms, read_ms, run_ms, commit_ms, total_ms;
};

struct turn_decode {
    uint32_t tokens, head_position;
    double run_ms, total_ms;
    uint8_t checkpoint_id[TURN_ID_BYTES]; /* Of the DECODE_END it left. */
    uint32_t checkpoint_position;
    bool has_checkpoint;
};

const char *turn_outcome_name(enum turn_outcome outcome);

bool turn_open(struct client *client, const char *session, bool *ret_created,
               uint32_t *ret_vocab_tokens, struct client_failure *failure);

bool turn_run_prefill(struct client *client, const char *session, const uint32_t *tokens,
                      uint32_t count, struct turn_prefill *ret, struct client_failure *failure);
/* The same, answered without waiting until its checkpoint is on SSD. */
bool turn_run_prefill_early(struct client *client, const char *session, const uint32_t *tokens,
                            uint32_t count, struct turn_prefill *ret,
                            struct client_failure *failure);

/* The answer is given, not sampled.  Any count; 0 does nothing. */
bool turn_run_forced(struct client *client, const char *session, const uint32_t *tokens,
                     uint32_t count, struct turn_decode *ret, struct client_failure *failure);

/* Samples `count` tokens greedily into ret_tokens.  The call is given up once go_on(context), asked
 * for each message, is false. */
bool turn_run_decode(struct client *client, const char *session, uint32_t count,
                     uint32_t *ret_tokens, bool (*go_on)(void *context), void *context,
                     struct turn_decode *ret, struct client_failure *failure);

/* A MANUAL checkpoint at the head, acknowledged when it is on SSD. */
bool turn_checkpoint(struct client *client, const char *session, uint8_t ret_id[TURN_ID_BYTES],
                     uint32_t *ret_position, struct client_failure *failure);

bool turn_rollback(struct client *client, const char *session, const uint8_t id[TURN_ID_BYTES],
                   uint32_t *ret_head_position, struct client_failure *failure);

bool turn_close(struct client *client, const char *session, struct client_failure *failure);

/* Any step; several calls when it is longer than the daemon takes at once. */
bool turn_advance_clock(struct client *client, uint64_t ms, struct client_failure *failure);
