/*
 * Reads config.json (HF field names, text fields under `text_config`) and refuses what the engine
 * could not compute exactly as written.
 *
 * Every number is range-checked before anything is derived from it, so later code multiplies
 * dimensions without further thought.  The encoder ends where the last row source stands: it is
 * also the candidate source, has ratio 1, and is the first decoder layer (the model's
 * specification, section 3.1).
 */

#include "engine/model/config.h"

#include "engine/model/config_texts.h"
#include "engine/model/json_text.h"
#include "engine/model/model_limits.h"
#include "engine/model/primes.h"
#include "engine/model/printable.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define SHOWN_BYTES 48u

/* Above 0, or a row of zeros is divided by it; as a float it must not vanish. */
#define EPS_MIN 1e-30

/* Of the released model: ids, and what its tokenizer leaves of them. */
#define RELEASED_VOCAB 129280u
#define RELEASED_COMPRESSED 99092u

struct reader {
    const char *path;
    const json_t *object;
    struct kv_error *err;
    kv_status status; /* Sticky: the first field that fails is the one reported. */
};

static const json_t *field(struct reader *reader, const char *name)
{
    const json_t *value = json_object_get(reader->object, name);
    if (value == NULL && reader->status == KV_OK)
        reader->status =
            KV_FAIL(reader->err, KV_INVALID, "%s: field %s is missing", reader->path, name);
    return value;
}

/* A value that should have been another, as it stands in the file and cut to what a sentence can
 * hold. */
static const char *shown(const json_t *value, char text[SHOWN_BYTES])
{
    char *whole = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    (void)snprintf(text, SHOWN_BYTES, "%.40s%s", whole != NULL ? whole : "another value",
                   whole != NULL && strlen(whole) > 40 ? "..." : "");
    free(whole);
    eng_printable(text);
    return text;
}

/* "4" or "1 to 16". */
static const char *range(uint32_t min, uint32_t max, char text[SHOWN_BYTES])
{
    if (min == max)
        (void)snprintf(text, SHOWN_BYTES, "%u", min);
    else
        (void)snprintf(text, SHOWN_BYTES, "%u to %u", min, max);
    return text;
}

static uint32_t read_u32(struct reader *reader, const char *name, uint32_t min, uint32_t max)
{
    char text[SHOWN_BYTES], may[SHOWN_BYTES];
    const json_t *value = field(reader, name);
    if (reader->status != KV_OK) return min;
    if (!json_is_integer(value)) {
        reader->status = KV_FAIL(reader->err, KV_INVALID, "%s: %s must be an integer %s, found %s",
                                 reader->path, name, range(min, max, may), shown(value, text));
        return min;
    }
    const json_int_t number = json_integer_value(value);
    if (number < (json_int_t)min || number > (json_int_t)max) {
        reader->status = KV_FAIL(reader->err, KV_INVALID, "%s: %s must be %s, found %lld",
                                 reader->path, name, range(min, max, may), (long long)number);
        return min;
    }
    return (uint32_t)number;
}

static uint32_t read_u32_or(struct reader *reader, const char *name, uint32_t otherwise,
                            uint32_t max)
{
    if (json_object_get(reader->object, name) == NULL) return otherwise;
    return read_u32(reader, name, 0, max);
}

static void need_multiple(struct reader *reader, const char *name, uint32_t value, uint32_t unit)
{
    if (reader->status == KV_OK && value % unit != 0)
        reader->status =
            KV_FAIL(reader->err, KV_INVALID, "%s: %s must be a multiple of %u, found %u",
                    reader->path, name, unit, value);
}

static float read_float(struct reader *reader, const char *name, double min, double max)
{
    const json_t *value = field(reader, name);
    if (reader->status != KV_OK) return (float)min;
    char text[SHOWN_BYTES];
    const double number = json_is_number(value) ? json_number_value(value) : NAN;
    if (!(number >= min && number <= max)) {
        reader->status =
            KV_FAIL(reader->err, KV_INVALID, "%s: %s must be a number %g to %g, found %s",
                    reader->path, name, min, max, shown(value, text));
        return (float)min;
    }
    return (float)number;
}

/* `label`: what the sentence calls it. */
static void need_text_as(struct reader *reader, const char *name, const char *label,
                         const char *want)
{
    const json_t *value = field(reader, name);
    if (reader->status != KV_OK) return;
    const char *found = json_is_string(value) ? json_string_value(value) : "(not a string)";
    char shown[48];
    if (strcmp(found, want) == 0) return;
    (void)snprintf(shown, sizeof(shown), "%.40s", found);
    eng_printable(shown);
    reader->status = KV_FAIL(reader->err, KV_INVALID, "%s: %s must be \"%s\", found \"%s\"",
                             reader->path, label, want, shown);
}

