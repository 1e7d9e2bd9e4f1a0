/*
 * The sequence of layers, in reading order (the model's specification, sections 2.1 and 3.1).
 *
 * A prompt token runs through the encoder and the projection of the first decoder layer, which is
 * all that the rest of the model ever reads of it; its encoder output is kept while it is among the
 * last window.  The decoder runs over those at the end of a prefill.  Layers are the outer loop,
 * tokens of a batch the inner one.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

static kv_status cpu_open(struct eng_model *model, const char *model_dir, struct kv_error *err)
{
    char path[4096];
    struct eng_safetensors *file = NULL;
    struct cpu_model *own = calloc(1, sizeof(*own));
    if (own == NULL) return KV_FAIL(err, KV_NOMEM, "model");

    kv_status status = KV_OK;
    const int length = snprintf(path, sizeof(path), "%s/model.safetensors", model_dir);
    if (length < 0 || (size_t)length >= sizeof(path))
        status = KV_FAIL(err, KV_INVALID, "model directory: path too long");
    if (status == KV_OK) status = eng_safetensors_open(path, &file, err);
    if (status == KV_OK) status = eng_weights_load(&model->config, file, &own->weights, err);
    if (status == KV_OK) {
        size_t count = 0;
        const uint8_t *bytes = eng_safetensors_bytes(file, &count);
        kv_sha256(bytes, count, &model->weights_digest);
        own->kernels = eng_kernels_best();
        model->bytes = own->weights.bytes;
        model->backend = own;
    } else {
        free(own);
    }
    eng_safetensors_close(file);
    return status;
}

static void cpu_close(struct eng_model *model)
{
    struct cpu_model *own = model->backend;
    eng_weights_fini(&own->weights);
    free(own);
    model->backend = NULL;
}

static const char *cpu_family(const struct eng_model *model)
{
    return "fp32";
}

static const char *cpu_isa(const struct eng_model *model)
{
    const struct cpu_model *own = model->backend;
    return own->kernels->name;
}

/* Encoder outputs matter within a prefill only, so a copy between prefills has nothing to take. */
static void cpu_session_copy(struct eng_session *to, const struct eng_session *from)
{
}

static void cpu_moved(struct eng_session *session, const uint32_t *ids, const uint8_t *image,
                      const struct kv_image_state *state)
{
}

static void cpu_rewound(struct eng_session *session, const uint32_t *ids)
{
}

static void cpu_begin(struct eng_session *session)
{
}

static void run_block(struct eng_session *session, struct cpu_batch *batch, uint32_t layer,
                      bool write_rows)
{
    const struct eng_layer *weights = &batch->model->weights.layers[layer];

    cpu_mix(batch, &weights->hc_attn);
    cpu_collapse(batch, batch->g, 4, weights->attn_norm);
    cpu_attention(session, batch, layer, write_rows);
    /* The FFN reads with the attention's pre-mix; the mixes below would overwrite it. */
    for (uint32_t t = 0; t < batch->count; t++)
        memcpy(batch->g + 4 * (size_t)t, batch->mix[t].pre, sizeof(batch->mix[t].pre));
    cpu_expand(batch);
    cpu_mix(batch, &weights->hc_ffn);
    cpu_collapse(batch, batch->g, 4, weights->ffn_norm);
    cpu_moe(session, batch, layer);
    cpu_expand(batch);
    for (uint32_t t = 0; t < batch->count; t++)
        memcpy(batch->g + 4 * (size_t)t, batch->mix[t].pre, sizeof(batch->mix[t].pre));
}

static void embed(struct eng_session *session, struct cpu_batch *batch)
{
    static const float one_hot[4] = {1.0f, 0.0f, 0.0f, 0.0f};
    const size_t hidden = batch->config->hidden;

    for (uint32_t t = 0; t < batch->count; t++) {
        const uint32_t id = eng_run_id(session, batch->first + t);
        const float *row = batch->model->weights.embed + (size_t)id * hidden;
        assert(id < batch->config->vocab);
        for (size_t s = 0; s < ENG_STREAMS; s++)
            memcpy(batch->streams + (t * ENG_STREAMS + s) * hidden, row, hidden * sizeof(float));
        memcpy(batch->g + 4 * (size_t)t, one_hot, sizeof(one_hot));
    }
}

