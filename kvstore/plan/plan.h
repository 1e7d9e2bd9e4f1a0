#pragma once

/*
 * Resume planning: the only place that decides how much of a session is loaded, recomputed or
 * computed for the first time (ARCHITECTURE.md, "Rules of resume and of the tree").
 *
 * Rows cover the whole prefix and are what we pay to store.  Windows cover only the last tokens of
 * each layer and may be gone, because rerunning one window of tokens over the stored rows rebuilds
 * them, approximately at the seam.
 *
 *      0                 replay_from          restore_tokens          prompt_tokens
 *      |---- load rows ----|---- load rows + rerun ----|---- prefill ----|
 *
 * A window a little below the end of the rows is worth as much as a replay: the tokens between are
 * computed again, which costs no more and approximates nothing.
 *
 * Pure: no I/O, no clock, no allocation, any thread.
 */

#include <stdbool.h>
#include <stdint.h>

/* What the index holds of this prompt.  Both are at most prompt_tokens - 1. */
struct kv_found {
    uint32_t rows_tokens;  /* R: longest prefix with rows.  0: nothing usable. */
    uint32_t image_tokens; /* E: longest position a window serves (kv_image_cut).  0: none. */
    bool replays_exhausted; /* The path carries KV_REPLAYS_MAX clipped replays: no further one. */
};

enum kv_plan_kind {
    KV_PLAN_MISS,   /* Prefill the whole prompt. */
    KV_PLAN_REPLAY, /* Load rows, rerun one window to rebuild windows, prefill. */
    KV_PLAN_EXACT,  /* Load rows and windows, prefill. */
};

/* Invariants: replay_from <= restore_tokens < prompt_tokens; only a replay is approximate;
 * restore_tokens of a replay is even. */
struct kv_plan {
    enum kv_plan_kind kind;
    uint32_t replay_from;
    uint32_t restore_tokens; /* H */
    uint32_t prompt_tokens;  /* N */
};

/* EXACT at E if R - E <= window; else REPLAY at even(R) if that is beyond one window; else, if any
 * window is there, EXACT at E; else MISS. */
struct kv_plan kv_plan_resume(uint32_t window_tokens, struct kv_found found,
                              uint32_t prompt_tokens);
