#pragma once

/*
 * What config.json says of a model, checked, and the layout that follows from it.
 *
 * Field names of the released `text_config` and `config.json` (the model's specification, section
 * 1.1); counts are elements, tokens or layers, never bytes.  Every range and relation is checked
 * while reading, so that later code multiplies and indexes without further thought.  A plain value;
 * immutable after reading; any thread.
 */

#include "kvstore/base/limits.h"
#include "kvstore/base/status.h"
#include "kvstore/format/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENG_STREAMS 4u        /* hc_mult */
#define ENG_HEAD_DIM_MAX 512u /* head_dim and index_head_dim: what the kernels have room for. */
#define ENG_ENGRAM_MAX 8u
#define ENG_ENGRAM_ORDERS_MAX 3u /* n-grams of 2, 3 and 4 tokens */
#define ENG_ENGRAM_HEADS_MAX 32u
#define ENG_NO_SOURCE 0xffffffffu
#define ENG_LAYERS_MAX (KV_LAYERS_MAX + KV_DRAFT_STAGES_MAX)

struct eng_config {
    char name[64];
    uint32_t eos, image_id;
    uint32_t pad;       /* engram_pad_token_id, or else pad_token_id */
    uint32_t positions; /* max_position_embeddings; the layout has the limit that holds. */
    uint32_t vocab, hidden, layers, encoder_layers, window;
    uint32_t heads, head_dim, rope_dim, q_lora, o_groups, o_lora;
    uint32_t index_heads, index_dim, index_topk;
    uint32_t candidate_blocks, candidate_block;
    uint32_t experts, experts_active, moe_width;
    uint32_t sinkhorn_iters;
    float hc_eps, rms_eps, route_scale, swiglu_limit;
    float rope_theta, compress_theta, yarn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_original;
    uint32_t candidate_source; /* Layer; also the first of the decoder. */
    /* Engram (section 2.8).  All 0 without it. */
    uint32_t engram_count;
    uint32_t engram_layers[ENG_ENGRAM_MAX]; /* Ascending, all in the encoder. */
    uint64_t engram_rows[ENG_ENGRAM_MAX];   /* engram_num_embeddings: rows of each table. */
    uint32_t engram_max_ngram, engram_heads, engram_dim;
    uint32_t engram_bucket_base; /* engram_vocab_size */
    uint32_t engram_compressed;  /* engram_compressed_vocab_size */
    /* DSpark (section 2.9).  All 0 without it. */
    uint32_t draft_stages, draft_block, draft_noise, draft_rank, draft_experts, draft_active;
    uint32_t draft_target_count;
    uint32_t draft_targets[KV_DRAFT_STAGES_MAX]; /* Layers whose input is tapped, ascending. */
    uint32_t source_count;                       /* Layers that own rows, ascending. */
    uint32_t source_layers[KV_SOURCES_MAX];
    /* Per layer; draft stage s is layer `layers` + s and sees its window only. */
    uint32_t ratio[ENG_LAYERS_MAX];        /* 0: window only. */
    uint32_t rows_source[ENG_LAYERS_MAX];  /* Index into source_layers, or ENG_NO_SOURCE. */
    uint32_t index_source[ENG_LAYERS_MAX]; /* Layer whose list is read, or ENG_NO_SOURCE. */
};

/* `text` is the whole file.  KV_INVALID names the field, what was expected and what was found. */
kv_status eng_config_parse(const char *path, const char *text, size_t count,
                           struct eng_config *ret_config, struct kv_error *err) KV_MUST_CHECK;

/* Rows of one token in one Engram table: orders x heads. */
static inline uint32_t eng_config_engram_columns(const struct eng_config *config)
{
    return (config->engram_max_ngram - 1) * config->engram_heads;
}

/* The config.json of `tiny`, `small` or `v41-flash` (engine/model/configs); NULL: another name. */
const char *eng_config_text(const char *name);

kv_status eng_config_layout(const struct eng_config *config, uint32_t spare_tokens,
                            struct kv_layout *ret_layout, struct kv_error *err) KV_MUST_CHECK;

static inline bool eng_config_owns_rows(const struct eng_config *config, uint32_t layer)
{
    return config->rows_source[layer] != ENG_NO_SOURCE &&
           config->source_layers[config->rows_source[layer]] == layer;
}

static inline bool eng_config_owns_list(const struct eng_config *config, uint32_t layer)
{
    return config->index_source[layer] == layer;
}
