/*
 * Walks the tensors of a model in the order of its forward pass.
 *
 * Written like the table of the model's specification, section 7.1: one line per tensor, with the
 * shape in the config's own words.  Nothing else in the engine spells a shape of the file. Products
 * cannot wrap: config.c bounds every factor.
 *
 * Of the router's gate and of Engram's q and k the notes behind that table know the shape, or do
 * not agree on the dtype; the files' own headers decide (section 9, item 5).
 */

#include "engine/model/tensors.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[] = {
    [ENG_F32] = {"F32", 4},         [ENG_BF16] = {"BF16", 2}, [ENG_F8_E4M3] = {"F8_E4M3", 1},
    [ENG_F8_E8M0] = {"F8_E8M0", 1}, [ENG_I8] = {"I8", 1},
};

/* Where the walk stands. */
struct walk {
    const struct eng_config *config;
    eng_tensor_visit *visit;
    void *context;
    char prefix[32];
    uint32_t layer, expert;
    bool ended;
};

static void emit(struct walk *walk, enum eng_role role, const char *name, const char *suffix,
                 enum eng_dtype dtype, uint64_t rows, uint64_t columns)
{
    struct eng_tensor_spec spec = {
        .dtype = dtype,
        .rows = rows,
        .columns = columns,
        .role = role,
        .is_scale = dtype == ENG_F8_E8M0,
        .or_f32 = role == ENG_ROLE_GATE || role == ENG_ROLE_ENGRAM_Q || role == ENG_ROLE_ENGRAM_K,
        .layer = walk->layer,
        .expert = walk->expert,
    };
    if (walk->ended) return;
    const int length = snprintf(spec.name, sizeof(spec.name), "%s%s%s", walk->prefix, name, suffix);
    assert(length > 0 && (size_t)length < sizeof(spec.name));
    walk->ended = !walk->visit(walk->context, &spec);
}

static void plain(struct walk *walk, enum eng_role role, const char *name, enum eng_dtype dtype,
                  uint64_t rows, uint64_t columns)
{
    emit(walk, role, name, "", dtype, rows, columns);
}

/* One scale per tile of 32 x 32. */
static void fp8(struct walk *walk, enum eng_role role, const char *name, uint64_t rows,
                uint64_t columns)
{
    emit(walk, role, name, ".weight", ENG_F8_E4M3, rows, columns);
    emit(walk, role, name, ".scale", ENG_F8_E8M0, (rows + 31) / 32, columns / 32);
}

/* Two values a byte, one scale per 32 columns of a row. */
static void fp4(struct walk *walk, enum eng_role role, const char *name, uint64_t rows,
                uint64_t columns)
{
    emit(walk, role, name, ".weight", ENG_I8, rows, columns / 2);
    emit(walk, role, name, ".scale", ENG_F8_E8M0, rows, columns / 32);
}

static void walk_attention(struct walk *walk)
{
    const struct eng_config *c = walk->config;
    const uint64_t width = (uint64_t)c->heads * c->head_dim;
    const uint64_t lora = (uint64_t)c->o_groups * c->o_lora;

    plain(walk, ENG_ROLE_ATTN_NORM, "attn_norm.weight", ENG_BF16, c->hidden, 0);
    plain(walk, ENG_ROLE_SINK, "attn.attn_sink", ENG_F32, c->heads, 0);
    fp8(walk, ENG_ROLE_WQ_A, "attn.wq_a", c->q_lora, c->hidden);
    plain(walk, ENG_ROLE_Q_NORM, "attn.q_norm.weight", ENG_BF16, c->q_lora, 0);
    fp8(walk, ENG_ROLE_WQ_B, "attn.wq_b", width, c->q_lora);
    fp8(walk, ENG_ROLE_WKV, "attn.wkv", c->head_dim, c->hidden);
    plain(walk, ENG_ROLE_KV_NORM, "attn.kv_norm.weight", ENG_BF16, c->head_dim, 0);
    fp8(walk, ENG_ROLE_WO_A, "attn.wo_a", lora, width / c->o_groups);
    fp8(walk, ENG_ROLE_WO_B, "attn.wo_b", c->hidden, lora);
}

