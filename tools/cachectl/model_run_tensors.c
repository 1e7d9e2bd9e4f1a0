/*
 * Names and shapes of what `cachectl model run` writes; `--help` lists the same names.
 *
 * The positions a tensor covers follow from its layer: all computed ones in the encoder, those the
 * decoder ran over in the rest.  So shapes are known before the run.
 */

#include "tools/cachectl/model_run_tensors.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* Tensors without a layer stand at 0 of their kind, and belong to the decoder. */
static const struct {
    const char *name, *suffix;
    bool has_layer;
} kinds[RUN_KIND_COUNT] = {
    [RUN_STREAM] = {"stream", "", true},   [RUN_PREMIX] = {"premix", "", true},
    [RUN_WINDOW] = {"win", "", true},      [RUN_TOPK] = {"topk", "", true},
    [RUN_EXPERTS] = {"experts", "", true}, [RUN_WEIGHTS] = {"experts", ".weight", true},
    [RUN_ENGRAM] = {"engram", "", true},   [RUN_CANDIDATES] = {"candidates", "", false},
    [RUN_LOGITS] = {"logits", "", false},
};

static uint32_t first_of(const struct run_tensors *tensors, enum run_kind kind, uint32_t layer)
{
    const bool encoder = kinds[kind].has_layer && layer < tensors->config->encoder_layers;
    return encoder ? tensors->first : tensors->decoder_first;
}

/* [positions, width] or, with a depth, [positions, width, depth]. */
static void add_rows(struct run_tensors *tensors, enum run_kind kind, uint32_t layer,
                     enum model_dump_type type, uint64_t width, uint64_t depth)
{
    const uint64_t count = tensors->to - first_of(tensors, kind, layer);
    char name[40], number[16] = "";

    if (kinds[kind].has_layer) (void)snprintf(number, sizeof(number), ".%u", layer);
    (void)snprintf(name, sizeof(name), "%s%s%s", kinds[kind].name, number, kinds[kind].suffix);
    tensors->rows[kind][layer] = 1 + model_dump_add(&tensors->dump, name, type, depth > 0 ? 3 : 2,
                                                    (const uint64_t[]){count, width, depth});
    (void)snprintf(name, sizeof(name), "%s%s%s.pos", kinds[kind].name, number, kinds[kind].suffix);
    (void)model_dump_add(&tensors->dump, name, DUMP_I32, 1, &count);
}

static void add_layer(struct run_tensors *tensors, uint32_t layer)
{
    const struct eng_config *c = tensors->config;
    add_rows(tensors, RUN_STREAM, layer, tensors->quant_off ? DUMP_F32 : DUMP_BF16, ENG_STREAMS,
             c->hidden);
    add_rows(tensors, RUN_PREMIX, layer, DUMP_F32, ENG_STREAMS, 0);
    add_rows(tensors, RUN_EXPERTS, layer, DUMP_I32, c->experts_active, 0);
    add_rows(tensors, RUN_WEIGHTS, layer, DUMP_F32, c->experts_active, 0);
    if (eng_config_owns_list(c, layer))
        add_rows(tensors, RUN_TOPK, layer, DUMP_I32, c->index_topk, 0);
}

static size_t add(struct run_tensors *tensors, const char *name, enum model_dump_type type,
                  uint64_t rows, uint64_t columns)
{
    return model_dump_add(&tensors->dump, name, type, columns > 0 ? 2 : 1,
                          (const uint64_t[]){rows, columns});
}

static void add_windows(struct run_tensors *tensors, uint32_t layers)
{
    for (uint32_t layer = 0; layer < layers; layer++)
        if (tensors->quant_off)
            add_rows(tensors, RUN_WINDOW, layer, DUMP_F32, tensors->config->head_dim, 0);
        else
            add_rows(tensors, RUN_WINDOW, layer, DUMP_U8, tensors->layout->window_row_bytes, 0);
}

static void add_sources(struct run_tensors *tensors)
{
    const struct eng_config *c = tensors->config;
    char name[24];

    for (uint32_t s = 0; s < c->source_count; s++) {
        const struct kv_source *source = &tensors->layout->sources[s];
        const enum model_dump_type type = tensors->quant_off ? DUMP_F32 : DUMP_U8;
        const uint64_t entries = tensors->to / source->ratio;
        (void)snprintf(name, sizeof(name), "rows.%u", source->layer);
        tensors->main_rows[s] = add(tensors, name, type, entries,
                                    tensors->quant_off ? c->head_dim : source->main_bytes);
        (void)snprintf(name, sizeof(name), "keys.%u", source->layer);
        tensors->keys[s] = add(tensors, name, type, entries,
                               tensors->quant_off ? c->index_dim : source->index_bytes);
    }
}

void run_tensors_init(struct run_tensors *tensors, const struct eng_config *config,
                      const struct kv_layout *layout, bool quant_off, uint32_t first,
                      uint32_t decoder_first, uint32_t to)
{
    assert(first <= decoder_first && decoder_first < to);
    *tensors = (struct run_tensors){
        .config = config,
        .layout = layout,
        .quant_off = quant_off,
        .first = first,
        .decoder_first = decoder_first,
        .to = to,
    };
    model_dump_init(&tensors->dump);
    tensors->tokens = add(tensors, "tokens", DUMP_I32, to, 0);
    for (uint32_t layer = 0; layer < config->layers; layer++)
        add_layer(tensors, layer);
    add_windows(tensors, config->layers + config->draft_stages);
    add_sources(tensors);
    add_rows(tensors, RUN_CANDIDATES, 0, DUMP_I32, config->candidate_blocks, 0);
    add_rows(tensors, RUN_LOGITS, 0, DUMP_F32, config->vocab, 0);
    for (uint32_t i = 0; i < config->engram_count; i++)
        add_rows(tensors, RUN_ENGRAM, config->engram_layers[i], DUMP_I64,
                 eng_config_engram_columns(config), 0);
    if (config->draft_stages == 0) return;
    tensors->draft = add(tensors, "draft", DUMP_I32, config->draft_block, 0);
    tensors->draft_token = add(tensors, "draft.token", DUMP_I32, 1, 0);
    tensors->draft_logits =
        add(tensors, "draft.logits", DUMP_F32, config->draft_block, config->vocab);
    tensors->draft_confidence = add(tensors, "draft.confidence", DUMP_F32, config->draft_block, 0);
}

void run_tensors_fill_positions(struct run_tensors *tensors)
{
    for (uint32_t kind = 0; kind < RUN_KIND_COUNT; kind++)
        for (uint32_t layer = 0; layer < RUN_LAYERS_MAX; layer++) {
            const size_t tensor = tensors->rows[kind][layer];
            if (tensor == 0) continue;
            const uint32_t first = first_of(tensors, kind, layer);
            int32_t *positions = model_dump_data(&tensors->dump, tensor);
            for (uint32_t p = first; p < tensors->to; p++)
                positions[p - first] = (int32_t)p;
        }
}

void *run_tensors_row(const struct run_tensors *tensors, enum run_kind kind, uint32_t layer,
                      uint32_t position)
{
    const size_t tensor = tensors->rows[kind][layer];
    const uint32_t first = first_of(tensors, kind, layer);
    if (tensor == 0 || position < first) return NULL;
    assert(position < tensors->to);
    return (uint8_t *)model_dump_data(&tensors->dump, tensor - 1) +
           (position - first) * model_dump_row_bytes(&tensors->dump, tensor - 1);
}
