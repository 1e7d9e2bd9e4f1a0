#pragma once

/* Token ids of a trace's prompts and answers, made from block ids.
 *
 *   token k of block b        hash(scope, b, k)
 *   token k after the last full block   hash(session, turn, k)
 *   answer token k            the token at the same place of the first later prompt that goes on
 *                             from this turn, when that prompt is long enough to hold prompt and
 *                             answer and a full block of it covers the place; else
 *                             hash(session, turn, "out", k)
 *
 * The scope is the file when the header says so, else the session; a sub-agent's chat has the scope
 * of the session it belongs to.  Hashes are mapped to [3, vocab - 3), away from the ids models keep
 * for themselves.  The same trace, scale and vocabulary give the same tokens everywhere.
 *
 * Equal ids give equal tokens.  Different ids give different tokens only as far as the vocabulary
 * allows: two given tokens agree with probability 1 / (vocab - 6), which is 1/506 for a vocabulary
 * of 512.  At scale 64 a block is one token, so prompts that part at a block may agree for a token
 * or two more than their ids say.  What a cache can reuse at best must therefore be counted on the
 * tokens: trace_ideal.h does that.  Pure; any thread. */

#include "tools/cachectl/trace_load.h"

/* Leaves one token to choose from at least; models have hundreds. */
#define TRACE_VOCAB_MIN 7u

/* Writes items[item].turn.in_tokens tokens. */
void trace_prompt_tokens(const struct trace *trace, uint32_t item, uint32_t vocab,
                         uint32_t *ret_tokens);

/* Writes items[item].turn.out_tokens tokens. */
void trace_answer_tokens(const struct trace *trace, uint32_t item, uint32_t vocab,
                         uint32_t *ret_tokens);