static void need_text(struct reader *reader, const char *name, const char *want)
{
    need_text_as(reader, name, name, want);
}

/* Returns the count; at most `max` values below `limit`. */
static uint32_t read_list(struct reader *reader, const char *name, uint32_t *list, uint32_t max,
                          uint32_t limit)
{
    char text[SHOWN_BYTES];
    const json_t *value = field(reader, name);
    if (reader->status != KV_OK) return 0;
    const size_t count = json_is_array(value) ? json_array_size(value) : max + (size_t)1;
    if (count > max) {
        reader->status =
            KV_FAIL(reader->err, KV_INVALID, "%s: %s must be a list of at most %u integers",
                    reader->path, name, max);
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(value, i);
        const json_int_t number = json_integer_value(item);
        if (!json_is_integer(item))
            reader->status =
                KV_FAIL(reader->err, KV_INVALID, "%s: %s[%zu] must be an integer 0 to %u, found %s",
                        reader->path, name, i, limit - 1, shown(item, text));
        else if (number < 0 || number >= (json_int_t)limit)
            reader->status =
                KV_FAIL(reader->err, KV_INVALID, "%s: %s[%zu] must be 0 to %u, found %lld",
                        reader->path, name, i, limit - 1, (long long)number);
        if (reader->status != KV_OK) return 0;
        list[i] = (uint32_t)number;
    }
    return (uint32_t)count;
}

static void read_dims(struct reader *reader, struct eng_config *config)
{
    config->vocab = read_u32(reader, "vocab_size", 16, 1u << 20);
    config->hidden = read_u32(reader, "hidden_size", 32, 16384);
    config->layers = read_u32(reader, "num_hidden_layers", 2, KV_LAYERS_MAX);
    config->heads = read_u32(reader, "num_attention_heads", 1, 256);
    (void)read_u32(reader, "num_key_value_heads", 1, 1);
    config->head_dim = read_u32(reader, "head_dim", 32, ENG_HEAD_DIM_MAX);
    config->rope_dim = read_u32(reader, "qk_rope_head_dim", 2, 256);
    config->q_lora = read_u32(reader, "q_lora_rank", 32, 8192);
    config->o_groups = read_u32(reader, "o_groups", 1, 64);
    config->o_lora = read_u32(reader, "o_lora_rank", 32, 8192);
    config->window = read_u32(reader, "sliding_window", 1, 4096);
    config->positions = read_u32(reader, "max_position_embeddings", 1, 1u << 31);
    config->index_heads = read_u32(reader, "index_n_heads", 1, 256);
    config->index_dim = read_u32(reader, "index_head_dim", 32, ENG_HEAD_DIM_MAX);
    config->index_topk = read_u32(reader, "index_topk", 1, 4096);
    config->candidate_blocks = read_u32(reader, "candidate_topk_blocks", 1, 8192);
    config->candidate_block = read_u32(reader, "candidate_block_size", 1, 64);
    config->experts = read_u32(reader, "n_routed_experts", 1, 1024);
    config->experts_active = read_u32(reader, "num_experts_per_tok", 1, 64);
    (void)read_u32(reader, "n_shared_experts", 1, 1);
    config->moe_width = read_u32(reader, "moe_intermediate_size", 32, 16384);
    (void)read_u32(reader, "hc_mult", ENG_STREAMS, ENG_STREAMS);
    config->sinkhorn_iters = read_u32(reader, "hc_sinkhorn_iters", 1, 1000);
    need_multiple(reader, "hidden_size", config->hidden, 32);
    need_multiple(reader, "head_dim", config->head_dim, 32);
    need_multiple(reader, "qk_rope_head_dim", config->rope_dim, 2);
    need_multiple(reader, "q_lora_rank", config->q_lora, 32);
    need_multiple(reader, "o_lora_rank", config->o_lora, 32);
    need_multiple(reader, "num_attention_heads", config->heads, config->o_groups);
    need_multiple(reader, "index_head_dim", config->index_dim, 32);
    need_multiple(reader, "moe_intermediate_size", config->moe_width, 32);
}

