/*
 * The indexer (the model's specification, sections 2.5 and 2.6): which rows a query attends to.
 *
 * Scores stay fp32 from the dot to the sum over heads; larger wins, then the smaller index.  Keys
 * are decoded in tiles, each once for the rows of a session, and offered in ascending index to a
 * heap per row, so memory does not grow with the context.  The products of FP4 values are exact, so
 * a score does not depend on how keys were grouped.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

void cpu_top_reset(struct cpu_top *top, uint32_t max)
{
    top->count = 0;
    top->max = max;
}

static bool is_worse(const struct cpu_top *top, uint32_t a, uint32_t b)
{
    if (top->scores[a] != top->scores[b]) return top->scores[a] < top->scores[b];
    return top->indices[a] > top->indices[b];
}

static void swap(struct cpu_top *top, uint32_t a, uint32_t b)
{
    const float score = top->scores[a];
    const uint32_t index = top->indices[a];
    top->scores[a] = top->scores[b];
    top->indices[a] = top->indices[b];
    top->scores[b] = score;
    top->indices[b] = index;
}

void cpu_top_insert(struct cpu_top *top, float score, uint32_t index)
{
    if (top->count < top->max) {
        uint32_t at = top->count++;
        top->scores[at] = score;
        top->indices[at] = index;
        while (at > 0 && is_worse(top, at, (at - 1) / 2)) {
            swap(top, at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        return;
    }
    top->scores[0] = score;
    top->indices[0] = index;
    for (uint32_t at = 0;;) {
        uint32_t child = 2 * at + 1;
        if (child >= top->count) return;
        if (child + 1 < top->count && is_worse(top, child + 1, child)) child++;
        if (!is_worse(top, child, at)) return;
        swap(top, at, child);
        at = child;
    }
}

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static uint32_t take_sorted(const struct cpu_top *top, uint32_t *list)
{
    memcpy(list, top->indices, top->count * sizeof(*list));
    qsort(list, top->count, sizeof(*list), ascending);
    return top->count;
}

/* Entries a query at `position` may see. */
static uint32_t visible(const struct cpu_batch *batch, uint32_t layer, uint32_t position)
{
    return (position + 1) / batch->config->ratio[layer];
}

const uint8_t *cpu_entry_row(const struct eng_session *session, uint32_t source, uint32_t entry,
                             bool main)
{
    const uint32_t position = entry * session->model->layout.sources[source].ratio;
    return main ? eng_main_row(session, source, position)
                : eng_index_row(session, source, position);
}

/* Slots beyond `keys` repeat the last one; nobody reads their scores. */
static void pack_keys(struct cpu_batch *batch, const uint8_t **rows, uint32_t keys)
{
    const uint32_t dim = batch->config->index_dim;
    for (uint32_t k = keys; k < eng_pad_lanes(keys); k++)
        rows[k] = rows[keys - 1];
    for (uint32_t k = 0; k < keys; k += ENG_LANES)
        cpu_key_unpack(batch, rows + k, batch->tile + (size_t)k * dim);
}

/* Scores of `keys` packed keys for tokens [t, t + tokens): row t of tile_score, first head. */
static void score_tile(struct cpu_batch *batch, uint32_t t, uint32_t tokens, uint32_t keys)
{
    const struct eng_config *c = batch->config;
    const size_t stride = (size_t)c->index_heads * CPU_TILE;

    batch->kernels->matmul(&(struct eng_matmul_args){
        .packed = batch->tile,
        .n = keys,
        .k = c->index_dim,
        .x = batch->iq + (size_t)t * c->index_heads * c->index_dim,
        .x_stride = c->index_dim,
        .y = batch->tile_score + t * stride,
        .y_stride = CPU_TILE,
        .count = tokens * c->index_heads,
    });
    for (uint32_t n = t; n < t + tokens; n++) {
        float *score = batch->tile_score + n * stride;
        const float *w = batch->iw + (size_t)n * eng_pad_lanes(c->index_heads);
        for (uint32_t k = 0; k < keys; k++)
            score[k] = w[0] * (score[k] > 0 ? score[k] : 0);
        for (uint32_t h = 1; h < c->index_heads; h++) {
            const float *dot = score + (size_t)h * CPU_TILE;
            for (uint32_t k = 0; k < keys; k++)
                score[k] += w[h] * (dot[k] > 0 ? dot[k] : 0);
        }
    }
}

static void offer_blocks(struct cpu_batch *batch, uint32_t t, uint32_t first, uint32_t end,
                         uint32_t seen, const float *score)
{
    const uint32_t size = batch->config->candidate_block;
    for (uint32_t begin = first; begin < end; begin += size) {
        float best = score[begin - first];
        for (uint32_t j = begin + 1; j < end && j < begin + size; j++)
            best = score[j - first] > best ? score[j - first] : best;
        /* The block of the newest visible entry is always in. */
        if (begin / size == (seen - 1) / size) best = INFINITY;
        cpu_top_offer(&batch->top_blocks[t], best, begin / size);
    }
}

