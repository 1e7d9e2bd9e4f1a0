/*
 * Binds tensors to layers by their released names (the model's specification, section 7.1).
 *
 * That exactly these tensors are there was checked when the checkpoint was opened.  Loading is a
 * sequence of steps with one sticky status in a cursor, so the layer reads like the table of the
 * specification.
 */

#include "engine/model/weights.h"

#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct cursor {
    const struct eng_config *config;
    const struct eng_checkpoint *checkpoint;
    struct eng_weights *weights;
    struct kv_error *err;
    kv_status status;
    char prefix[64];
};

static void *allocate(struct cursor *at, size_t bytes)
{
    struct eng_weights *weights = at->weights;
    if (at->status != KV_OK) return NULL;
    if (weights->block_count == weights->block_max) {
        const size_t max = weights->block_max == 0 ? 256 : 2 * weights->block_max;
        void **blocks = realloc(weights->blocks, max * sizeof(*blocks));
        if (blocks == NULL) {
            at->status = KV_FAIL(at->err, KV_NOMEM, "weights");
            return NULL;
        }
        weights->blocks = blocks;
        weights->block_max = max;
    }
    const size_t rounded = kv_round_up(KV_MAX(bytes, (size_t)1), 64);
    void *block = aligned_alloc(64, rounded);
    if (block == NULL) {
        at->status = KV_FAIL(at->err, KV_NOMEM, "weights: %zu bytes", bytes);
        return NULL;
    }
    memset(block, 0, rounded);
    weights->blocks[weights->block_count++] = block;
    weights->bytes += rounded;
    return block;
}

static const uint8_t *take(struct cursor *at, const char *name, const char *suffix,
                           enum eng_dtype dtype, uint64_t rows, uint32_t columns)
{
    char full[160];
    const uint8_t *data = NULL;
    if (at->status != KV_OK) return NULL;
    (void)snprintf(full, sizeof(full), "%s%s%s", at->prefix, name, suffix);
    at->status = eng_checkpoint_take(at->checkpoint, full, dtype, rows, columns, &data, at->err);
    return data;
}

/* BF16 or F32, whichever the header says. */
static const uint8_t *take_either(struct cursor *at, const char *name, uint64_t rows,
                                  uint32_t columns, enum eng_dtype *ret_dtype)
{
    char full[160];
    const uint8_t *data = NULL;
    *ret_dtype = ENG_BF16;
    if (at->status != KV_OK) return NULL;
    (void)snprintf(full, sizeof(full), "%s%s", at->prefix, name);
    at->status =
        eng_checkpoint_take_either(at->checkpoint, full, rows, columns, ret_dtype, &data, at->err);
    return data;
}

static float value_at(const uint8_t *data, enum eng_dtype dtype, size_t i)
{
    assert(dtype == ENG_F32 || dtype == ENG_BF16);
    return dtype == ENG_F32 ? eng_float_of(kv_load32(data + 4 * i))
                            : eng_bf16_decode(kv_load16(data + 2 * i));
}

static float *load_vector(struct cursor *at, const char *name, enum eng_dtype dtype, uint32_t n)
{
    const uint8_t *data = take(at, name, "", dtype, n, 0);
    float *values = allocate(at, (size_t)n * sizeof(float));
    if (at->status != KV_OK) return NULL;
    for (size_t i = 0; i < n; i++)
        values[i] = value_at(data, dtype, i);
    return values;
}

static void bind(struct cursor *at, struct eng_matrix *matrix, enum eng_format format,
                 const uint8_t *data, const uint8_t *scale, uint32_t n, uint32_t k)
{
    if (at->status != KV_OK) return;
    *matrix = (struct eng_matrix){.format = format, .n = n, .k = k, .data = data, .scale = scale};
    at->weights->bytes += eng_matrix_bytes(matrix);
}

static void load_plain(struct cursor *at, struct eng_matrix *matrix, const char *name,
                       enum eng_dtype dtype, uint32_t n, uint32_t k)
{
    const enum eng_format format = dtype == ENG_F32 ? ENG_FORMAT_F32 : ENG_FORMAT_BF16;
    const uint8_t *data = take(at, name, "", dtype, n, k);
    bind(at, matrix, format, data, NULL, n, k);
}

static void load_either(struct cursor *at, struct eng_matrix *matrix, const char *name, uint32_t n,
                        uint32_t k)
{
    enum eng_dtype dtype;
    const uint8_t *data = take_either(at, name, n, k, &dtype);
    bind(at, matrix, dtype == ENG_F32 ? ENG_FORMAT_F32 : ENG_FORMAT_BF16, data, NULL, n, k);
}

