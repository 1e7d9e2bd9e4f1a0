/*
 * The sequence of layers, in reading order (the model's specification, sections 2.1 and 3.1).
 *
 * A prompt token runs through the encoder and the projection of the first decoder layer, which is
 * all that the rest of the model ever reads of it; its encoder output is kept while it is among the
 * last window.  The decoder runs over those at the end of a prefill.  Layers are the outer loop,
 * rows of a pass, whichever session they belong to, the inner one.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>

static kv_status choose_kernels(const struct eng_model *model, struct cpu_model *own,
                                struct kv_error *err)
{
    static const char *const names[] = {[ENG_ISA_PORTABLE] = "portable",
                                        [ENG_ISA_AVX2] = "avx2",
                                        [ENG_ISA_AVX512] = "avx512",
                                        [ENG_ISA_AMX] = "amx"};
    own->kernels = eng_kernels_best();
    if (model->isa == ENG_ISA_AUTO) return KV_OK;
    for (unsigned i = 0; (own->kernels = eng_kernels_at(i)) != NULL; i++)
        if (strcmp(own->kernels->name, names[model->isa]) == 0) return KV_OK;
    return KV_FAIL(err, KV_INVALID, "instruction set: this machine has no %s", names[model->isa]);
}

static void cpu_free(struct cpu_model *own)
{
    eng_fetch_destroy(own->fetch);
    free(own->engram_tables);
    free(own->batch_memory);
    eng_weights_fini(&own->weights);
    eng_checkpoint_close(own->checkpoint);
    free(own);
}

static kv_status cpu_open(struct eng_model *model, const char *model_dir, struct kv_error *err)
{
    struct cpu_model *own = calloc(1, sizeof(*own));
    if (own == NULL) return KV_FAIL(err, KV_NOMEM, "model");

    kv_status status = eng_checkpoint_open(model_dir, &own->checkpoint, err);
    if (status == KV_OK) {
        const struct kv_digest config = eng_checkpoint_config_digest(own->checkpoint);
        if (memcmp(&config, &model->config_digest, sizeof(config)) != 0)
            status =
                KV_FAIL(err, KV_INVALID, "%s: config.json changed while it was read", model_dir);
    }
    if (status == KV_OK) status = eng_weights_load(own->checkpoint, &own->weights, err);
    if (status == KV_OK) status = choose_kernels(model, own, err);
    if (status == KV_OK) status = cpu_batch_init(model, own, err);
    if (status == KV_OK) status = cpu_engram_open(model, own, err);
    if (status != KV_OK) {
        cpu_free(own);
        return status;
    }
    model->weights_digest = eng_checkpoint_digest(own->checkpoint);
    model->bytes = own->weights.bytes + own->batch_bytes;
    model->backend = own;
    return KV_OK;
}

static void cpu_close(struct eng_model *model)
{
    cpu_free(model->backend);
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

static bool cpu_lost(const struct eng_model *model)
{
    const struct cpu_model *own = model->backend;
    return eng_checkpoint_lost(own->checkpoint);
}

/* Encoder outputs matter within a run only, so a copy between runs has nothing more to take. */
static void cpu_moved(struct eng_session *session, const uint32_t *ids, const uint8_t *image,
                      const struct kv_image_state *state)
{
}

static void cpu_rewound(struct eng_session *session, const uint32_t *ids)
{
    eng_host_rewound(session);
}

void cpu_block(struct cpu_batch *batch, uint32_t layer, bool write_rows)
{
    const struct eng_layer *weights = &batch->model->weights.layers[layer];

    cpu_mix(batch, &weights->hc_attn);
    cpu_collapse(batch, weights->attn_norm);
    cpu_attention(batch, layer, write_rows);
    /* The FFN reads with the attention's pre-mix; the mixes below would overwrite it. */
    cpu_hand_on(batch);
    cpu_expand(batch);
    cpu_mix(batch, &weights->hc_ffn);
    cpu_collapse(batch, weights->ffn_norm);
    cpu_moe(batch, layer);
    cpu_expand(batch);
    cpu_hand_on(batch);
}

