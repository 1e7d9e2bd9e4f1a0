#pragma once

/* What config.json says of a model, checked, and the layout that follows from it.  Immutable after
 * reading; any thread. */

#include "kvstore/base/status.h"
#include "kvstore/format/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENG_STREAMS 4u /* hc_mult */
#define ENG_NO_SOURCE 0xffffffffu

struct eng_config {
    char name[64];
    uint32_t eos, image_id;
    uint32_t vocab, hidden, layers, encoder_layers, window;
    uint32_t heads, head_dim, rope_dim, q_lora, o_groups, o_lora;
    uint32_t index_heads, index_dim, index_topk;
    uint32_t candidate_blocks, candidate_block;
    uint32_t experts, experts_active, moe_width;
    uint32_t sinkhorn_iters;
    float hc_eps, rms_eps, route_scale, swiglu_limit;
    float rope_theta, compress_theta, yarn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_original;
    uint32_t draft_stages, engram_layers;
    uint32_t source_count; /* Layers that own rows, ascending. */
    uint32_t source_layers[KV_SOURCES_MAX];
    /* Per layer. */
    uint32_t ratio[KV_LAYERS_MAX];        /* 0: window only. */
    uint32_t rows_source[KV_LAYERS_MAX];  /* Index into source_layers, or ENG_NO_SOURCE. */
    uint32_t index_source[KV_LAYERS_MAX]; /* Layer whose list is read, or ENG_NO_SOURCE. */
};

/* `text` is the whole file.  KV_INVALID names the field, what was expected and what was found. */
kv_status eng_config_parse(const char *path, const char *text, size_t count,
                           struct eng_config *ret_config, struct kv_error *err) KV_MUST_CHECK;

/* The `tiny` of the model's specification, section 7.2, without Engram and drafting. */
void eng_config_tiny(struct eng_config *config);

/* What this engine's CPU backend leaves out is refused here, in one sentence. */
kv_status eng_config_check_supported(const char *path, const struct eng_config *config,
                                     struct kv_error *err) KV_MUST_CHECK;

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
