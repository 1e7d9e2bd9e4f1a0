/*
 * The indexer (the model's specification, sections 2.5 and 2.6): which rows a query attends to.
 *
 * Scores stay fp32 from the dot to the sum over heads; larger wins, then the smaller index.  Up
 * to CPU_TILE_ROWS rows of a session meet a tile of keys together, which are offered in ascending
 * index to each row's best, so memory does not grow with the context.  A score depends on its query
 * and key alone, not on how keys were grouped.
 */

#include "engine/backend/cpu.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <math.h>

void cpu_top_reset(struct cpu_top *top, uint32_t max)
{
    assert(max < top->room);
    top->count = 0;
    top->max = max;
    top->is_full = false;
}

/* The value at `rank` of `values` in descending order; they change places. */
static float find_rank(float *values, uint32_t count, uint32_t rank)
{
    uint32_t low = 0, high = count - 1;

    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        uint32_t i = low, j = high;
        for (;;) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i >= j) break;
            const float value = values[i];
            values[i++] = values[j];
            values[j--] = value;
        }
        /* [low, j] are not less than the pivot, [j + 1, high] not more, and j < high. */
        if (rank <= j)
            high = j;
        else
            low = j + 1;
    }
    return values[low];
}

void cpu_top_cut(struct cpu_top *top)
{
    uint32_t above = 0, kept = 0;

    if (top->count < top->max) return;
    memcpy(top->order, top->scores, top->count * sizeof(*top->order));
    top->least = find_rank(top->order, top->count, top->max - 1);
    for (uint32_t i = 0; i < top->count; i++)
        above += top->scores[i] > top->least;
    for (uint32_t i = 0, equal = top->max - above; i < top->count; i++) {
        if (top->scores[i] < top->least) continue;
        if (top->scores[i] == top->least) {
            if (equal == 0) continue;
            equal--;
        }
        top->scores[kept] = top->scores[i];
        top->indices[kept++] = top->indices[i];
    }
    top->count = kept;
    top->is_full = true;
}

uint32_t cpu_top_take(struct cpu_top *top, uint32_t *list)
{
    cpu_top_cut(top);
    memcpy(list, top->indices, top->count * sizeof(*list));
    return top->count;
}