/* FP8 with one scale per tile of 32 x 32. */
static void load_fp8(struct cursor *at, struct eng_matrix *matrix, const char *name, uint32_t n,
                     uint32_t k)
{
    const uint8_t *data = take(at, name, ".weight", ENG_F8_E4M3, n, k);
    const uint8_t *scale = take(at, name, ".scale", ENG_F8_E8M0, (n + 31) / 32, (k + 31) / 32);
    bind(at, matrix, ENG_FORMAT_FP8, data, scale, n, k);
}

/* MXFP4: one scale per 32 columns of a row. */
static void load_fp4(struct cursor *at, struct eng_matrix *matrix, const char *name, uint32_t n,
                     uint32_t k)
{
    const uint8_t *data = take(at, name, ".weight", ENG_I8, n, k / 2);
    const uint8_t *scale = take(at, name, ".scale", ENG_F8_E8M0, n, k / 32);
    bind(at, matrix, ENG_FORMAT_FP4, data, scale, n, k);
}

static void load_hc(struct cursor *at, struct eng_hc *hc, const char *which)
{
    char name[32];
    const uint32_t streams = ENG_STREAMS * at->config->hidden;

    (void)snprintf(name, sizeof(name), "%s_fn", which);
    load_plain(at, &hc->fn, name, ENG_F32, 24, streams);
    (void)snprintf(name, sizeof(name), "%s_base", which);
    const uint8_t *base = take(at, name, "", ENG_F32, 24, 0);
    (void)snprintf(name, sizeof(name), "%s_scale", which);
    const uint8_t *scale = take(at, name, "", ENG_F32, 3, 0);
    if (at->status != KV_OK) return;
    for (int i = 0; i < 24; i++)
        hc->base[i] = eng_float_of(kv_load32(base + 4 * i));
    for (int i = 0; i < 3; i++)
        hc->scale[i] = eng_float_of(kv_load32(scale + 4 * i));
}

static void load_attention(struct cursor *at, struct eng_layer *layer, uint32_t index)
{
    const struct eng_config *c = at->config;
    const uint32_t width = c->heads * c->head_dim;

    layer->attn_norm = load_vector(at, "attn_norm.weight", ENG_BF16, c->hidden);
    layer->sink = load_vector(at, "attn.attn_sink", ENG_F32, c->heads);
    layer->q_norm = load_vector(at, "attn.q_norm.weight", ENG_BF16, c->q_lora);
    layer->kv_norm = load_vector(at, "attn.kv_norm.weight", ENG_BF16, c->head_dim);
    load_fp8(at, &layer->wq_a, "attn.wq_a", c->q_lora, c->hidden);
    load_fp8(at, &layer->wq_b, "attn.wq_b", width, c->q_lora);
    load_fp8(at, &layer->wkv, "attn.wkv", c->head_dim, c->hidden);
    load_fp8(at, &layer->wo_a, "attn.wo_a", c->o_groups * c->o_lora, width / c->o_groups);
    load_fp8(at, &layer->wo_b, "attn.wo_b", c->hidden, c->o_groups * c->o_lora);
    if (eng_config_owns_rows(c, index)) {
        load_plain(at, &layer->cmp_wkv, "attn.compressor.wkv.weight", ENG_BF16, c->head_dim,
                   c->hidden);
        if (c->ratio[index] == 2)
            load_plain(at, &layer->cmp_wgate, "attn.compressor.wgate.weight", ENG_BF16, c->head_dim,
                       c->hidden);
        layer->cmp_norm = load_vector(at, "attn.compressor.norm.weight", ENG_BF16, c->head_dim);
        load_plain(at, &layer->ix_wk, "attn.indexer.wk.weight", ENG_BF16, c->index_dim,
                   c->head_dim);
        layer->ix_k_norm = load_vector(at, "attn.indexer.k_norm.weight", ENG_BF16, c->index_dim);
    }
    if (eng_config_owns_list(c, index)) {
        load_fp8(at, &layer->ix_wq_b, "attn.indexer.wq_b", c->index_heads * c->index_dim,
                 c->q_lora);
        load_plain(at, &layer->ix_proj, "attn.indexer.weights_proj.weight", ENG_BF16,
                   c->index_heads, c->hidden);
    }
}

