/*
 * Engram (the model's specification, section 2.8, rules 4 to 6): n-gram rows, gated into the four
 * streams before anything else of a layer.
 *
 * Row numbers depend on token ids only, so those of a whole pass are known before its first layer
 * and their bytes are fetched by another thread while the layers before run.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

kv_status cpu_engram_open(const struct eng_model *model, struct cpu_model *own,
                          struct kv_error *err)
{
    const struct eng_config *c = &model->config;
    const uint32_t columns = eng_config_engram_columns(c);

    if (c->engram_count == 0) return KV_OK;
    own->engram_ids.compressed = eng_checkpoint_compressed_ids(own->checkpoint);
    own->engram_ids.pad = own->engram_ids.compressed[c->pad];
    own->engram_ids.image = c->image_id;
    own->engram_tables = calloc(c->engram_count, sizeof(*own->engram_tables));
    if (own->engram_tables == NULL) return KV_FAIL(err, KV_NOMEM, "Engram tables");
    for (uint32_t i = 0; i < c->engram_count; i++) {
        own->engram_tables[i] = own->weights.engram[i].table;
        eng_engram_table_advise(&own->engram_tables[i]);
    }
    return eng_fetch_create(own->engram_tables, c->engram_count, cpu_rows_max(model) * columns,
                            eng_fetch_resident_bytes(), &own->fetch, err);
}

uint64_t cpu_engram_rows(const struct eng_model *model)
{
    const struct cpu_model *own = model->backend;
    return own->fetch != NULL ? eng_fetch_rows(own->fetch) : 0;
}

static void show_rows(const struct cpu_batch *batch, uint32_t index)
{
    const struct eng_probe *probe = batch->owner->probe;
    const uint32_t columns = eng_config_engram_columns(batch->config);
    const uint64_t *numbers = eng_fetch_numbers(batch->model->fetch, index);

    if (probe == NULL || probe->engram == NULL) return;
    for (uint32_t i = 0; i < batch->span_count; i++) {
        const struct cpu_span *span = &batch->spans[i];
        const struct eng_probe_rows rows =
            cpu_probe_rows(span, batch->config->engram_layers[index]);
        probe->engram(probe->context, &rows, numbers + (size_t)span->row * columns, columns);
    }
}

void cpu_engram_start(const struct cpu_batch *batch)
{
    const struct eng_config *c = batch->config;
    const struct cpu_model *model = batch->model;
    const uint32_t columns = eng_config_engram_columns(c);
    uint32_t newest_first[ENG_NGRAM_MAX], context[ENG_NGRAM_MAX];

    if (c->engram_count == 0) return;
    for (uint32_t t = 0; t < batch->count; t++) {
        const struct cpu_row *row = &batch->rows[t];
        const uint32_t known = KV_MIN(row->position + 1, c->engram_max_ngram);
        for (uint32_t s = 0; s < known; s++)
            newest_first[s] = eng_run_id(row->session, row->position - s);
        eng_engram_context(&model->engram_ids, newest_first, known, c->engram_max_ngram, context);
        for (uint32_t i = 0; i < c->engram_count; i++)
            eng_engram_rows(&model->weights.engram[i].hash, context,
                            eng_fetch_numbers(model->fetch, i) + (size_t)t * columns);
    }
    for (uint32_t i = 0; i < c->engram_count; i++)
        show_rows(batch, i);
    eng_fetch_start(model->fetch, 0, c->engram_count, batch->count * columns);
}

/* sum of x key qk, in sixteen lanes. */
static float gate_dot(const float *x, const float *key, const float *qk, uint32_t count)
{
    float lanes[16] = {0};
    for (uint32_t i = 0; i < count; i += 16)
        for (uint32_t l = 0; l < 16; l++)
            lanes[l] += x[i + l] * key[i + l] * qk[i + l];
    return cpu_lanes_sum(lanes);
}

static float gate_of(float dot)
{
    const float root = sqrtf(fmaxf(fabsf(dot), 1e-6f));
    return 1.0f / (1.0f + eng_exp(-copysignf(root, dot)));
}

/* kv: a key per stream, then the value. */
static void add_gated(const struct cpu_batch *batch, const float *qk, const float *kv,
                      float *streams)
{
    const uint32_t hidden = batch->config->hidden;
    const float eps = batch->config->rms_eps;
    const float *value = kv + (size_t)ENG_STREAMS * hidden;

    for (uint32_t s = 0; s < ENG_STREAMS; s++) {
        float *x = streams + (size_t)s * hidden;
        const float *key = kv + (size_t)s * hidden;
        const float scale = batch->kernels->rms_inverse(x, hidden, eps) *
                            batch->kernels->rms_inverse(key, hidden, eps) / sqrtf((float)hidden);
        const float gate = gate_of(gate_dot(x, key, qk + (size_t)s * hidden, hidden) * scale);
        for (uint32_t i = 0; i < hidden; i++)
            x[i] = x[i] + gate * value[i];
        batch->kernels->round(x, hidden);
    }
}

struct part {
    uint32_t index;
    const uint8_t *table_rows;
};

static void look_up(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                    struct cpu_thread *thread)
{
    const struct part *part = arg;
    const struct eng_config *c = batch->config;
    const uint32_t columns = eng_config_engram_columns(c), width = columns * c->engram_dim;
    const uint32_t bytes = eng_engram_row_bytes(&batch->model->weights.engram[part->index].table);
    const struct eng_pack_args packing =
        cpu_packing(batch, batch->engram_x, width, batch->count, width, true, batch->packed_engram);

    for (uint32_t i = first * columns; i < last * columns; i++)
        eng_window_row_decode(part->table_rows + (size_t)i * bytes, c->engram_dim,
                              batch->engram_x + (size_t)i * c->engram_dim);
    cpu_pack_rows(batch, &packing, first, last);
}

static void add_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                     struct cpu_thread *thread)
{
    const struct part *part = arg;
    const struct eng_config *c = batch->config;
    const float *qk = batch->model->weights.engram[part->index].qk;

    for (uint32_t t = first; t < last; t++)
        if (eng_run_id(batch->rows[t].session, batch->rows[t].position) != c->image_id)
            add_gated(batch, qk, batch->engram_kv + (size_t)t * (ENG_STREAMS + 1) * c->hidden,
                      batch->streams + (size_t)t * ENG_STREAMS * c->hidden);
}

void cpu_engram(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    struct cpu_products products = {.count = 0};
    struct part part = {0};

    while (part.index < c->engram_count && c->engram_layers[part.index] != layer)
        part.index++;
    if (part.index == c->engram_count) return;
    part.table_rows = eng_fetch_wait(batch->model->fetch, part.index);
    cpu_each(batch, batch->count, ENG_PACK_ROWS, look_up, &part);
    cpu_product(batch, &products, &batch->model->weights.engram[part.index].wkv,
                batch->packed_engram, batch->count, batch->engram_kv, true);
    cpu_products_run(batch, &products);
    cpu_each(batch, batch->count, ENG_PACK_ROWS, add_rows, &part);
    batch->is_packed = false;
}