static uint32_t take_all(uint32_t count, uint32_t *list)
{
    for (uint32_t i = 0; i < count; i++)
        list[i] = i;
    return count;
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

/* Scores of the thread's keys for `rows` rows, whose queries begin at row `from` of the tile. */
static void score_keys(const struct cpu_batch *batch, const struct cpu_tile *tile, uint32_t from,
                       uint32_t rows, uint32_t keys, struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t t = tile->row + from;
    const size_t width = (size_t)c->index_heads * c->index_dim;

    batch->compute->kernels->attend->pack_queries(batch->iq + t * width, rows, c->index_heads,
                                                  c->index_dim, thread->queries);
    batch->compute->kernels->attend->score(
        &(struct eng_score_args){
            .queries = thread->queries,
            .tokens = rows,
            .heads = c->index_heads,
            .dim = c->index_dim,
            .weights = batch->iw + (size_t)t * c->index_heads,
            .weights_stride = c->index_heads,
            .kind = cpu_row_kind(batch, ENG_ROW_INDEX),
            .keys = thread->keys,
            .key_count = keys,
            .scores = thread->scores + (size_t)from * CPU_TILE_KEYS,
            .scores_stride = CPU_TILE_KEYS,
        },
        thread->scratch);
}

static void offer_blocks(const struct cpu_batch *batch, struct cpu_top *top, uint32_t first,
                         uint32_t end, uint32_t seen, const float *score)
{
    const uint32_t size = batch->config->candidate_block;
    for (uint32_t begin = first; begin < end; begin += size) {
        float best = score[begin - first];
        for (uint32_t j = begin + 1; j < end && j < begin + size; j++)
            best = score[j - first] > best ? score[j - first] : best;
        /* The block of the newest visible entry is always in. */
        if (begin / size == (seen - 1) / size) best = INFINITY;
        cpu_top_offer(top, best, begin / size);
    }
}

/* Entries from 0 on for rows [from, to) of a tile, which see more than they may take. */
static void score_all(struct cpu_batch *batch, uint32_t layer, const struct cpu_tile *tile,
                      uint32_t from, uint32_t to, struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const struct eng_session *session = batch->spans[tile->span].session;
    const uint32_t source = c->rows_source[layer];
    const bool candidates = layer == c->encoder_layers;
    const uint32_t end = visible(batch, layer, batch->rows[tile->row + to - 1].position);
    /* Whole blocks, so that the best of each is seen at once. */
    const uint32_t step = CPU_TILE_KEYS - CPU_TILE_KEYS % c->candidate_block;

    for (uint32_t i = from; i < to; i++) {
        cpu_top_reset(&thread->top[i], c->index_topk);
        cpu_top_reset(&thread->blocks[i], c->candidate_blocks);
    }
    for (uint32_t first = 0; first < end; first += step) {
        const uint32_t keys = KV_MIN(end - first, step);
        for (uint32_t k = 0; k < keys; k++)
            thread->keys[k] = cpu_entry_row(session, source, first + k, false);
        score_keys(batch, tile, from, to - from, keys, thread);
        for (uint32_t i = from; i < to; i++) {
            const uint32_t seen = visible(batch, layer, batch->rows[tile->row + i].position);
            const float *score = thread->scores + (size_t)i * CPU_TILE_KEYS;
            if (seen <= first) continue;
            const uint32_t count = KV_MIN(seen - first, keys);
            for (uint32_t k = 0; k < count; k++)
                cpu_top_offer(&thread->top[i], score[k], first + k);
            if (candidates)
                offer_blocks(batch, &thread->blocks[i], first, first + count, seen, score);
        }
    }
}

/* Only entries of the candidate blocks, which differ from token to token. */
static void score_candidates(struct cpu_batch *batch, uint32_t layer, const struct cpu_tile *tile,
                             uint32_t i, struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t t = tile->row + i, source = c->rows_source[layer];
    const struct cpu_row *row = &batch->rows[t];
    const uint32_t seen = visible(batch, layer, row->position);
    const uint32_t *blocks = batch->blocks + (size_t)t * c->candidate_blocks;
    const float *score = thread->scores + (size_t)i * CPU_TILE_KEYS;
    uint32_t keys = 0;

    cpu_top_reset(&thread->top[i], c->index_topk);
    for (uint32_t b = 0; b < batch->block_count[t]; b++) {
        for (uint32_t n = 0; n < c->candidate_block; n++) {
            const uint32_t entry = blocks[b] * c->candidate_block + n;
            if (entry >= seen) break;
            thread->keys[keys] = cpu_entry_row(row->session, source, entry, false);
            thread->entries[keys++] = entry;
        }
        if (b + 1 < batch->block_count[t] && keys + c->candidate_block <= CPU_TILE_KEYS) continue;
        score_keys(batch, tile, i, 1, keys, thread);
        for (uint32_t k = 0; k < keys; k++)
            cpu_top_offer(&thread->top[i], score[k], thread->entries[k]);
        keys = 0;
    }
}

/* Every visible block is a candidate of row t. */
static bool takes_all_blocks(const struct cpu_batch *batch, uint32_t layer, uint32_t t)
{
    const uint32_t size = batch->config->candidate_block;
    const uint32_t seen = visible(batch, layer, batch->rows[t].position);
    return batch->block_count[t] == (seen + size - 1) / size;
}

/* Lists of the rows of a tile from the first that is not trivial on; returns that row's place.
 * What is visible is in the list, and its blocks candidates, until there is more than that. */
static uint32_t take_trivial(struct cpu_batch *batch, uint32_t layer, const struct cpu_tile *tile)
{
    const struct eng_config *c = batch->config;
    uint32_t i = 0;

    for (; i < tile->count; i++) {
        const uint32_t t = tile->row + i;
        const uint32_t seen = visible(batch, layer, batch->rows[t].position);
        if (seen > c->index_topk) break;
        if (!eng_config_owns_rows(c, layer) && !takes_all_blocks(batch, layer, t)) break;
        batch->list_count[t] = take_all(seen, batch->list + (size_t)t * c->index_topk);
        if (layer != c->encoder_layers) continue;
        const uint32_t blocks = (seen + c->candidate_block - 1) / c->candidate_block;
        assert(blocks <= c->candidate_blocks);
        batch->block_count[t] = take_all(blocks, batch->blocks + (size_t)t * c->candidate_blocks);
    }
    return i;
}

static void select_tile(struct cpu_batch *batch, uint32_t layer, const struct cpu_tile *tile,
                        struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const bool owns = eng_config_owns_rows(c, layer);
    const uint32_t begin = take_trivial(batch, layer, tile);

    for (uint32_t from = begin, to; from < tile->count; from = to) {
        to = from;
        while (to < tile->count && (owns || takes_all_blocks(batch, layer, tile->row + to)))
            to++;
        if (to > from)
            score_all(batch, layer, tile, from, to, thread);
        else
            score_candidates(batch, layer, tile, to++, thread);
    }
    for (uint32_t i = begin; i < tile->count; i++) {
        const uint32_t t = tile->row + i;
        batch->list_count[t] =
            cpu_top_take(&thread->top[i], batch->list + (size_t)t * c->index_topk);
        if (layer == c->encoder_layers)
            batch->block_count[t] =
                cpu_top_take(&thread->blocks[i], batch->blocks + (size_t)t * c->candidate_blocks);
    }
}

static void select_tiles(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                         struct cpu_thread *thread)
{
    for (uint32_t i = first; i < last; i++)
        select_tile(batch, *(const uint32_t *)arg, &batch->tiles[i], thread);
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
    cpu_each(batch, batch->tile_count, 1, select_tiles, &layer);
    batch->list_number++;
    show_lists(batch, layer);
}
