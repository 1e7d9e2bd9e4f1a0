#pragma once

/*
 * How many tokens to draft before the next step of a session.
 *
 * A step that verifies k drafts costs more than one without and yields up to k + 1 tokens.  What it
 * yields follows from how often drafts were accepted, by place; what it costs was measured.  Drafts
 * are made where tokens per second rise by a margin; elsewhere drafting is off, and is tried again
 * from time to time, ever more seldom while it keeps failing.  The number never changes what is
 * generated, only how fast.
 *
 * Pure: time comes in as numbers.  Owned by: worker.
 */

#include "kvstore/base/limits.h"

#include <stdbool.h>
#include <stdint.h>

#define DRAFT_SIZE_CLASSES 9u /* Of sessions in a pass: 1, 2, 3-4, 5-8, ... 129 and more. */

/*
 * Nanoseconds of a pass that has the steps, drafting included; shared by all sessions.  There are
 * two of them: of passes of steps only, and of those that have a chunk of prefill rows besides.
 * There a draft is cheap, because a session's next token waits for the chunk anyway; that prefills
 * go slower by what drafts add is what steps coming first means (batch.h).
 */
struct draft_costs {
    double ns[DRAFT_SIZE_CLASSES]
             [KV_DRAFTS_MAX + 1]; /* By drafts per session; 0: not yet measured. */
};

/* What a pass with `other_rows` of prefills took, as it would be with `chunk_tokens` of them: such
 * passes are bound by computing, so time goes with rows.  0: too few of them to say. */
uint64_t draft_costs_beside(uint64_t ns, uint32_t step_rows, uint32_t other_rows,
                            uint32_t chunk_tokens);

/* drafts: per session, rounded up. */
void draft_costs_seen(struct draft_costs *costs, uint32_t sessions, uint32_t drafts, uint64_t ns);

/* One session's: zeroed is a good start. */
struct draft_policy {
    double missed[KV_DRAFTS_MAX]; /* How often the draft at a place was refused, when it was
                                     reached. */
    uint32_t seen[KV_DRAFTS_MAX]; /* Drafts at the place so far, up to a bound. */
    uint32_t wait;                /* Steps without drafts until the next try. */
    uint32_t interval;            /* The next wait after a failure. */
    uint32_t tries;               /* Left in this try. */
    uint32_t steps;               /* With drafts, since one without. */
};

/* Drafts for the next step, at most `max`; sessions: how many step in the same pass. */
uint32_t draft_policy_next(struct draft_policy *policy, const struct draft_costs *costs,
                           uint32_t sessions, uint32_t max);

/* Of `proposed` drafts those that were compared with a token: behind a refused one, or where the
 * answer ended, nothing says whether a draft was right. */
uint32_t draft_policy_compared(uint32_t proposed, uint32_t accepted, bool ended);

/* proposed: those compared; accepted <= proposed: the first ones. */
void draft_policy_seen(struct draft_policy *policy, uint32_t proposed, uint32_t accepted);
