#pragma once

/* What a cache without limits could reuse of a session: the longest common prefix of a prompt with
 * any earlier sequence (prompt and answer) of the session, counted on the tokens themselves.
 *
 *     for each turn of the session, in order:
 *         ideal = trace_ideal_match(history, prompt, prompt_count)
 *         ... prompt and answer ...
 *         trace_ideal_add(history, prompt, prompt_count, answer, answer_count)
 *
 * Owned by: whoever replays the session; one per session; no locking. */

#include "kvstore/base/status.h"

#include <stdint.h>

struct trace_ideal;

/* NULL when there is no memory. */
struct trace_ideal *trace_ideal_create(void);
void trace_ideal_destroy(struct trace_ideal *ideal);

/* 0 to count.  A cache that must compute at least one token of a prompt reaches count - 1 when the
 * answer is count; that is the caller's to say. */
uint32_t trace_ideal_match(const struct trace_ideal *ideal, const uint32_t *tokens, uint32_t count);

/* Remembers prompt followed by answer; either may be empty. */
KV_MUST_CHECK kv_status trace_ideal_add(struct trace_ideal *ideal, const uint32_t *prompt,
                                        uint32_t prompt_count, const uint32_t *answer,
                                        uint32_t answer_count);
