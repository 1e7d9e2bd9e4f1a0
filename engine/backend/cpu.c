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

_Static_assert(ENG_HEAD_DIM_MAX == ENG_ATTEND_DIM_MAX, "what a config may ask of the kernels");

static kv_status open_compute(const struct eng_model *model, struct cpu_model *own,
                              struct kv_error *err)
{
    const kv_status status =
        eng_compute_open(model->isa, model->threads, KV_THREAD_ANY, &own->compute, err);
    if (status == KV_OK && model->quant_off) eng_compute_unround(&own->compute);
    return status;
}

static void cpu_free(struct cpu_model *own)
{
    eng_fetch_destroy(own->fetch);
    free(own->engram_tables);
    free(own->batch_memory);
    eng_compute_close(&own->compute);
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
    if (status == KV_OK) status = open_compute(model, own, err);
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
    const struct cpu_model *own = model->backend;
    return own->compute.family;
}

static const char *cpu_isa(const struct eng_model *model)
{
    const struct cpu_model *own = model->backend;
    return eng_isa_name(own->compute.isa);
}

static kv_status cpu_check(const struct eng_model *model, struct kv_error *err)
{
    const struct cpu_model *own = model->backend;
    return eng_checkpoint_check(own->checkpoint, err);
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

    cpu_read(batch, &weights->hc_attn, weights->attn_norm);
    cpu_attention(batch, layer, write_rows);
    /* The FFN reads with the attention's pre-mix, which this hands on. */
    cpu_write(batch, false);
    cpu_read(batch, &weights->hc_ffn, weights->ffn_norm);
    cpu_moe(batch, layer);
    cpu_write(batch, true);
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
    if (probe != NULL && probe->before_layer != NULL) batch->is_packed = false;
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

static void embed_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                       struct cpu_thread *thread)
{
    static const float one_hot[ENG_STREAMS] = {1.0f, 0.0f, 0.0f, 0.0f};
    const size_t hidden = batch->config->hidden;

    for (uint32_t t = first; t < last; t++) {
        float *streams = batch->streams + t * ENG_STREAMS * hidden;
        eng_weights_row(&batch->model->weights.embed, cpu_row_id(batch, t), streams);
        for (size_t s = 1; s < ENG_STREAMS; s++)
            memcpy(streams + s * hidden, streams, hidden * sizeof(float));
        memcpy(batch->g + ENG_STREAMS * (size_t)t, one_hot, sizeof(one_hot));
    }
}

void cpu_embed(struct cpu_batch *batch)
{
    cpu_each(batch, batch->count, ENG_PACK_ROWS, embed_rows, NULL);
    batch->is_packed = false;
}

/* Streams in and out of what a session keeps of them: bf16, exact, or fp32 with quant_off. */
static void keep_streams(const struct cpu_batch *batch, const float *streams, size_t slot,
                         uint8_t *encoded)
{
    const size_t width = (size_t)ENG_STREAMS * batch->config->hidden;
    uint16_t *halves = (uint16_t *)(void *)encoded + slot * width;
    if (batch->owner->quant_off) {
        memcpy(encoded + slot * width * sizeof(float), streams, width * sizeof(float));
        return;
    }
    for (size_t i = 0; i < width; i++)
        halves[i] = (uint16_t)(eng_bits_of(streams[i]) >> 16);
}

static void recall_streams(const struct cpu_batch *batch, const uint8_t *encoded, size_t slot,
                           float *streams)
{
    const size_t width = (size_t)ENG_STREAMS * batch->config->hidden;
    const uint16_t *halves = (const uint16_t *)(const void *)encoded + slot * width;
    if (batch->owner->quant_off) {
        memcpy(streams, encoded + slot * width * sizeof(float), width * sizeof(float));
        return;
    }
    for (size_t i = 0; i < width; i++)
        streams[i] = eng_bf16_decode(halves[i]);
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
        keep_streams(batch, batch->streams + t * width, slot, own->encoded);
        memcpy(own->encoded_g + slot * ENG_STREAMS, batch->g + (size_t)t * ENG_STREAMS,
               ENG_STREAMS * sizeof(float));
    }
}

static void encode(struct cpu_batch *batch, const struct eng_pass_spans *spans)
{
    const struct eng_config *c = batch->config;
    struct cpu_products products = {.count = 0};

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
    cpu_read(batch, NULL, batch->model->weights.layers[c->encoder_layers].attn_norm);
    cpu_rows_products(batch, c->encoder_layers, &products);
    cpu_products_run(batch, &products);
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
            recall_streams(batch, own->encoded, slot, streams);
        }
        memcpy(batch->g + (size_t)t * ENG_STREAMS, g, ENG_STREAMS * sizeof(float));
    }
}

static bool shows_logits(const struct cpu_batch *batch)
{
    return batch->owner->probe != NULL && batch->owner->probe->logits != NULL;
}

/* Logits of `count` rows to where each wants them. */
static void make_logits(struct cpu_batch *batch, const uint32_t *rows, uint32_t count)
{
    const struct eng_config *c = batch->config;
    const struct eng_probe *probe = batch->owner->probe;
    struct eng_pack_args packing =
        cpu_packing(batch, batch->x, c->hidden, count, c->hidden, false, batch->packed_head);
    struct cpu_products products = {.count = 0};

    packing.index = rows;
    cpu_pack(batch, &packing);
    cpu_product(batch, &products, &batch->model->weights.head, batch->packed_head, count,
                batch->head_y, false);
    cpu_products_run(batch, &products);
    for (uint32_t i = 0; i < count; i++) {
        const struct cpu_row *row = &batch->rows[rows[i]];
        const float *logits = batch->head_y + (size_t)i * c->vocab;
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
    const bool all = shows_logits(batch) && batch->owner->probe->all_logits;
    uint32_t count = 0;

    for (uint32_t t = 0; t < batch->count; t++)
        if (all || eng_wants_logits(batch->rows[t].session, batch->rows[t].position))
            batch->head_rows[count++] = t;
    if (count == 0) return;
    cpu_read(batch, NULL, batch->model->weights.norm);
    for (uint32_t i = 0; i < count; i += CPU_HEAD_ROWS)
        make_logits(batch, batch->head_rows + i, KV_MIN(CPU_HEAD_ROWS, count - i));
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
    .check = cpu_check,
    .engram_rows = cpu_engram_rows,
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
