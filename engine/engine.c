/*
 * Opens a model: config, layout, backend, fingerprint.
 *
 * The fingerprint covers everything that rows depend on: config and weights byte for byte, the
 * version of the layout, the tie rule and the numerics revision of the backend.  A change of any
 * makes old rows another model's, which the store then refuses by itself.
 */

#include "engine/engine.h"

#include "engine/backend/backend.h"
#include "engine/model/safetensors.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#define CONFIG_BYTES_MAX (1u << 20)

static const char layout_version[] = "layout 1; ties: larger score, then smaller index";

static kv_status read_config(struct eng_model *model, const char *model_dir, struct kv_error *err)
{
    char path[4096];
    uint8_t *text = NULL;
    size_t count = 0;

    if (model_dir == NULL) {
        eng_config_tiny(&model->config);
        return KV_OK;
    }
    const int length = snprintf(path, sizeof(path), "%s/config.json", model_dir);
    if (length < 0 || (size_t)length >= sizeof(path))
        return KV_FAIL(err, KV_INVALID, "model directory: path too long");
    kv_status status = eng_file_read(path, CONFIG_BYTES_MAX, &text, &count, err);
    if (status != KV_OK) return status;
    status = eng_config_parse(path, (const char *)text, count, &model->config, err);
    if (status == KV_OK && model->ops == &eng_backend_cpu)
        status = eng_config_check_supported(path, &model->config, err);
    if (status == KV_OK) kv_sha256(text, count, &model->config_digest);
    free(text);
    return status;
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

kv_status eng_model_open(const struct eng_options *options, struct eng_model **ret_model,
                         struct kv_error *err)
{
    struct eng_model *model = calloc(1, sizeof(*model));
    if (model == NULL) return KV_FAIL(err, KV_NOMEM, "model");

    kv_status status = KV_OK;
    model->ops = options->backend == ENG_BACKEND_CPU ? &eng_backend_cpu : &eng_backend_synthetic;
    if (options->backend == ENG_BACKEND_CPU && options->model_dir == NULL)
        status = KV_FAIL(err, KV_INVALID,
                         "model directory: none given, and the cpu backend "
                         "needs config.json and model.safetensors");
    model->pass_rows = options->pass_rows > 0 ? options->pass_rows : ENG_PASS_ROWS_DEFAULT;
    if (status == KV_OK && model->pass_rows > ENG_PASS_ROWS_MAX)
        status = KV_FAIL(err, KV_INVALID, "pass_rows: at most %u, found %u", ENG_PASS_ROWS_MAX,
                         model->pass_rows);
    if (status == KV_OK) status = read_config(model, options->model_dir, err);
    if (status == KV_OK)
        status = eng_config_layout(&model->config, options->spare_tokens, &model->layout, err);
    if (status != KV_OK) goto fail;

    const struct kv_layout *layout = &model->layout;
    model->layer_count = layout->encoder_layers + layout->decoder_layers + layout->draft_stages;
    model->ring_rows = layout->window_rows + ENG_RING_EXTRA;
    model->tails_bytes = eng_tail_offset(model, layout->source_count);
    model->verify_max = KV_MIN(ENG_VERIFY_MAX, layout->window_tokens);
    model->prefill_all = options->prefill_all;
    model->sample_values = malloc(layout->vocab_tokens * sizeof(*model->sample_values));
    model->sample_order = malloc(layout->vocab_tokens * sizeof(*model->sample_order));
    if (model->sample_values == NULL || model->sample_order == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "model");
        goto fail;
    }
    status = model->ops->open(model, options->model_dir, err);
    if (status != KV_OK) goto fail;
    make_fingerprint(model);
    *ret_model = model;
    return KV_OK;

fail:
    eng_model_close(model);
    return status;
}

void eng_model_close(struct eng_model *model)
{
    if (model == NULL) return;
    if (model->backend != NULL) model->ops->close(model);
    free(model->sample_values);
    free(model->sample_order);
    free(model);
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

uint32_t eng_model_draft_max(const struct eng_model *model)
{
    return 0;
}

uint32_t eng_model_eos(const struct eng_model *model)
{
    return model->config.eos;
}

uint64_t eng_model_bytes(const struct eng_model *model)
{
    return model->bytes;
}

uint64_t eng_model_wrong_bytes(const struct eng_model *model)
{
    return atomic_load_explicit(&model->wrong_bytes, memory_order_relaxed);
}