static void walk_sources(struct walk *walk, uint32_t layer)
{
    const struct eng_config *c = walk->config;

    if (eng_config_owns_rows(c, layer)) {
        plain(walk, ENG_ROLE_CMP_WKV, "attn.compressor.wkv.weight", ENG_BF16, c->head_dim,
              c->hidden);
        if (c->ratio[layer] == 2)
            plain(walk, ENG_ROLE_CMP_WGATE, "attn.compressor.wgate.weight", ENG_BF16, c->head_dim,
                  c->hidden);
        plain(walk, ENG_ROLE_CMP_NORM, "attn.compressor.norm.weight", ENG_BF16, c->head_dim, 0);
        plain(walk, ENG_ROLE_IX_WK, "attn.indexer.wk.weight", ENG_BF16, c->index_dim, c->head_dim);
        plain(walk, ENG_ROLE_IX_K_NORM, "attn.indexer.k_norm.weight", ENG_BF16, c->index_dim, 0);
    }
    if (eng_config_owns_list(c, layer)) {
        fp8(walk, ENG_ROLE_IX_WQ_B, "attn.indexer.wq_b", (uint64_t)c->index_heads * c->index_dim,
            c->q_lora);
        plain(walk, ENG_ROLE_IX_PROJ, "attn.indexer.weights_proj.weight", ENG_BF16, c->index_heads,
              c->hidden);
    }
}

static void walk_engram(struct walk *walk, uint32_t layer)
{
    const struct eng_config *c = walk->config;
    const uint64_t gathered = (uint64_t)eng_config_engram_columns(c) * c->engram_dim;

    for (uint32_t i = 0; i < c->engram_count; i++) {
        if (c->engram_layers[i] != layer) continue;
        /* Rows are looked up one by one, so each has scales of its own. */
        emit(walk, ENG_ROLE_ENGRAM_ROWS, "engram.embed", ".weight", ENG_F8_E4M3, c->engram_rows[i],
             c->engram_dim);
        emit(walk, ENG_ROLE_ENGRAM_ROWS, "engram.embed", ".scale", ENG_F8_E8M0, c->engram_rows[i],
             c->engram_dim / 32);
        fp8(walk, ENG_ROLE_ENGRAM_WKV, "engram.wkv", (uint64_t)(ENG_STREAMS + 1) * c->hidden,
            gathered);
        plain(walk, ENG_ROLE_ENGRAM_Q, "engram.q_weight", ENG_BF16, ENG_STREAMS, c->hidden);
        plain(walk, ENG_ROLE_ENGRAM_K, "engram.k_weight", ENG_BF16, ENG_STREAMS, c->hidden);
    }
}

static void walk_mixes(struct walk *walk)
{
    const uint64_t streams = (uint64_t)ENG_STREAMS * walk->config->hidden;
    const uint64_t outputs = ENG_STREAMS * (2 + ENG_STREAMS);

    plain(walk, ENG_ROLE_HC_FN, "hc_attn_fn", ENG_F32, outputs, streams);
    plain(walk, ENG_ROLE_HC_BASE, "hc_attn_base", ENG_F32, outputs, 0);
    plain(walk, ENG_ROLE_HC_SCALE, "hc_attn_scale", ENG_F32, 3, 0);
    plain(walk, ENG_ROLE_HC_FN, "hc_ffn_fn", ENG_F32, outputs, streams);
    plain(walk, ENG_ROLE_HC_BASE, "hc_ffn_base", ENG_F32, outputs, 0);
    plain(walk, ENG_ROLE_HC_SCALE, "hc_ffn_scale", ENG_F32, 3, 0);
}

static void walk_ffn(struct walk *walk, uint32_t experts)
{
    const struct eng_config *c = walk->config;
    char name[64];

    plain(walk, ENG_ROLE_FFN_NORM, "ffn_norm.weight", ENG_BF16, c->hidden, 0);
    plain(walk, ENG_ROLE_GATE, "ffn.gate.weight", ENG_BF16, experts, c->hidden);
    plain(walk, ENG_ROLE_GATE_BIAS, "ffn.gate.bias", ENG_F32, experts, 0);
    plain(walk, ENG_ROLE_GATE_BIAS_VL, "ffn.gate.bias_vl", ENG_F32, experts, 0);
    fp8(walk, ENG_ROLE_SHARED_W1, "ffn.shared_experts.w1", c->moe_width, c->hidden);
    fp8(walk, ENG_ROLE_SHARED_W3, "ffn.shared_experts.w3", c->moe_width, c->hidden);
    fp8(walk, ENG_ROLE_SHARED_W2, "ffn.shared_experts.w2", c->hidden, c->moe_width);
    for (uint32_t e = 0; e < experts && !walk->ended; e++) {
        walk->expert = e;
        (void)snprintf(name, sizeof(name), "ffn.experts.%u.w1", e);
        fp4(walk, ENG_ROLE_EXPERT_W1, name, c->moe_width, c->hidden);
        (void)snprintf(name, sizeof(name), "ffn.experts.%u.w3", e);
        fp4(walk, ENG_ROLE_EXPERT_W3, name, c->moe_width, c->hidden);
        (void)snprintf(name, sizeof(name), "ffn.experts.%u.w2", e);
        fp4(walk, ENG_ROLE_EXPERT_W2, name, c->hidden, c->moe_width);
    }
    walk->expert = ENG_NO_SOURCE;
}

