#pragma once

/*
 * The session that never left memory.
 *
 * A state is an engine session with pages of its own and the ids of its history.  States are never
 * exported, imported or evicted: a copy shares pages until one side writes into them.  What goes on
 * from a state goes on from a copy, so a state that was kept stays what it was.
 */

#include "engine/engine.h"
#include "tests/driver/random.h"

#define REF_REPLAYS_MAX 64u /* Clipped replays one state can remember. */

struct ref_model;
struct ref_state;

/* The CPU backend on the model in model_dir. NULL: cannot be opened, said on stderr.  schedule:
 * what passes are drawn from (pieces, their sizes, and who else is in them); NULL: whole chunks,
 * alone. */
struct ref_model *ref_model_open(const char *model_dir, uint32_t spare_tokens,
                                 struct ex_random *schedule);
void ref_model_close(struct ref_model *model);
const struct kv_layout *ref_model_layout(const struct ref_model *model);
uint32_t ref_model_eos(const struct ref_model *model);

struct ref_state *ref_start(struct ref_model *model);      /* At position 0. */
struct ref_state *ref_copy(const struct ref_state *state); /* To go on from. */
struct ref_state *ref_keep(struct ref_state *state);       /* Another holder of the same. */
void ref_free(struct ref_state *state);                    /* NULL is fine. */

uint32_t ref_tokens(const struct ref_state *state);
const uint32_t *ref_ids(const struct ref_state *state); /* [0, tokens) */
struct kv_image_state ref_image_state(const struct ref_state *state);
/* Positions of the clipped replays below `below`, ascending; returns how many. */
uint32_t ref_replays(const struct ref_state *state, uint32_t below, const uint32_t **ret_replays);

/* Tokens of ids[0, count) that agree with the first `limit` of the state. */
uint32_t ref_shared(const struct ref_state *state, uint32_t limit, const uint32_t *ids,
                    uint32_t count);

void ref_cut(struct ref_state *state, uint32_t tokens);
/* The state's rows [0, tokens) without its windows: what a replay starts from. */
struct ref_state *ref_rows_only(const struct ref_state *state, uint32_t tokens);

/* One call's piece: ids are [0, to). chunk: any, the bits must not depend on it. */
void ref_prefill(struct ref_state *state, const uint32_t *ids, uint32_t replay_from, uint32_t to,
                 uint32_t chunk);

struct ref_decode {
    struct eng_sampling sampling;
    uint32_t max_tokens;
    const uint32_t *forced; /* NULL: sample. */
    uint32_t forced_count;
    const uint32_t *stops; /* Ids that end a sampled answer. */
    uint32_t stop_count;
};

/* As the daemon does: a pending token first, the last one taken stays pending.  Returns how many.
 */
uint32_t ref_decode(struct ref_state *state, const struct ref_decode *how, uint32_t *ret_tokens,
                    uint32_t *ret_crcs);