static void read_numbers(struct reader *reader, struct eng_config *config)
{
    config->hc_eps = read_float(reader, "hc_eps", 0, 1);
    config->rms_eps = read_float(reader, "rms_norm_eps", EPS_MIN, 1);
    config->route_scale = read_float(reader, "routed_scaling_factor", 0, 1000);
    config->swiglu_limit = read_float(reader, "swiglu_limit", 1e-3, 1e6);
    config->rope_theta = read_float(reader, "rope_theta", 1, 1e9);
    config->compress_theta = read_float(reader, "compress_rope_theta", 1, 1e9);
    need_text(reader, "scoring_func", "sqrtsoftplus");
    need_text(reader, "topk_method", "noaux_tc");
    if (reader->status == KV_OK && !json_is_true(json_object_get(reader->object, "norm_topk_prob")))
        reader->status =
            KV_FAIL(reader->err, KV_INVALID, "%s: norm_topk_prob must be true", reader->path);

    struct reader scaling = *reader;
    scaling.object = field(reader, "rope_scaling");
    scaling.status = reader->status;
    need_text(&scaling, "rope_type", "yarn");
    config->yarn_factor = read_float(&scaling, "factor", 1, 1e6);
    config->yarn_beta_fast = read_float(&scaling, "beta_fast", 1e-3, 1e6);
    config->yarn_beta_slow = read_float(&scaling, "beta_slow", 1e-3, 1e6);
    config->yarn_original = read_u32(&scaling, "original_max_position_embeddings", 1, 1u << 24);
    reader->status = scaling.status;
}

/* The source of a layer is the last one at or before it. */
static void assign_sources(struct eng_config *config, const uint32_t *index_layers, uint32_t count)
{
    for (uint32_t layer = 0; layer < config->layers + config->draft_stages; layer++) {
        config->rows_source[layer] = ENG_NO_SOURCE;
        config->index_source[layer] = ENG_NO_SOURCE;
        if (config->ratio[layer] == 0) continue;
        for (uint32_t i = 0; i < config->source_count; i++)
            if (config->source_layers[i] <= layer) config->rows_source[layer] = i;
        for (uint32_t i = 0; i < count; i++)
            if (index_layers[i] <= layer) config->index_source[layer] = index_layers[i];
    }
}

static const char *topology_fault(const struct eng_config *config, const uint32_t *index_layers,
                                  uint32_t index_count)
{
    if (config->source_count == 0 || index_count == 0)
        return "kv_source_layer_ids and index_source_layer_ids must not be empty";
    for (uint32_t i = 1; i < config->source_count; i++)
        if (config->source_layers[i] <= config->source_layers[i - 1])
            return "kv_source_layer_ids must ascend";
    for (uint32_t i = 0; i < config->source_count; i++)
        if (config->ratio[config->source_layers[i]] == 0) return "a kv source has compress ratio 0";
    for (uint32_t i = 1; i < index_count; i++)
        if (index_layers[i] <= index_layers[i - 1]) return "index_source_layer_ids must ascend";
    const uint32_t last = config->source_layers[config->source_count - 1];
    if (config->candidate_source != last)
        return "candidate_source_layer_id must be the last of kv_source_layer_ids";
    if (last == 0 || last >= config->layers) return "the last kv source must leave an encoder";
    if (config->ratio[last] != 1) return "the last kv source must have compress ratio 1";
    for (uint32_t layer = 0; layer < config->layers; layer++) {
        if (config->ratio[layer] == 0) continue;
        const uint32_t rows = config->rows_source[layer];
        const uint32_t list = config->index_source[layer];
        if (rows == ENG_NO_SOURCE || list == ENG_NO_SOURCE)
            return "a layer with a compress ratio stands before the first source";
        if (config->ratio[config->source_layers[rows]] != config->ratio[layer])
            return "compress_ratios of a layer and of its kv source differ";
        if (list < config->source_layers[rows])
            return "every kv source must also be an index source";
        if (layer < last && eng_config_owns_list(config, layer) &&
            !eng_config_owns_rows(config, layer))
            return "an encoder layer reindexes, which has no candidates to choose from";
    }
    const uint64_t worst = (uint64_t)(config->candidate_blocks - 1) * config->candidate_block + 1;
    if (worst < config->index_topk)
        return "(candidate_topk_blocks - 1) x candidate_block_size + 1 must reach index_topk";
    if (config->experts_active > config->experts)
        return "num_experts_per_tok exceeds n_routed_experts";
    if (config->rope_dim > config->head_dim || config->rope_dim > config->index_dim)
        return "qk_rope_head_dim exceeds head_dim or index_head_dim";
    return NULL;
}

