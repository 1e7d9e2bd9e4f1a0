/*
 * Opens a model: config, layout, backend, fingerprint.
 *
 * The fingerprint covers everything that rows depend on: config and weights byte for byte, the
 * version of the layout, the tie rule and the numerics revision of the backend.  A change of any
 * makes old rows another model's, which the store then refuses by itself.  The kernel family is not
 * in it: families differ in rounding only, so rows of one are an approximation for the other.
 */

#include "engine/engine.h"

#include "engine/backend/backend.h"
#include "engine/model/checkpoint.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

static const char layout_version[] = "layout 1; ties: larger score, then smaller index";

static kv_status read_config(struct eng_model *model, const char *model_dir, struct kv_error *err)
{
    const char *tiny = eng_config_text("tiny");

    if (model_dir != NULL)
        return eng_checkpoint_config_read(model_dir, &model->config, &model->config_digest, err);
    kv_sha256(tiny, strlen(tiny), &model->config_digest);
    return eng_config_parse("tiny", tiny, strlen(tiny), &model->config, err);
}

static void make_fingerprint(struct eng_model *model)
{
    uint8_t input[512] = {0};
    size_t used = 0;
    const char *const texts[] = {layout_version, model->ops->name, model->ops->revision,
                                 model->config.name};

    memcpy(input, model->config_digest.bytes, 32);
    memcpy(input + 32, model->weights_digest.bytes, 32);
    used = 64;
    for (size_t i = 0; i < KV_ARRAY_COUNT(texts); i++) {
        const size_t bytes = strlen(texts[i]) + 1;
        assert(used + bytes <= sizeof(input));
        memcpy(input + used, texts[i], bytes);
        used += bytes;
    }
    struct kv_digest layout;
    struct kv_layout shape = model->layout;
    /* How many spare rows a window keeps changes no row: it is a setting, not the model. */
    shape.spare_tokens = shape.window_rows = shape.image_bytes = shape.tails_offset = 0;
    kv_sha256(&shape, sizeof(shape), &layout);
    assert(used + 32 <= sizeof(input));
    memcpy(input + used, layout.bytes, 32);
    kv_sha256(input, used + 32, &model->fingerprint);
}

static kv_status read_options(struct eng_model *model, const struct eng_options *options,
                              struct kv_error *err)
{
    model->isa = options->isa;
    model->threads = options->threads;
    model->pass_rows = options->pass_rows > 0 ? options->pass_rows : ENG_PASS_ROWS_DEFAULT;
    model->quant_off = options->quant_off;
    model->prefill_all = options->prefill_all;
    if (model->pass_rows > KV_PASS_ROWS_MAX)
        return KV_FAIL(err, KV_INVALID, "pass_rows: at most %u, found %u", KV_PASS_ROWS_MAX,
                       model->pass_rows);
    if (model->threads > KV_ENGINE_THREADS_MAX)
        return KV_FAIL(err, KV_INVALID, "threads: at most %u, found %u", KV_ENGINE_THREADS_MAX,
                       model->threads);
    return KV_OK;
}

/* Rows as fp32 values. */
static kv_status widen_rows(struct eng_model *model, struct kv_error *err)
{
    struct kv_layout *layout = &model->layout;
    layout->window_row_bytes = 4 * model->config.head_dim;
    for (uint32_t i = 0; i < layout->source_count; i++) {
        layout->sources[i].main_bytes = 4 * model->config.head_dim;
        layout->sources[i].index_bytes = 4 * model->config.index_dim;
    }
    return kv_layout_finish(layout, err);
}