/* Full layers: every visible entry of the layer's own source. */
static void select_from_all(struct cpu_batch *batch, const struct cpu_span *span, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const uint32_t source = c->rows_source[layer];
    const bool candidates = layer == c->encoder_layers;
    const uint32_t end = visible(batch, layer, span->first + span->count - 1);
    const uint8_t *rows[CPU_TILE];

    for (uint32_t t = span->row; t < span->row + span->count; t++) {
        cpu_top_reset(&batch->top[t], c->index_topk);
        cpu_top_reset(&batch->top_blocks[t], c->candidate_blocks);
    }
    for (uint32_t first = 0; first < end; first += CPU_TILE) {
        const uint32_t keys = KV_MIN(end - first, CPU_TILE);
        for (uint32_t k = 0; k < keys; k++)
            rows[k] = cpu_entry_row(span->session, source, first + k, false);
        pack_keys(batch, rows, keys);
        score_tile(batch, span->row, span->count, keys);
        for (uint32_t t = span->row; t < span->row + span->count; t++) {
            const uint32_t seen = visible(batch, layer, batch->rows[t].position);
            const float *score = batch->tile_score + (size_t)t * c->index_heads * CPU_TILE;
            if (seen <= first) continue;
            const uint32_t count = KV_MIN(seen - first, keys);
            for (uint32_t k = 0; k < count; k++)
                cpu_top_offer(&batch->top[t], score[k], first + k);
            if (candidates) offer_blocks(batch, t, first, first + count, seen, score);
        }
    }
    for (uint32_t t = span->row; candidates && t < span->row + span->count; t++)
        batch->block_count[t] =
            take_sorted(&batch->top_blocks[t], batch->blocks + (size_t)t * c->candidate_blocks);
}

/* Reindex layers: only entries of the candidate blocks, which differ from token to token. */
static void select_from_candidates(struct cpu_batch *batch, uint32_t layer, uint32_t t)
{
    const struct eng_config *c = batch->config;
    const struct cpu_row *row = &batch->rows[t];
    const uint32_t source = c->rows_source[layer];
    const uint32_t seen = visible(batch, layer, row->position);
    const uint32_t *blocks = batch->blocks + (size_t)t * c->candidate_blocks;
    const float *score = batch->tile_score + (size_t)t * c->index_heads * CPU_TILE;
    uint32_t entries[CPU_TILE];
    const uint8_t *rows[CPU_TILE];
    uint32_t keys = 0;

    cpu_top_reset(&batch->top[t], c->index_topk);
    for (uint32_t b = 0; b < batch->block_count[t]; b++) {
        for (uint32_t i = 0; i < c->candidate_block; i++) {
            const uint32_t entry = blocks[b] * c->candidate_block + i;
            if (entry >= seen) break;
            rows[keys] = cpu_entry_row(row->session, source, entry, false);
            entries[keys++] = entry;
        }
        if (b + 1 < batch->block_count[t] && keys + c->candidate_block <= CPU_TILE) continue;
        pack_keys(batch, rows, keys);
        score_tile(batch, t, 1, keys);
        for (uint32_t k = 0; k < keys; k++)
            cpu_top_offer(&batch->top[t], score[k], entries[k]);
        keys = 0;
    }
}

static void make_queries(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t dim = c->index_dim;
    const uint32_t padded = eng_pad_lanes(c->index_heads);
    const float scale = (1.0f / sqrtf((float)dim)) * (1.0f / sqrtf((float)c->index_heads));

    cpu_linear(batch, &weights->ix_wq_b, batch->qrq, c->q_lora, batch->count, batch->iq,
               (size_t)c->index_heads * dim, true);
    cpu_linear(batch, &weights->ix_proj, batch->x, c->hidden, batch->count, batch->iw, padded,
               true);
    for (uint32_t t = 0; t < batch->count; t++) {
        const float *rope = batch->rope_yarn + (size_t)t * c->rope_dim;
        for (uint32_t h = 0; h < c->index_heads; h++) {
            float *q = batch->iq + ((size_t)t * c->index_heads + h) * dim;
            cpu_rotate(batch, rope, q, dim, false);
            cpu_key_round(batch, q);
            batch->iw[(size_t)t * padded + h] *= scale;
        }
    }
}

static void show_lists(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_probe *probe = batch->owner->probe;
    for (uint32_t i = 0; probe != NULL && i < batch->span_count; i++) {
        const struct cpu_span *span = &batch->spans[i];
        const struct eng_probe_rows rows = cpu_probe_rows(span, layer);
        if (layer == batch->config->encoder_layers && probe->candidates != NULL)
            probe->candidates(probe->context, &rows,
                              batch->blocks + (size_t)span->row * batch->config->candidate_blocks,
                              batch->block_count + span->row);
        if (probe->topk != NULL)
            probe->topk(probe->context, &rows,
                        batch->list + (size_t)span->row * batch->config->index_topk,
                        batch->list_count + span->row);
    }
}

void cpu_publish_list(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;

    make_queries(batch, layer);
    if (eng_config_owns_rows(c, layer))
        for (uint32_t i = 0; i < batch->span_count; i++)
            select_from_all(batch, &batch->spans[i], layer);
    else
        for (uint32_t t = 0; t < batch->count; t++)
            select_from_candidates(batch, layer, t);
    for (uint32_t t = 0; t < batch->count; t++)
        batch->list_count[t] = take_sorted(&batch->top[t], batch->list + (size_t)t * c->index_topk);
    show_lists(batch, layer);
}