/* All that happens to the streams before a layer reads them. */
static void enter_layer(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_probe *probe = batch->owner->probe;
    const size_t width = (size_t)ENG_STREAMS * batch->config->hidden;

    for (uint32_t i = 0; probe != NULL && probe->before_layer != NULL && i < batch->span_count;
         i++) {
        const struct cpu_span *span = &batch->spans[i];
        const struct eng_probe_rows rows = cpu_probe_rows(span, layer);
        probe->before_layer(probe->context, &rows, batch->streams + span->row * width,
                            batch->g + (size_t)span->row * ENG_STREAMS);
    }
    cpu_engram(batch, layer);
    cpu_tap(batch, layer);
}

void cpu_leave_layer(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_probe *probe = batch->owner->probe;
    const size_t width = (size_t)ENG_STREAMS * batch->config->hidden;

    for (uint32_t i = 0; probe != NULL && probe->after_layer != NULL && i < batch->span_count;
         i++) {
        const struct cpu_span *span = &batch->spans[i];
        const struct eng_probe_rows rows = cpu_probe_rows(span, layer);
        probe->after_layer(probe->context, &rows, batch->streams + span->row * width,
                           batch->g + (size_t)span->row * ENG_STREAMS);
    }
}

void cpu_embed(struct cpu_batch *batch)
{
    static const float one_hot[ENG_STREAMS] = {1.0f, 0.0f, 0.0f, 0.0f};
    const size_t hidden = batch->config->hidden;

    for (uint32_t t = 0; t < batch->count; t++) {
        const uint32_t id = cpu_row_id(batch, t);
        const float *row = batch->model->weights.embed + (size_t)id * hidden;
        assert(id < batch->config->vocab);
        for (size_t s = 0; s < ENG_STREAMS; s++)
            memcpy(batch->streams + (t * ENG_STREAMS + s) * hidden, row, hidden * sizeof(float));
        memcpy(batch->g + ENG_STREAMS * (size_t)t, one_hot, sizeof(one_hot));
    }
}

/* Of each span what a later pass may decode: the last window at most. */
static void keep_encoded(struct cpu_batch *batch)
{
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)ENG_STREAMS * c->hidden;

    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *row = &batch->rows[t];
        const struct cpu_span *span = &batch->spans[row->span];
        struct cpu_session *own = row->session->backend;
        const size_t slot = row->position % c->window;
        if (row->position + c->window < span->first + span->count) continue;
        if (row->position < row->session->run.decode_first) continue;
        for (size_t i = 0; i < width; i++)
            own->encoded[slot * width + i] = eng_bf16_encode(batch->streams[t * width + i]);
        memcpy(own->encoded_g + slot * ENG_STREAMS, batch->g + (size_t)t * ENG_STREAMS,
               ENG_STREAMS * sizeof(float));
    }
}

static void encode(struct cpu_batch *batch, const struct eng_pass_spans *spans)
{
    const struct eng_config *c = batch->config;

    batch->streams = batch->encoder_streams;
    batch->g = batch->encoder_g;
    cpu_batch_start(batch, spans->encode, spans->encode_count);
    cpu_engram_start(batch);
    cpu_embed(batch);
    for (uint32_t layer = 0; layer < c->encoder_layers; layer++) {
        enter_layer(batch, layer);
        cpu_block(batch, layer, true);
        cpu_leave_layer(batch, layer);
    }
    enter_layer(batch, c->encoder_layers);
    cpu_collapse(batch, batch->model->weights.layers[c->encoder_layers].attn_norm);
    cpu_write_rows(batch, c->encoder_layers);
    keep_encoded(batch);
}

/* The encoder's row of a position that this very pass has encoded, or -1. */
static int64_t encoder_row(const struct eng_pass_spans *spans, const struct eng_session *session,
                           uint32_t position)
{
    int64_t row = 0;
    for (uint32_t i = 0; i < spans->encode_count; i++) {
        const struct eng_span *span = &spans->encode[i];
        if (span->session == session) {
            if (position < span->first || position >= span->first + span->count) return -1;
            return row + (position - span->first);
        }
        row += span->count;
    }
    return -1;
}

