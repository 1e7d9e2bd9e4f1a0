/*
 * Tokens from block ids.
 *
 * A replay sends no text, only tokens whose prefixes agree where the recorded prompts did.  The
 * hash is three rounds of the splitmix64 finaliser over (kind, scope, block, place): cheap enough
 * for prompts of 100,000 tokens, and every input bit reaches the few bits a small vocabulary
 * leaves. The kind keeps block, tail and answer tokens apart.
 */

#include "tools/cachectl/trace_tokens.h"

#include <assert.h>

enum { TOKEN_FIRST = 3, TOKENS_RESERVED = 6 };

enum token_kind { TOKEN_OF_BLOCK = 1, TOKEN_OF_TAIL = 2, TOKEN_OF_ANSWER = 3 };

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Everything of the hash but the place. */
static uint64_t seed_of(enum token_kind kind, uint64_t scope, uint64_t block)
{
    return mix(mix(scope + ((uint64_t)kind << 56)) ^ block);
}

static uint32_t token_of(uint64_t seed, uint64_t place, uint32_t vocab)
{
    return TOKEN_FIRST + (uint32_t)(mix(seed ^ place) % (vocab - TOKENS_RESERVED));
}

static uint64_t scope_of(const struct trace *trace, const struct trace_item *item)
{
    if (trace->header.global_scope) return 0;
    return item->turn.has_sub ? item->turn.sub : item->turn.sess;
}

void trace_prompt_tokens(const struct trace *trace, uint32_t item_index, uint32_t vocab,
                         uint32_t *ret_tokens)
{
    assert(item_index < trace->item_count);
    assert(vocab >= TRACE_VOCAB_MIN);

    const struct trace_item *item = &trace->items[item_index];
    const uint64_t scope = scope_of(trace, item);
    const uint32_t block_tokens = trace->header.block_tokens;
    uint32_t at = 0;

    for (uint32_t i = 0; i < item->blocks.run_count; i++) {
        for (uint32_t j = 0; j < item->blocks.runs[i].count; j++) {
            const uint64_t seed = seed_of(TOKEN_OF_BLOCK, scope, item->blocks.runs[i].first + j);
            for (uint32_t k = 0; k < block_tokens; k++)
                ret_tokens[at++] = token_of(seed, k, vocab);
        }
    }
    assert(at <= item->turn.in_tokens);
    const uint64_t seed = seed_of(TOKEN_OF_TAIL, item->turn.sess, item->turn.turn);
    for (uint32_t k = 0; at < item->turn.in_tokens; k++)
        ret_tokens[at++] = token_of(seed, k, vocab);
}

/* Where block number `index` of a list is: walks the runs once over a whole answer. */
struct block_cursor {
    const struct trace_runs *runs;
    uint32_t run;
    uint32_t run_start; /* Block number of the run's first id. */
};

static uint64_t block_id(struct block_cursor *cursor, uint32_t index)
{
    assert(index >= cursor->run_start);
    assert(index < cursor->runs->block_count);

    while (index - cursor->run_start >= cursor->runs->runs[cursor->run].count)
        cursor->run_start += cursor->runs->runs[cursor->run++].count;
    return cursor->runs->runs[cursor->run].first + (index - cursor->run_start);
}

void trace_answer_tokens(const struct trace *trace, uint32_t item_index, uint32_t vocab,
                         uint32_t *ret_tokens)
{
    assert(item_index < trace->item_count);
    assert(vocab >= TRACE_VOCAB_MIN);

    const struct trace_item *item = &trace->items[item_index];
    const uint32_t block_tokens = trace->header.block_tokens;
    const uint64_t end = (uint64_t)item->turn.in_tokens + item->turn.out_tokens;
    struct block_cursor cursor = {0};
    uint64_t covered = 0; /* Tokens from the start that the child's full blocks cover. */

    if (item->child != TRACE_NO_ITEM && trace->items[item->child].turn.in_tokens >= end) {
        cursor.runs = &trace->items[item->child].blocks;
        covered = (uint64_t)cursor.runs->block_count * block_tokens;
    }
    const uint64_t scope = scope_of(trace, item);
    const uint64_t own = seed_of(TOKEN_OF_ANSWER, item->turn.sess, item->turn.turn);
    for (uint32_t k = 0; k < item->turn.out_tokens; k++) {
        const uint64_t at = (uint64_t)item->turn.in_tokens + k;
        if (at >= covered) {
            ret_tokens[k] = token_of(own, k, vocab);
            continue;
        }
        const uint64_t id = block_id(&cursor, (uint32_t)(at / block_tokens));
        ret_tokens[k] = token_of(seed_of(TOKEN_OF_BLOCK, scope, id), at % block_tokens, vocab);
    }
}
