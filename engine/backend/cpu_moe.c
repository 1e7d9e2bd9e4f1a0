/*
 * Mixture of experts (the model's specification, section 2.7).
 *
 * Rows of a pass are gathered by expert so that each expert's weights are read once; a row's sum
 * still runs over its experts in ascending number, the shared expert last, so who else is in the
 * pass does not show.
 */

#include "engine/backend/cpu.h"
#include "kvstore/base/bytes.h"

#include <math.h>
#include <string.h>

static float sqrt_softplus(float x)
{
    const double v = (double)x;
    const double softplus = v > 0 ? v + log1p(exp(-v)) : log1p(exp(v));
    return sqrtf((float)softplus);
}

/* The experts of one token, ascending, with their weights. */
static void route(const struct eng_config *c, uint32_t layer, const float *bias, float *scores,
                  uint32_t *chosen, float *weights)
{
    const uint32_t experts = cpu_experts(c, layer), active = cpu_experts_active(c, layer);
    float sum = 0;
    bool taken[1024] = {false};

    for (uint32_t e = 0; e < experts; e++)
        scores[e] = sqrt_softplus(scores[e]);
    for (uint32_t n = 0; n < active; n++) {
        uint32_t best = experts;
        for (uint32_t e = 0; e < experts; e++)
            if (!taken[e] && (best == experts || scores[e] + bias[e] > scores[best] + bias[best]))
                best = e;
        taken[best] = true;
    }
    uint32_t count = 0;
    for (uint32_t e = 0; e < experts; e++)
        if (taken[e]) {
            chosen[count] = e;
            weights[count++] = scores[e];
            sum += scores[e];
        }
    for (uint32_t n = 0; n < count; n++) {
        if (active > 1) weights[n] /= sum + 1e-20f;
        weights[n] *= c->route_scale;
    }
}

/* Slots by expert; within one, rows ascend.  Each expert's packed slots begin a block. */
static void sort_by_expert(struct cpu_batch *batch, uint32_t layer)
{
    const uint32_t experts = cpu_experts(batch->config, layer);
    const uint32_t active = cpu_experts_active(batch->config, layer);
    const uint32_t slots = batch->count * active;
    uint32_t *first = batch->expert_first, *block = batch->expert_block;

    memset(first, 0, (experts + 2) * sizeof(*first));
    for (uint32_t i = 0; i < slots; i++)
        first[batch->chosen[i] + 2]++;
    for (uint32_t e = 0; e < experts; e++)
        first[e + 2] += first[e + 1];
    for (uint32_t i = 0; i < slots; i++) {
        const uint32_t slot = first[batch->chosen[i] + 1]++;
        batch->slot_of[i] = slot;
        batch->slot_row[slot] = i / active;
        batch->slot_weight[slot] = batch->chosen_weight[i];
    }
    block[0] = 0;
    for (uint32_t e = 0; e < experts; e++)
        block[e + 1] = block[e] + eng_pack_blocks(first[e + 1] - first[e]);
    for (uint32_t t = 0; t < batch->count; t++)
        batch->slot_weight[slots + t] = 1.0f;
}

static void route_rows(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                       struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t layer = *(const uint32_t *)arg;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t active = cpu_experts_active(c, layer);

    for (uint32_t t = first; t < last; t++) {
        const bool image = batch->draft_ids == NULL && cpu_row_id(batch, t) == c->image_id;
        route(c, layer, image ? weights->gate_bias_vl : weights->gate_bias,
              batch->gate + (size_t)t * cpu_experts(c, layer), batch->chosen + (size_t)t * active,
              batch->chosen_weight + (size_t)t * active);
    }
}

static void choose_experts(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_probe *probe = batch->owner->probe;
    const uint32_t active = cpu_experts_active(c, layer);

    cpu_each(batch, batch->count, ENG_PACK_ROWS, route_rows, &layer);
    for (uint32_t i = 0; probe != NULL && probe->experts != NULL && i < batch->span_count; i++) {
        const struct cpu_span *span = &batch->spans[i];
        const struct eng_probe_rows rows = cpu_probe_rows(span, layer);
        const size_t at = (size_t)span->row * active;
        probe->experts(probe->context, &rows, batch->chosen + at, batch->chosen_weight + at);
    }
}

/* The shared expert is the last, and its slots are the rows. */
static uint32_t expert_rows(const struct cpu_batch *batch, uint32_t experts, uint32_t e)
{
    return e == experts ? batch->count : batch->expert_first[e + 1] - batch->expert_first[e];
}

static void *packed_of(const struct cpu_batch *batch, uint8_t *packed, uint32_t e, uint32_t k)
{
    return packed +
           eng_compute_packed_bytes(batch->compute, batch->expert_block[e] * ENG_PACK_ROWS, k);
}