static void load_ffn(struct cursor *at, struct eng_layer *layer, uint32_t experts)
{
    const struct eng_config *c = at->config;
    char name[64];

    layer->ffn_norm = load_vector(at, "ffn_norm.weight", ENG_BF16, c->hidden);
    load_either(at, &layer->gate, "ffn.gate.weight", experts, c->hidden);
    layer->gate_bias = load_vector(at, "ffn.gate.bias", ENG_F32, experts);
    layer->gate_bias_vl = load_vector(at, "ffn.gate.bias_vl", ENG_F32, experts);
    load_fp8(at, &layer->shared.w1, "ffn.shared_experts.w1", c->moe_width, c->hidden);
    load_fp8(at, &layer->shared.w3, "ffn.shared_experts.w3", c->moe_width, c->hidden);
    load_fp8(at, &layer->shared.w2, "ffn.shared_experts.w2", c->hidden, c->moe_width);
    layer->experts = allocate(at, experts * sizeof(*layer->experts));
    for (uint32_t e = 0; at->status == KV_OK && e < experts; e++) {
        struct eng_expert *expert = &layer->experts[e];
        (void)snprintf(name, sizeof(name), "ffn.experts.%u.w1", e);
        load_fp4(at, &expert->w1, name, c->moe_width, c->hidden);
        (void)snprintf(name, sizeof(name), "ffn.experts.%u.w3", e);
        load_fp4(at, &expert->w3, name, c->moe_width, c->hidden);
        (void)snprintf(name, sizeof(name), "ffn.experts.%u.w2", e);
        load_fp4(at, &expert->w2, name, c->hidden, c->moe_width);
    }
}

static void load_layer(struct cursor *at, uint32_t index)
{
    const struct eng_config *c = at->config;
    struct eng_layer *layer = &at->weights->layers[index];

    load_hc(at, &layer->hc_attn, "hc_attn");
    load_hc(at, &layer->hc_ffn, "hc_ffn");
    load_attention(at, layer, index);
    load_ffn(at, layer, index < c->layers ? c->experts : c->draft_experts);
}

static void load_engram(struct cursor *at, uint32_t index)
{
    const struct eng_config *c = at->config;
    struct eng_engram_weights *engram = &at->weights->engram[index];
    const size_t count = (size_t)ENG_STREAMS * c->hidden;
    const uint64_t rows = c->engram_rows[index];

    eng_engram_hash_init(&engram->hash, c, index);
    assert(engram->hash.rows == rows);
    engram->table = (struct eng_engram_table){
        .codes = take(at, "engram.embed", ".weight", ENG_F8_E4M3, rows, c->engram_dim),
        .scales = take(at, "engram.embed", ".scale", ENG_F8_E8M0, rows, c->engram_dim / 32),
        .rows = rows,
        .dim = c->engram_dim,
    };
    load_fp8(at, &engram->wkv, "engram.wkv", (ENG_STREAMS + 1) * c->hidden,
             engram->hash.columns * c->engram_dim);
    enum eng_dtype q_dtype, k_dtype;
    const uint8_t *q = take_either(at, "engram.q_weight", ENG_STREAMS, c->hidden, &q_dtype);
    const uint8_t *k = take_either(at, "engram.k_weight", ENG_STREAMS, c->hidden, &k_dtype);
    engram->qk = allocate(at, count * sizeof(float));
    for (size_t i = 0; at->status == KV_OK && i < count; i++)
        engram->qk[i] = value_at(q, q_dtype, i) * value_at(k, k_dtype, i);
}

static void load_draft(struct cursor *at)
{
    const struct eng_config *c = at->config;
    struct eng_draft_weights *draft = &at->weights->draft;
    struct eng_matrix confidence;

    for (uint32_t s = 0; at->status == KV_OK && s < c->draft_stages; s++) {
        (void)snprintf(at->prefix, sizeof(at->prefix), "mtp.%u.", s);
        load_layer(at, c->layers + s);
        if (s == 0) {
            load_fp8(at, &draft->main_proj, "main_proj", c->hidden,
                     c->draft_target_count * c->hidden);
            draft->main_norm = load_vector(at, "main_norm.weight", ENG_BF16, c->hidden);
        }
        if (s + 1 < c->draft_stages) continue;
        draft->norm = load_vector(at, "norm.weight", ENG_BF16, c->hidden);
        load_plain(at, &draft->markov_embed, "markov_head.embed.weight", ENG_BF16, c->vocab,
                   c->draft_rank);
        load_plain(at, &draft->markov_head, "markov_head.head.weight", ENG_BF16, c->vocab,
                   c->draft_rank);
        load_plain(at, &confidence, "confidence_head.proj.weight", ENG_BF16, 1,
                   c->hidden + c->draft_rank);
        draft->confidence = allocate(at, (c->hidden + c->draft_rank) * sizeof(float));
        if (at->status == KV_OK) eng_weights_row(&confidence, 0, draft->confidence);
    }
}