static void encode_batch(struct eng_session *session, uint32_t first, uint32_t count)
{
    struct cpu_session *own = session->backend;
    struct cpu_batch *batch = &own->batch;
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)ENG_STREAMS * c->hidden;

    cpu_batch_start(batch, first, count);
    embed(session, batch);
    for (uint32_t layer = 0; layer < c->encoder_layers; layer++)
        run_block(session, batch, layer, true);
    cpu_collapse(batch, batch->g, 4, batch->model->weights.layers[c->encoder_layers].attn_norm);
    cpu_write_rows(session, batch, c->encoder_layers);
    for (uint32_t t = 0; t < count; t++) {
        const size_t slot = (first + t) % c->window;
        memcpy(own->encoded + slot * width, batch->streams + t * width, width * sizeof(float));
        memcpy(own->encoded_g + slot * 4, batch->g + 4 * (size_t)t, 4 * sizeof(float));
    }
}

static void cpu_encode(struct eng_session *session, uint32_t first, uint32_t count)
{
    for (uint32_t done = 0; done < count; done += CPU_BATCH)
        encode_batch(session, first + done, KV_MIN(count - done, CPU_BATCH));
}

static void decode_batch(struct eng_session *session, uint32_t first, uint32_t count)
{
    struct cpu_session *own = session->backend;
    struct cpu_batch *batch = &own->batch;
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)ENG_STREAMS * c->hidden;

    cpu_batch_start(batch, first, count);
    for (uint32_t t = 0; t < count; t++) {
        const size_t slot = (first + t) % c->window;
        memcpy(batch->streams + t * width, own->encoded + slot * width, width * sizeof(float));
        memcpy(batch->g + 4 * (size_t)t, own->encoded_g + slot * 4, 4 * sizeof(float));
    }
    for (uint32_t layer = c->encoder_layers; layer < c->layers; layer++)
        run_block(session, batch, layer, false);
}

static void make_logits(struct eng_session *session)
{
    struct cpu_session *own = session->backend;
    struct cpu_batch *batch = &own->batch;
    const struct eng_config *c = batch->config;
    const struct eng_weights *weights = &batch->model->weights;

    cpu_collapse(batch, batch->g, 4, weights->norm);
    for (uint32_t t = 0; t < batch->count; t++) {
        const uint32_t position = batch->first + t;
        if (!eng_wants_logits(session, position)) continue;
        batch->kernels->matmul(&(struct eng_matmul_args){.packed = weights->head.packed,
                                                         .n = c->vocab,
                                                         .k = c->hidden,
                                                         .x = batch->x + (size_t)t * c->hidden,
                                                         .y = eng_logits_of(session, position),
                                                         .count = 1});
    }
}

static void cpu_decode(struct eng_session *session, uint32_t first, uint32_t to)
{
    for (uint32_t at = first; at < to; at += CPU_BATCH) {
        decode_batch(session, at, KV_MIN(to - at, CPU_BATCH));
        make_logits(session);
    }
}

const struct eng_backend_ops eng_backend_cpu = {
    .name = "cpu",
    .revision = "cpu fp32 1: sums in order of k, 16-lane dots, no fused multiply-add",
    .open = cpu_open,
    .close = cpu_close,
    .family = cpu_family,
    .isa = cpu_isa,
    .session_bytes = cpu_session_bytes,
    .session_init = cpu_session_init,
    .session_copy = cpu_session_copy,
    .moved = cpu_moved,
    .rewound = cpu_rewound,
    .begin = cpu_begin,
    .encode = cpu_encode,
    .decode = cpu_decode,
};
