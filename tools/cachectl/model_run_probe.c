/*
 * Takes what the engine shows of its layers into the tensors of the dump.
 *
 * The engine holds bf16 values in floats, so the upper half of each is all of it, unless --quant
 * off leaves them unrounded.  Lists shorter than their tensor are filled up with -1.  Called from
 * the thread that runs the pass.
 */

#include "tools/cachectl/model_run_tensors.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

static void take_bf16(const float *values, size_t count, uint16_t *to)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof(bits));
        assert((bits & 0xffffu) == 0);
        to[i] = (uint16_t)(bits >> 16);
    }
}

static void take_list(const uint32_t *values, uint32_t count, uint32_t width, int32_t *to)
{
    for (uint32_t i = 0; i < width; i++)
        to[i] = i < count ? (int32_t)values[i] : -1;
}

static void after_layer(void *context, const struct eng_probe_rows *rows, const float *streams,
                        const float *premix)
{
    const struct run_tensors *tensors = context;
    const size_t width = (size_t)ENG_STREAMS * tensors->config->hidden;
    for (uint32_t i = 0; i < rows->count; i++) {
        const uint32_t position = rows->first + i;
        void *stream = run_tensors_row(tensors, RUN_STREAM, rows->layer, position);
        void *mix = run_tensors_row(tensors, RUN_PREMIX, rows->layer, position);
        if (stream != NULL && tensors->quant_off)
            memcpy(stream, streams + i * width, width * sizeof(float));
        else if (stream != NULL)
            take_bf16(streams + i * width, width, stream);
        if (mix != NULL) memcpy(mix, premix + (size_t)i * ENG_STREAMS, ENG_STREAMS * sizeof(float));
    }
}

static void window_row(void *context, const struct eng_probe_rows *rows, const uint8_t *row)
{
    const struct run_tensors *tensors = context;
    void *to = run_tensors_row(tensors, RUN_WINDOW, rows->layer, rows->first);
    if (to != NULL) memcpy(to, row, tensors->layout->window_row_bytes);
}

static void take_lists(const struct run_tensors *tensors, enum run_kind kind,
                       const struct eng_probe_rows *rows, const uint32_t *lists,
                       const uint32_t *counts, uint32_t width)
{
    for (uint32_t i = 0; i < rows->count; i++) {
        const uint32_t layer = kind == RUN_CANDIDATES ? 0 : rows->layer;
        void *to = run_tensors_row(tensors, kind, layer, rows->first + i);
        if (to == NULL) continue;
        take_list(lists + (size_t)i * width, counts != NULL ? counts[i] : width, width, to);
    }
}

static void candidates(void *context, const struct eng_probe_rows *rows, uint32_t *blocks,
                       uint32_t *counts)
{
    const struct run_tensors *tensors = context;
    take_lists(tensors, RUN_CANDIDATES, rows, blocks, counts, tensors->config->candidate_blocks);
}

static void topk(void *context, const struct eng_probe_rows *rows, uint32_t *list, uint32_t *counts)
{
    const struct run_tensors *tensors = context;
    take_lists(tensors, RUN_TOPK, rows, list, counts, tensors->config->index_topk);
}

static void experts(void *context, const struct eng_probe_rows *rows, uint32_t *chosen,
                    float *weights)
{
    const struct run_tensors *tensors = context;
    const uint32_t active = tensors->config->experts_active;
    if (rows->layer >= tensors->config->layers) return;
    take_lists(tensors, RUN_EXPERTS, rows, chosen, NULL, active);
    for (uint32_t i = 0; i < rows->count; i++) {
        void *to = run_tensors_row(tensors, RUN_WEIGHTS, rows->layer, rows->first + i);
        if (to != NULL) memcpy(to, weights + (size_t)i * active, active * sizeof(float));
    }
}

static void engram(void *context, const struct eng_probe_rows *rows, const uint64_t *table_rows,
                   uint32_t columns)
{
    const struct run_tensors *tensors = context;
    for (uint32_t i = 0; i < rows->count; i++) {
        void *to = run_tensors_row(tensors, RUN_ENGRAM, rows->layer, rows->first + i);
        if (to != NULL) memcpy(to, table_rows + (size_t)i * columns, columns * sizeof(*table_rows));
    }
}

static void logits(void *context, const struct eng_probe_rows *rows, const float *values)
{
    const struct run_tensors *tensors = context;
    const size_t vocab = tensors->config->vocab;
    for (uint32_t i = 0; i < rows->count; i++) {
        void *to = run_tensors_row(tensors, RUN_LOGITS, 0, rows->first + i);
        if (to != NULL) memcpy(to, values + i * vocab, vocab * sizeof(float));
    }
}

/* Draft i stands behind the token that follows the last. */
static void draft(void *context, const struct eng_probe_rows *rows, const uint32_t *tokens,
                  const float *values, const float *confidence)
{
    const struct run_tensors *tensors = context;
    const size_t at = rows->first - (tensors->to + 1), vocab = tensors->config->vocab;
    assert(at + rows->count <= tensors->config->draft_block);
    take_list(tokens, rows->count, rows->count,
              (int32_t *)model_dump_data(&tensors->dump, tensors->draft) + at);
    memcpy((float *)model_dump_data(&tensors->dump, tensors->draft_logits) + at * vocab, values,
           rows->count * vocab * sizeof(float));
    memcpy((float *)model_dump_data(&tensors->dump, tensors->draft_confidence) + at, confidence,
           rows->count * sizeof(float));
}

void run_tensors_probe(struct run_tensors *tensors, struct eng_probe *ret_probe)
{
    *ret_probe = (struct eng_probe){
        .context = tensors,
        .all_logits = true,
        .after_layer = after_layer,
        .window_row = window_row,
        .candidates = candidates,
        .topk = topk,
        .experts = experts,
        .engram = engram,
        .logits = logits,
        .draft = draft,
    };
}