void eng_rope_frequencies(const struct eng_config *c, float *plain, float *yarn)
{
    const uint32_t pairs = c->rope_dim / 2;
    const double log_theta = log((double)c->compress_theta);
    const double original = (double)c->yarn_original / (2.0 * M_PI);
    const double fast = c->rope_dim * log(original / (double)c->yarn_beta_fast) / (2 * log_theta);
    const double slow = c->rope_dim * log(original / (double)c->yarn_beta_slow) / (2 * log_theta);
    const float low = fmaxf((float)floor(fast), 0.0f);
    const float high = fminf((float)ceil(slow), (float)(c->rope_dim - 1));
    const float span = fmaxf(high - low, 0.001f);
    for (uint32_t i = 0; i < pairs; i++) {
        const float exponent = (float)(2 * i) / (float)c->rope_dim;
        plain[i] = 1.0f / (float)pow((double)c->rope_theta, (double)exponent);
        const float f = 1.0f / (float)pow((double)c->compress_theta, (double)exponent);
        const float ramp = fminf(fmaxf(((float)i - low) / span, 0.0f), 1.0f);
        yarn[i] = f / c->yarn_factor * ramp + f * (1.0f - ramp);
    }
}

static void make_rope(struct cursor *at)
{
    const uint32_t pairs = at->config->rope_dim / 2;
    float *plain = allocate(at, pairs * sizeof(float));
    float *yarn = allocate(at, pairs * sizeof(float));
    if (at->status != KV_OK) return;
    eng_rope_frequencies(at->config, plain, yarn);
    at->weights->rope_plain = plain;
    at->weights->rope_yarn = yarn;
}

kv_status eng_weights_load(const struct eng_checkpoint *checkpoint, struct eng_weights *ret_weights,
                           struct kv_error *err)
{
    const struct eng_config *config = eng_checkpoint_config(checkpoint);
    struct eng_weights weights = {0};
    struct cursor at = {.config = config,
                        .checkpoint = checkpoint,
                        .weights = &weights,
                        .err = err,
                        .status = KV_OK};
    struct eng_matrix *head = &weights.head;

    load_plain(&at, &weights.embed, "embed.weight", ENG_BF16, config->vocab, config->hidden);
    load_plain(&at, head, "head.weight", ENG_BF16, config->vocab, config->hidden);
    weights.norm = load_vector(&at, "norm.weight", ENG_BF16, config->hidden);
    weights.layers =
        allocate(&at, (config->layers + config->draft_stages) * sizeof(*weights.layers));
    weights.engram = allocate(&at, config->engram_count * sizeof(*weights.engram));
    for (uint32_t i = 0; at.status == KV_OK && i < config->layers; i++) {
        (void)snprintf(at.prefix, sizeof(at.prefix), "layers.%u.", i);
        load_layer(&at, i);
    }
    for (uint32_t i = 0; at.status == KV_OK && i < config->engram_count; i++) {
        (void)snprintf(at.prefix, sizeof(at.prefix), "layers.%u.", config->engram_layers[i]);
        load_engram(&at, i);
    }
    load_draft(&at);
    make_rope(&at);
    if (at.status == KV_OK)
        *ret_weights = weights;
    else
        eng_weights_fini(&weights);
    return at.status;
}

void eng_weights_row(const struct eng_matrix *matrix, uint32_t row, float *values)
{
    const uint8_t *data = matrix->data + (size_t)row * matrix->k * 2;
    assert(matrix->format == ENG_FORMAT_BF16 && row < matrix->n);
    for (uint32_t i = 0; i < matrix->k; i++)
        values[i] = eng_bf16_decode(kv_load16(data + 2 * (size_t)i));
}

void eng_weights_fini(struct eng_weights *weights)
{
    for (size_t i = 0; i < weights->block_count; i++)
        free(weights->blocks[i]);
    free(weights->blocks);
    *weights = (struct eng_weights){0};
}
