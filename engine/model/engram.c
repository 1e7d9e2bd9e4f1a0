/*
 * Engram row numbers (the model's specification, section 2.8).
 *
 * The multipliers come out of NumPy's generator, so that generator is written here from its
 * published definitions: SeedSequence (O'Neill's seed_seq_fe, as NumPy fixes its constants), PCG64
 * (128-bit linear congruential, XSL-RR output), and Lemire's multiplication for a bounded number,
 * which works in 32 bits where the bound allows and then uses both halves of a 64-bit output, low
 * half first.
 */

#include "engine/model/engram.h"

#include "engine/model/primes.h"

#include <assert.h>
#include <stdbool.h>

__extension__ typedef unsigned __int128 wide;

#define SEED_POOL 4u

struct seed_hash {
    uint32_t constant;
    uint32_t factor;
};

static uint32_t seed_step(struct seed_hash *hash, uint32_t value)
{
    value ^= hash->constant;
    hash->constant *= hash->factor;
    value *= hash->constant;
    return value ^ (value >> 16);
}

static uint32_t seed_mix(uint32_t x, uint32_t y)
{
    const uint32_t value = 0xca01f9ddu * x - 0x4973f715u * y;
    return value ^ (value >> 16);
}

/* SeedSequence(seed).generate_state(8 words of 32 bits).  Words of a seed that are not there count
 * as zero, so two words serve every seed. */
static void seed_words(uint64_t seed, uint32_t words[8])
{
    struct seed_hash in = {.constant = 0x43b0d7e5u, .factor = 0x931e8875u};
    struct seed_hash out = {.constant = 0x8b51f9ddu, .factor = 0x58f38dedu};
    const uint32_t entropy[SEED_POOL] = {(uint32_t)seed, (uint32_t)(seed >> 32), 0, 0};
    uint32_t pool[SEED_POOL];

    for (uint32_t i = 0; i < SEED_POOL; i++)
        pool[i] = seed_step(&in, entropy[i]);
    for (uint32_t from = 0; from < SEED_POOL; from++)
        for (uint32_t to = 0; to < SEED_POOL; to++)
            if (from != to) pool[to] = seed_mix(pool[to], seed_step(&in, pool[from]));
    for (uint32_t i = 0; i < 8; i++)
        words[i] = seed_step(&out, pool[i % SEED_POOL]);
}

struct pcg64 {
    wide state, increment;
    bool has_half; /* The upper 32 bits of the last output are still to be used. */
    uint32_t half;
};

static void pcg64_step(struct pcg64 *pcg)
{
    const wide factor = (wide)0x2360ed051fc65da4u << 64 | 0x4385df649fccf645u;
    pcg->state = pcg->state * factor + pcg->increment;
}

static void pcg64_init(struct pcg64 *pcg, uint64_t seed)
{
    uint32_t w[8];
    uint64_t v[4];

    seed_words(seed, w);
    for (int i = 0; i < 4; i++)
        v[i] = (uint64_t)w[2 * i + 1] << 32 | w[2 * i];
    *pcg = (struct pcg64){.increment = ((wide)v[2] << 64 | v[3]) << 1 | 1};
    pcg64_step(pcg);
    pcg->state += (wide)v[0] << 64 | v[1];
    pcg64_step(pcg);
}

static uint64_t pcg64_next(struct pcg64 *pcg)
{
    pcg64_step(pcg);
    const uint64_t value = (uint64_t)(pcg->state >> 64) ^ (uint64_t)pcg->state;
    const unsigned turn = (unsigned)(pcg->state >> 122);
    return value >> turn | value << (-turn & 63);
}

static uint32_t pcg64_next32(struct pcg64 *pcg)
{
    pcg->has_half = !pcg->has_half;
    if (!pcg->has_half) return pcg->half;
    const uint64_t value = pcg64_next(pcg);
    pcg->half = (uint32_t)(value >> 32);
    return (uint32_t)value;
}

static uint64_t bounded32(struct pcg64 *pcg, uint32_t bound)
{
    /* The low half says how far into its bucket a number fell; the first 2^32 mod bound of each
     * are one number too many and are drawn again. */
    const uint32_t surplus = -bound % bound;
    for (;;) {
        const uint64_t product = (uint64_t)pcg64_next32(pcg) * bound;
        if ((uint32_t)product >= surplus) return product >> 32;
    }
}

static uint64_t bounded64(struct pcg64 *pcg, uint64_t bound)
{
    const uint64_t surplus = -bound % bound;
    for (;;) {
        const wide product = (wide)pcg64_next(pcg) * bound;
        if ((uint64_t)product >= surplus) return (uint64_t)(product >> 64);
    }
}

void eng_numpy_integers(uint64_t seed, uint64_t bound, uint32_t count, uint64_t *ret_values)
{
    struct pcg64 pcg;
    assert(bound >= 1 && bound <= INT64_MAX);

    pcg64_init(&pcg, seed);
    for (uint32_t i = 0; i < count; i++) {
        if (bound == 1)
            ret_values[i] = 0; /* Draws nothing. */
        else if (bound == (uint64_t)UINT32_MAX + 1)
            ret_values[i] = pcg64_next32(&pcg);
        else if (bound <= UINT32_MAX)
            ret_values[i] = bounded32(&pcg, (uint32_t)bound);
        else
            ret_values[i] = bounded64(&pcg, bound);
    }
}

void eng_engram_hash_init(struct eng_engram_hash *hash, const struct eng_config *config,
                          uint32_t index)
{
    const uint64_t bound = (uint64_t)INT64_MAX / config->engram_compressed / 2;
    uint32_t primes[ENG_ENGRAM_COLUMNS_MAX];
    assert(index < config->engram_count);
    assert(eng_config_engram_columns(config) <= ENG_ENGRAM_COLUMNS_MAX);

    *hash = (struct eng_engram_hash){
        .max_ngram = config->engram_max_ngram,
        .heads = config->engram_heads,
        .columns = eng_config_engram_columns(config),
    };
    eng_numpy_integers((uint64_t)10007 * config->engram_layers[index], bound, hash->max_ngram,
                       hash->multipliers);
    for (uint32_t s = 0; s < hash->max_ngram; s++)
        hash->multipliers[s] = 2 * hash->multipliers[s] + 1;
    eng_engram_primes(config->engram_bucket_base, hash->columns, index, primes);
    for (uint32_t c = 0; c < hash->columns; c++) {
        hash->primes[c] = primes[c];
        hash->offsets[c] = hash->rows;
        hash->rows += primes[c];
    }
}

void eng_engram_context(const struct eng_engram_ids *ids, const uint32_t *newest_first,
                        uint32_t known, uint32_t max_ngram, uint32_t *ret_context)
{
    bool blocked = false;
    for (uint32_t s = 0; s < max_ngram; s++) {
        if (s >= known || newest_first[s] == ids->image) blocked = true;
        ret_context[s] = blocked ? ids->pad : ids->compressed[newest_first[s]];
    }
}

void eng_engram_rows(const struct eng_engram_hash *hash, const uint32_t *context,
                     uint64_t *ret_rows)
{
    uint64_t mixed = context[0] * hash->multipliers[0];
    for (uint32_t s = 1, c = 0; s < hash->max_ngram; s++) {
        mixed ^= context[s] * hash->multipliers[s];
        for (uint32_t h = 0; h < hash->heads; h++, c++)
            ret_rows[c] = mixed % hash->primes[c] + hash->offsets[c];
    }
}