static void fail_with(struct reader *reader, const char *fault)
{
    if (reader->status == KV_OK && fault != NULL)
        reader->status = KV_FAIL(reader->err, KV_INVALID, "%s: %s", reader->path, fault);
}

static void read_topology(struct reader *reader, struct eng_config *config)
{
    uint32_t ratios[KV_LAYERS_MAX + KV_DRAFT_STAGES_MAX];
    uint32_t index_layers[KV_LAYERS_MAX];

    config->draft_stages = read_u32_or(reader, "num_nextn_predict_layers", 0, KV_DRAFT_STAGES_MAX);
    const uint32_t count = read_list(reader, "compress_ratios", ratios, KV_ARRAY_COUNT(ratios), 3);
    config->source_count = read_list(reader, "kv_source_layer_ids", config->source_layers,
                                     KV_SOURCES_MAX, config->layers);
    const uint32_t index_count =
        read_list(reader, "index_source_layer_ids", index_layers, KV_LAYERS_MAX, config->layers);
    config->candidate_source = read_u32(reader, "candidate_source_layer_id", 0, config->layers - 1);
    if (reader->status != KV_OK) return;
    if (count != config->layers && count != config->layers + config->draft_stages) {
        reader->status =
            KV_FAIL(reader->err, KV_INVALID, "%s: compress_ratios must have %u entries, found %u",
                    reader->path, config->layers + config->draft_stages, count);
        return;
    }
    for (uint32_t i = config->layers; i < count; i++)
        if (ratios[i] != 0)
            fail_with(reader, "compress_ratios of the draft stages must be 0: they read no rows");
    memcpy(config->ratio, ratios, config->layers * sizeof(*ratios));
    assign_sources(config, index_layers, index_count);
    config->encoder_layers = config->candidate_source;
    fail_with(reader, topology_fault(config, index_layers, index_count));
}

/* Rows of the tables must be what the hash can reach: the sums of the primes of section 2.8. */
static void check_engram_rows(struct reader *reader, const struct eng_config *config)
{
    uint32_t primes[ENG_ENGRAM_ORDERS_MAX * ENG_ENGRAM_HEADS_MAX];
    const uint32_t columns = eng_config_engram_columns(config);

    for (uint32_t i = 0; i < config->engram_count && reader->status == KV_OK; i++) {
        uint64_t sum = 0;
        eng_engram_primes(config->engram_bucket_base, columns, i, primes);
        for (uint32_t column = 0; column < columns; column++)
            sum += primes[column];
        if (sum == config->engram_rows[i]) continue;
        reader->status =
            KV_FAIL(reader->err, KV_INVALID,
                    "%s: engram_num_embeddings[%u] must be %llu, the sum of its %u primes, "
                    "found %llu",
                    reader->path, i, (unsigned long long)sum, columns,
                    (unsigned long long)config->engram_rows[i]);
    }
}

/* The released vocabulary's compressed ids were counted (section 2.8, rule 1); multipliers follow
 * from that count, so another one would read other rows without anything else showing it. */
static void check_compressed(struct reader *reader, const struct eng_config *config)
{
    if (reader->status != KV_OK || config->vocab != RELEASED_VOCAB ||
        config->engram_compressed == RELEASED_COMPRESSED)
        return;
    reader->status =
        KV_FAIL(reader->err, KV_INVALID,
                "%s: engram_compressed_vocab_size must be %u with a vocab_size of %u, "
                "found %u",
                reader->path, RELEASED_COMPRESSED, RELEASED_VOCAB, config->engram_compressed);
}