/* What follows from the layout, and scratch. */
static kv_status finish_layout(struct eng_model *model, struct kv_error *err)
{
    const struct kv_layout *layout = &model->layout;

    model->layer_count = layout->encoder_layers + layout->decoder_layers + layout->draft_stages;
    model->ring_rows = layout->window_rows + ENG_RING_EXTRA;
    model->tails_bytes = eng_tail_offset(model, layout->source_count);
    model->verify_max = KV_MIN(KV_VERIFY_TOKENS_MAX, layout->window_tokens);
    model->sample_values = malloc(layout->vocab_tokens * sizeof(*model->sample_values));
    model->sample_order = malloc(layout->vocab_tokens * sizeof(*model->sample_order));
    model->spans = malloc(2 * (size_t)model->pass_rows * sizeof(*model->spans));
    if (model->sample_values == NULL || model->sample_order == NULL || model->spans == NULL)
        return KV_FAIL(err, KV_NOMEM, "model");
    return KV_OK;
}

kv_status eng_model_open_with(const struct eng_options *options, const struct eng_backend_ops *ops,
                              struct eng_model **ret_model, struct kv_error *err)
{
    struct eng_model *model = calloc(1, sizeof(*model));
    if (model == NULL) return KV_FAIL(err, KV_NOMEM, "model");

    model->ops = ops;
    kv_status status = read_options(model, options, err);
    if (status == KV_OK && options->backend == ENG_BACKEND_CPU && options->model_dir == NULL)
        status = KV_FAIL(err, KV_INVALID,
                         "model directory: none given, and the cpu backend "
                         "needs config.json and model.safetensors");
    if (status == KV_OK) status = read_config(model, options->model_dir, err);
    if (status == KV_OK)
        status = eng_config_layout(&model->config, options->spare_tokens, &model->layout, err);
    if (status == KV_OK && model->quant_off) status = widen_rows(model, err);
    if (status == KV_OK) status = finish_layout(model, err);
    if (status == KV_OK) status = ops->open(model, options->model_dir, err);
    if (status == KV_OK) {
        make_fingerprint(model);
        *ret_model = model;
    } else {
        eng_model_close(model);
    }
    return status;
}

kv_status eng_model_open(const struct eng_options *options, struct eng_model **ret_model,
                         struct kv_error *err)
{
    const bool cpu = options->backend == ENG_BACKEND_CPU;
    return eng_model_open_with(options, cpu ? &eng_backend_cpu : &eng_backend_synthetic, ret_model,
                               err);
}

void eng_model_close(struct eng_model *model)
{
    if (model == NULL) return;
    if (model->backend != NULL) model->ops->close(model);
    free(model->sample_values);
    free(model->sample_order);
    free(model->spans);
    free(model);
}

void eng_model_set_probe(struct eng_model *model, const struct eng_probe *probe)
{
    model->probe = probe;
}

const struct kv_layout *eng_model_layout(const struct eng_model *model)
{
    return &model->layout;
}

struct kv_digest eng_model_fingerprint(const struct eng_model *model)
{
    return model->fingerprint;
}

const char *eng_model_name(const struct eng_model *model)
{
    return model->config.name;
}

const char *eng_model_backend(const struct eng_model *model)
{
    return model->ops->name;
}

const char *eng_model_family(const struct eng_model *model)
{
    return model->ops->family(model);
}

const char *eng_model_isa(const struct eng_model *model)
{
    return model->ops->isa(model);
}

uint32_t eng_model_pass_rows(const struct eng_model *model)
{
    return model->pass_rows;
}

uint32_t eng_model_verify_max(const struct eng_model *model)
{
    return model->verify_max;
}

const struct eng_config *eng_model_config(const struct eng_model *model)
{
    return &model->config;
}

uint32_t eng_model_eos(const struct eng_model *model)
{
    return model->config.eos;
}

uint64_t eng_model_bytes(const struct eng_model *model)
{
    return model->bytes;
}

kv_status eng_model_check(const struct eng_model *model, struct kv_error *err)
{
    return model->ops->check != NULL ? model->ops->check(model, err) : KV_OK;
}

uint64_t eng_model_engram_rows(const struct eng_model *model)
{
    return model->ops->engram_rows != NULL ? model->ops->engram_rows(model) : 0;
}

uint64_t eng_model_wrong_bytes(const struct eng_model *model)
{
    return atomic_load_explicit(&model->wrong_bytes, memory_order_relaxed);
}
