#pragma once

/*
 * Engram: which rows of the n-gram tables a position reads (the model's specification, section 2.8,
 * rules 2 to 5; names as there).
 *
 * A position's row numbers depend on the last max_ngram token ids and on nothing else, so they are
 * known before any layer has run.  For order n (2 .. max_ngram) and head h there is one column
 * c = (n - 2) x heads + h with a prime of its own; a layer's row is hash mod prime + offset.
 *
 * Owned by: the model.  Immutable after init; any thread.
 */

#include "engine/model/config.h"

#include <stdint.h>

#define ENG_NGRAM_MAX (ENG_ENGRAM_ORDERS_MAX + 1)
#define ENG_ENGRAM_COLUMNS_MAX (ENG_ENGRAM_ORDERS_MAX * ENG_ENGRAM_HEADS_MAX)

struct eng_engram_hash {
    uint32_t max_ngram, heads, columns;
    uint64_t multipliers[ENG_NGRAM_MAX]; /* Odd; times a compressed id below 2^63. */
    uint64_t primes[ENG_ENGRAM_COLUMNS_MAX];
    uint64_t offsets[ENG_ENGRAM_COLUMNS_MAX]; /* Sums of the primes before. */
    uint64_t rows;                            /* Sum of all: rows of the layer's table. */
};

/* The first `count` numbers of NumPy's default_rng(seed).integers(0, bound, dtype=int64), which is
 * PCG64 seeded through SeedSequence, and Lemire's method; bound 1 .. 2^63 - 1. */
void eng_numpy_integers(uint64_t seed, uint64_t bound, uint32_t count, uint64_t *ret_values);

/* The hash of the index-th Engram layer of a checked config. */
void eng_engram_hash_init(struct eng_engram_hash *hash, const struct eng_config *config,
                          uint32_t index);

/* What the ids of a vocabulary count as. */
struct eng_engram_ids {
    const uint32_t *compressed; /* Of each vocabulary id; borrowed. */
    uint32_t pad;               /* Compressed id of pad_token_id. */
    uint32_t image;             /* Vocabulary id that blocks. */
};

/*
 * newest_first[s] is the vocabulary id at position p - s, `known` of them (p + 1 if fewer than
 * max_ngram stand before and at p).  ret_context[s], max_ngram of them: the compressed id, or pad
 * where there is no position, or where it or one between it and p is an image token.
 */
void eng_engram_context(const struct eng_engram_ids *ids, const uint32_t *newest_first,
                        uint32_t known, uint32_t max_ngram, uint32_t *ret_context);

/* `columns` row numbers of the layer's table. */
void eng_engram_rows(const struct eng_engram_hash *hash, const uint32_t *context,
                     uint64_t *ret_rows);