static void walk_stage(struct walk *walk, uint32_t stage)
{
    const struct eng_config *c = walk->config;

    walk->layer = c->layers + stage;
    (void)snprintf(walk->prefix, sizeof(walk->prefix), "mtp.%u.", stage);
    if (stage == 0) {
        fp8(walk, ENG_ROLE_MAIN_PROJ, "main_proj", c->hidden,
            (uint64_t)c->draft_target_count * c->hidden);
        plain(walk, ENG_ROLE_MAIN_NORM, "main_norm.weight", ENG_BF16, c->hidden, 0);
    }
    walk_mixes(walk);
    walk_attention(walk);
    walk_ffn(walk, c->draft_experts);
    if (stage + 1 < c->draft_stages) return;
    plain(walk, ENG_ROLE_NORM, "norm.weight", ENG_BF16, c->hidden, 0);
    plain(walk, ENG_ROLE_MARKOV_EMBED, "markov_head.embed.weight", ENG_BF16, c->vocab,
          c->draft_rank);
    plain(walk, ENG_ROLE_MARKOV_HEAD, "markov_head.head.weight", ENG_BF16, c->vocab, c->draft_rank);
    plain(walk, ENG_ROLE_CONFIDENCE, "confidence_head.proj.weight", ENG_BF16, 1,
          (uint64_t)c->hidden + c->draft_rank);
}

bool eng_tensors_each(const struct eng_config *config, eng_tensor_visit *visit, void *context)
{
    struct walk walk = {
        .config = config,
        .visit = visit,
        .context = context,
        .layer = ENG_NO_SOURCE,
        .expert = ENG_NO_SOURCE,
    };
    plain(&walk, ENG_ROLE_EMBED, "embed.weight", ENG_BF16, config->vocab, config->hidden);
    plain(&walk, ENG_ROLE_HEAD, "head.weight", ENG_BF16, config->vocab, config->hidden);
    plain(&walk, ENG_ROLE_NORM, "norm.weight", ENG_BF16, config->hidden, 0);
    for (uint32_t layer = 0; layer < config->layers && !walk.ended; layer++) {
        walk.layer = layer;
        (void)snprintf(walk.prefix, sizeof(walk.prefix), "layers.%u.", layer);
        walk_engram(&walk, layer);
        walk_mixes(&walk);
        walk_attention(&walk);
        walk_sources(&walk, layer);
        walk_ffn(&walk, config->experts);
    }
    for (uint32_t stage = 0; stage < config->draft_stages && !walk.ended; stage++)
        walk_stage(&walk, stage);
    return !walk.ended;
}

static bool count_one(void *context, const struct eng_tensor_spec *spec)
{
    *(size_t *)context += spec->name[0] != '\0';
    return true;
}

size_t eng_tensors_count(const struct eng_config *config)
{
    size_t count = 0;
    (void)eng_tensors_each(config, count_one, &count);
    return count;
}

bool eng_tensor_is_ignored(const char *name)
{
    static const char *const prefixes[] = {"vision.", "aligner."};
    static const char *const names[] = {"image_start", "image_end", "image_newline"};

    for (size_t i = 0; i < KV_ARRAY_COUNT(prefixes); i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) return true;
    for (size_t i = 0; i < KV_ARRAY_COUNT(names); i++)
        if (strcmp(name, names[i]) == 0) return true;
    if (strncmp(name, "mtp.", 4) != 0 || !isdigit((unsigned char)name[4])) return false;
    const char *rest = name + 4 + strspn(name + 4, "0123456789");
    return strcmp(rest, ".embed.weight") == 0 || strcmp(rest, ".head.weight") == 0;
}

const char *eng_dtype_name(enum eng_dtype dtype)
{
    return dtypes[dtype].name;
}

bool eng_dtype_parse(const char *name, enum eng_dtype *ret_dtype)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(dtypes); i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            *ret_dtype = (enum eng_dtype)i;
            return true;
        }
    return false;
}

uint32_t eng_dtype_bytes(enum eng_dtype dtype)
{
    return dtypes[dtype].bytes;
}