static void read_engram(struct reader *reader, struct eng_config *config)
{
    uint32_t rows[ENG_ENGRAM_MAX];

    if (json_object_get(reader->object, "engram_layer_ids") == NULL) return;
    config->engram_count = read_list(reader, "engram_layer_ids", config->engram_layers,
                                     ENG_ENGRAM_MAX, config->layers);
    if (reader->status != KV_OK || config->engram_count == 0) return;
    const uint32_t count =
        read_list(reader, "engram_num_embeddings", rows, ENG_ENGRAM_MAX, UINT32_MAX);
    config->engram_max_ngram =
        read_u32(reader, "engram_max_ngram_size", 2, ENG_ENGRAM_ORDERS_MAX + 1);
    config->engram_heads = read_u32(reader, "engram_n_heads", 1, ENG_ENGRAM_HEADS_MAX);
    config->engram_dim = read_u32(reader, "engram_head_dim", 32, 1024);
    config->engram_bucket_base = read_u32(reader, "engram_vocab_size", 2, 1u << 28);
    config->engram_compressed = read_u32(reader, "engram_compressed_vocab_size", 1, config->vocab);
    check_compressed(reader, config);
    need_multiple(reader, "engram_head_dim", config->engram_dim, 32);
    if (reader->status != KV_OK) return;
    for (uint32_t i = 0; i < config->engram_count; i++) {
        if (i > 0 && config->engram_layers[i] <= config->engram_layers[i - 1])
            fail_with(reader, "engram_layer_ids must ascend");
        if (config->engram_layers[i] >= config->encoder_layers)
            fail_with(reader, "engram_layer_ids must name layers of the encoder");
        config->engram_rows[i] = rows[i];
    }
    if (count != config->engram_count)
        fail_with(reader, "engram_num_embeddings must have one entry per Engram layer");
    if (reader->status == KV_OK) check_engram_rows(reader, config);
}

static void read_draft(struct reader *reader, struct eng_config *config)
{
    if (config->draft_stages == 0) return;
    config->draft_block = read_u32(reader, "dspark_block_size", 1, KV_DRAFT_BLOCK_MAX);
    config->draft_noise = read_u32(reader, "dspark_noise_token_id", 0, config->vocab - 1);
    config->draft_rank = read_u32(reader, "dspark_markov_rank", 32, 4096);
    config->draft_experts = read_u32(reader, "dspark_n_routed_experts", 1, 1024);
    config->draft_active = read_u32(reader, "dspark_num_experts_per_tok", 1, 64);
    config->draft_target_count = read_list(reader, "dspark_target_layer_ids", config->draft_targets,
                                           KV_DRAFT_STAGES_MAX, config->layers);
    need_multiple(reader, "dspark_markov_rank", config->draft_rank, 32);
    if (reader->status != KV_OK) return;
    if (config->draft_target_count == 0)
        fail_with(reader, "dspark_target_layer_ids must not be empty");
    for (uint32_t i = 0; i < config->draft_target_count; i++) {
        if (i > 0 && config->draft_targets[i] <= config->draft_targets[i - 1])
            fail_with(reader, "dspark_target_layer_ids must ascend");
        if (config->draft_targets[i] < config->encoder_layers)
            fail_with(reader, "dspark_target_layer_ids must name layers of the decoder");
    }
    if (config->draft_active > config->draft_experts)
        fail_with(reader, "dspark_num_experts_per_tok exceeds dspark_n_routed_experts");
}

/* What the released weights are stored as; a config that says otherwise belongs to other files. */
static void check_quantization(struct reader *reader, const json_t *quantization)
{
    struct reader part = {
        .path = reader->path, .object = quantization, .err = reader->err, .status = KV_OK};
    uint32_t block[2] = {0};

    if (quantization == NULL || reader->status != KV_OK) return;
    need_text(&part, "quant_method", "fp8");
    need_text(&part, "scale_fmt", "ue8m0");
    need_text(&part, "expert_dtype", "fp4");
    const uint32_t count = read_list(&part, "weight_block_size", block, 2, 1u << 16);
    if (count != 2 || block[0] != 32 || block[1] != 32)
        fail_with(&part, "weight_block_size must be [32, 32]");
    reader->status = part.status;
}

/* Ids that the engine has no use for are read all the same: one that the vocabulary does not have
 * means that the config belongs to other weights.  null says that there is none. */
static void check_token_ids(struct reader *reader, const struct eng_config *config)
{
    static const char *const names[] = {"bos_token_id", "eos_token_id", "pad_token_id",
                                        "image_token_id"};

    for (size_t i = 0; i < KV_ARRAY_COUNT(names); i++) {
        const json_t *value = json_object_get(reader->object, names[i]);
        if (value != NULL && !json_is_null(value))
            (void)read_u32(reader, names[i], 0, config->vocab - 1);
    }
}