static struct eng_gemm_args expert_product(const struct cpu_batch *batch,
                                           const struct eng_matrix *matrix, const void *packed,
                                           uint32_t experts, uint32_t e, float *y)
{
    return (struct eng_gemm_args){.matrix = matrix,
                                  .packed = packed,
                                  .rows = expert_rows(batch, experts, e),
                                  .y = y + (size_t)batch->expert_first[e] * matrix->n,
                                  .y_stride = matrix->n,
                                  .round_bf16 = !batch->owner->quant_off};
}

/* Inputs of all routed experts, gathered, then gate and up of all experts. */
static void widen(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t experts = cpu_experts(c, layer);
    uint32_t packs = 0, gemms = 0;

    for (uint32_t e = 0; e <= experts; e++) {
        const struct eng_expert *expert = e < experts ? &weights->experts[e] : &weights->shared;
        const void *packed =
            e < experts ? packed_of(batch, batch->packed_slots, e, c->hidden) : batch->packed_xq;
        if (expert_rows(batch, experts, e) == 0) continue;
        if (e < experts) {
            struct eng_pack_args *pack = &batch->expert_packs[packs++];
            *pack =
                cpu_packing(batch, batch->x, c->hidden, expert_rows(batch, experts, e), c->hidden,
                            true, packed_of(batch, batch->packed_slots, e, c->hidden));
            pack->index = batch->slot_row + batch->expert_first[e];
        }
        batch->expert_gemms[gemms++] =
            expert_product(batch, &expert->w1, packed, experts, e, batch->slot_a);
        batch->expert_gemms[gemms++] =
            expert_product(batch, &expert->w3, packed, experts, e, batch->slot_b);
    }
    eng_compute_pack(batch->compute, batch->expert_packs, packs);
    eng_compute_gemm(batch->compute, batch->expert_gemms, gemms);
}

/* h of the slots in a block of packed slots; the blocks of the shared expert are the last. */
static void gate_blocks(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                        struct cpu_thread *thread)
{
    const struct eng_config *c = batch->config;
    const uint32_t width = c->moe_width;
    const uint32_t experts = cpu_experts(c, *(const uint32_t *)arg);
    uint32_t e = 0;

    for (uint32_t block = first; block < last; block++) {
        while (e < experts && block >= batch->expert_block[e + 1])
            e++;
        const uint32_t from = (block - batch->expert_block[e]) * ENG_PACK_ROWS;
        const uint32_t to = KV_MIN(from + ENG_PACK_ROWS, expert_rows(batch, experts, e));
        float *h = batch->slot_a + (size_t)batch->expert_first[e] * width;
        const float *up = batch->slot_b + (size_t)batch->expert_first[e] * width;
        for (uint32_t n = from; n < to; n++)
            batch->kernels->gate(h + (size_t)n * width, up + (size_t)n * width, width,
                                 c->swiglu_limit, batch->slot_weight[batch->expert_first[e] + n],
                                 h + (size_t)n * width);
        const struct eng_pack_args packing = cpu_packing(
            batch, h, width, to, width, true, packed_of(batch, batch->packed_h, e, width));
        cpu_pack_rows(batch, &packing, from, to);
    }
}

static void narrow(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_config *c = batch->config;
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t experts = cpu_experts(c, layer);
    uint32_t gemms = 0;

    for (uint32_t e = 0; e <= experts; e++) {
        const struct eng_expert *expert = e < experts ? &weights->experts[e] : &weights->shared;
        if (expert_rows(batch, experts, e) == 0) continue;
        batch->expert_gemms[gemms++] =
            expert_product(batch, &expert->w2, packed_of(batch, batch->packed_h, e, c->moe_width),
                           experts, e, batch->slot_y);
    }
    eng_compute_gemm(batch->compute, batch->expert_gemms, gemms);
}

void cpu_moe(struct cpu_batch *batch, uint32_t layer)
{
    const struct eng_layer *weights = &batch->model->weights.layers[layer];
    const uint32_t experts = cpu_experts(batch->config, layer);
    struct cpu_products products = {.count = 0};

    cpu_product(batch, &products, &weights->gate, batch->packed_x, batch->count, batch->gate,
                false);
    cpu_products_run(batch, &products);
    choose_experts(batch, layer);
    sort_by_expert(batch, layer);
    batch->slots_each = cpu_experts_active(batch->config, layer);
    widen(batch, layer);
    cpu_each(batch, batch->expert_block[experts] + eng_pack_blocks(batch->count), 1, gate_blocks,
             &layer);
    narrow(batch, layer);
}

void cpu_moe_sum(const struct cpu_batch *batch, uint32_t t, float *sum)
{
    const uint32_t hidden = batch->config->hidden, active = batch->slots_each;

    memset(sum, 0, hidden * sizeof(*sum));
    for (uint32_t n = 0; n <= active; n++) {
        const uint32_t slot =
            n < active ? batch->slot_of[t * active + n] : batch->count * active + t;
        const float *y = batch->slot_y + (size_t)slot * hidden;
        for (uint32_t i = 0; i < hidden; i++)
            sum[i] += y[i];
    }
    batch->kernels->round(sum, hidden);
}