static void load_encoded(struct cpu_batch *batch, const struct eng_pass_spans *spans)
{
    const struct eng_config *c = batch->config;
    const size_t width = (size_t)ENG_STREAMS * c->hidden;

    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *row = &batch->rows[t];
        const struct cpu_session *own = row->session->backend;
        const int64_t from = encoder_row(spans, row->session, row->position);
        const size_t slot = row->position % c->window;
        float *streams = batch->streams + t * width;
        const float *g = own->encoded_g + slot * ENG_STREAMS;
        if (from >= 0) {
            memcpy(streams, batch->encoder_streams + (size_t)from * width, width * sizeof(float));
            g = batch->encoder_g + (size_t)from * ENG_STREAMS;
        } else {
            for (size_t i = 0; i < width; i++)
                streams[i] = eng_bf16_decode(own->encoded[slot * width + i]);
        }
        memcpy(batch->g + (size_t)t * ENG_STREAMS, g, ENG_STREAMS * sizeof(float));
    }
}

static bool shows_logits(const struct cpu_batch *batch)
{
    return batch->owner->probe != NULL && batch->owner->probe->logits != NULL;
}

/* Logits of `count` rows, gathered in head_x, to where each wants them. */
static void make_logits(struct cpu_batch *batch, const uint32_t *rows, uint32_t count)
{
    const struct eng_config *c = batch->config;
    const struct eng_probe *probe = batch->owner->probe;
    const size_t padded = eng_pad_lanes(c->vocab);

    cpu_linear(batch, &batch->model->weights.head, batch->head_x, c->hidden, count, batch->head_y,
               padded, false);
    for (uint32_t i = 0; i < count; i++) {
        const struct cpu_row *row = &batch->rows[rows[i]];
        const float *logits = batch->head_y + i * padded;
        if (eng_wants_logits(row->session, row->position))
            memcpy(eng_logits_of(row->session, row->position), logits, c->vocab * sizeof(float));
        if (!shows_logits(batch)) continue;
        probe->logits(
            probe->context,
            &(struct eng_probe_rows){
                .session = row->session, .layer = c->layers, .first = row->position, .count = 1},
            logits);
    }
}

static void finish_rows(struct cpu_batch *batch)
{
    const struct eng_config *c = batch->config;
    const bool all = shows_logits(batch) && batch->owner->probe->all_logits;
    uint32_t rows[CPU_HEAD_ROWS];
    uint32_t count = 0;

    cpu_collapse(batch, batch->model->weights.norm);
    for (uint32_t t = 0; t < batch->count; t++) {
        if (!all && !eng_wants_logits(batch->rows[t].session, batch->rows[t].position)) continue;
        memcpy(batch->head_x + (size_t)count * c->hidden, batch->x + (size_t)t * c->hidden,
               c->hidden * sizeof(float));
        rows[count++] = t;
        if (count < CPU_HEAD_ROWS) continue;
        make_logits(batch, rows, count);
        count = 0;
    }
    if (count > 0) make_logits(batch, rows, count);
}

static void decode(struct cpu_batch *batch, const struct eng_pass_spans *spans)
{
    const struct eng_config *c = batch->config;

    batch->streams = batch->decoder_streams;
    batch->g = batch->decoder_g;
    cpu_batch_start(batch, spans->decode, spans->decode_count);
    load_encoded(batch, spans);
    for (uint32_t layer = c->encoder_layers; layer < c->layers; layer++) {
        enter_layer(batch, layer);
        cpu_block(batch, layer, false);
        cpu_leave_layer(batch, layer);
    }
    cpu_draft_windows(batch);
    finish_rows(batch);
}

static void cpu_pass(struct eng_model *model, const struct eng_pass_spans *spans)
{
    struct cpu_model *own = model->backend;
    if (spans->encode_count > 0) encode(&own->batch, spans);
    if (spans->decode_count > 0) decode(&own->batch, spans);
}

const struct eng_backend_ops eng_backend_cpu = {
    .name = "cpu",
    .revision = "cpu 2",
    .open = cpu_open,
    .close = cpu_close,
    .family = cpu_family,
    .isa = cpu_isa,
    .lost = cpu_lost,
    .session_bytes = cpu_session_bytes,
    .session_init = cpu_session_init,
    .session_fini = eng_host_session_fini,
    .session_copy = eng_host_copy,
    .window_read = eng_host_window_read,
    .window_write = eng_host_window_write,
    .tails_read = eng_host_tails_read,
    .tails_write = eng_host_tails_write,
    .ids_write = eng_host_ids_write,
    .moved = cpu_moved,
    .rewound = cpu_rewound,
    .begin = eng_host_begin,
    .pass = cpu_pass,
    .draft = cpu_draft,
};