static void read_root(struct reader *reader, const json_t *root, struct eng_config *config)
{
    struct reader top = {
        .path = reader->path, .object = root, .err = reader->err, .status = reader->status};
    const json_t *name = json_object_get(root, "_name_or_path");
    const char *text = json_is_string(name) ? json_string_value(name) : "deepseek_v41";
    const char *slash = strrchr(text, '/');

    need_text(&top, "model_type", "deepseek_v41");
    if (reader->object != root && json_object_get(reader->object, "model_type") != NULL) {
        struct reader inner = *reader;
        inner.status = top.status;
        need_text_as(&inner, "model_type", "text_config.model_type", "deepseek_v41_text");
        top.status = inner.status;
    }
    config->eos = read_u32(&top, "eos_token_id", 0, config->vocab - 1);
    config->image_id = read_u32_or(&top, "image_token_id", UINT32_MAX, config->vocab - 1);
    check_token_ids(&top, config);
    if (config->engram_count > 0) {
        if (json_object_get(reader->object, "engram_pad_token_id") != NULL)
            top.object = reader->object;
        config->pad = read_u32(&top, top.object == root ? "pad_token_id" : "engram_pad_token_id", 0,
                               config->vocab - 1);
    }
    reader->status = top.status;
    check_token_ids(reader, config);
    check_quantization(reader, json_object_get(root, "quantization_config"));
    (void)snprintf(config->name, sizeof(config->name), "%s", slash != NULL ? slash + 1 : text);
    eng_printable(config->name);
}

kv_status eng_config_parse(const char *path, const char *text, size_t count,
                           struct eng_config *ret_config, struct kv_error *err)
{
    json_error_t fault;
    struct eng_config config = {0};
    struct reader reader = {.path = path, .err = err, .status = KV_OK};

    const uint32_t depth = eng_json_depth(text, count);
    if (depth > ENG_CONFIG_DEPTH_MAX)
        return KV_FAIL(err, KV_INVALID, "%s: nested %u deep, at most %u", path, depth,
                       ENG_CONFIG_DEPTH_MAX);
    json_t *root = json_loadb(text, count, JSON_REJECT_DUPLICATES, &fault);
    if (root == NULL && eng_json_no_memory(text, count, &fault))
        return KV_FAIL(err, KV_NOMEM, "%s: no memory for its %zu bytes", path, count);
    if (root == NULL) {
        eng_printable(fault.text);
        return KV_FAIL(err, KV_INVALID, "%s: line %d: %s", path, fault.line, fault.text);
    }
    reader.object = json_object_get(root, "text_config");
    if (!json_is_object(reader.object)) reader.object = root;
    if (!json_is_object(root))
        reader.status = KV_FAIL(err, KV_INVALID, "%s: must be a JSON object", path);
    if (reader.status == KV_OK) read_dims(&reader, &config);
    if (reader.status == KV_OK) read_numbers(&reader, &config);
    if (reader.status == KV_OK) read_topology(&reader, &config);
    if (reader.status == KV_OK) read_engram(&reader, &config);
    if (reader.status == KV_OK) read_draft(&reader, &config);
    if (reader.status == KV_OK) read_root(&reader, root, &config);
    json_decref(root);
    if (reader.status == KV_OK) *ret_config = config;
    return reader.status;
}

const char *eng_config_text(const char *name)
{
    for (const struct eng_config_text *known = eng_config_texts; known->name != NULL; known++)
        if (strcmp(known->name, name) == 0) return known->text;
    return NULL;
}

kv_status eng_config_layout(const struct eng_config *config, uint32_t spare_tokens,
                            struct kv_layout *ret_layout, struct kv_error *err)
{
    struct kv_layout layout = {
        .vocab_tokens = config->vocab,
        .context_tokens = KV_MIN(config->positions, KV_PROMPT_TOKENS_MAX),
        .window_tokens = config->window,
        .spare_tokens = spare_tokens,
        .encoder_layers = config->encoder_layers,
        .decoder_layers = config->layers - config->encoder_layers,
        .draft_stages = config->draft_stages,
        .window_row_bytes = (uint32_t)eng_window_row_bytes(config->head_dim),
        .source_count = config->source_count,
    };
    for (uint32_t i = 0; i < config->source_count; i++) {
        const uint32_t layer = config->source_layers[i];
        layout.sources[i] = (struct kv_source){
            .layer = layer,
            .ratio = config->ratio[layer],
            .main_bytes = (uint32_t)eng_main_row_bytes(config->head_dim),
            .index_bytes = (uint32_t)eng_index_row_bytes(config->index_dim),
            .tail_bytes = config->ratio[layer] == 2 ? 8 * config->head_dim : 0,
        };
    }
    const kv_status status = kv_layout_finish(&layout, err);
    if (status == KV_OK) *ret_layout = layout;
    return status;
}
