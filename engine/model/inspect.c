/*
 * Counts what a config costs (the model's specification, sections 4 and 8).
 *
 * Active parameters are those a token meets: of the routed experts the chosen share, of everything
 * else all, but for embed and the Engram tables, of which a token reads rows.  A prefill runs the
 * encoder, and of the first decoder layer what makes rows: compressor and index keys.
 */

#include "engine/model/inspect.h"

#include "kvstore/base/bytes.h"

const char *eng_part_name(enum eng_part part)
{
    static const char *const names[ENG_PART_COUNT] = {
        [ENG_PART_ATTENTION] = "attention",
        [ENG_PART_EXPERTS] = "routed experts",
        [ENG_PART_SHARED] = "shared experts",
        [ENG_PART_ROUTER] = "router",
        [ENG_PART_MIX] = "mHC",
        [ENG_PART_ENGRAM] = "engram projections",
        [ENG_PART_TABLES] = "engram rows",
        [ENG_PART_EMBED] = "embed and head",
        [ENG_PART_DRAFT] = "draft",
    };
    return names[part];
}

enum eng_part eng_part_of(const struct eng_config *config, const struct eng_tensor_spec *spec)
{
    if (spec->layer != ENG_NO_SOURCE && spec->layer >= config->layers) return ENG_PART_DRAFT;
    switch (spec->role) {
    case ENG_ROLE_EMBED:
    case ENG_ROLE_HEAD:
    case ENG_ROLE_NORM:
        return ENG_PART_EMBED;
    case ENG_ROLE_EXPERT_W1:
    case ENG_ROLE_EXPERT_W3:
    case ENG_ROLE_EXPERT_W2:
        return ENG_PART_EXPERTS;
    case ENG_ROLE_SHARED_W1:
    case ENG_ROLE_SHARED_W3:
    case ENG_ROLE_SHARED_W2:
        return ENG_PART_SHARED;
    case ENG_ROLE_GATE:
    case ENG_ROLE_GATE_BIAS:
    case ENG_ROLE_GATE_BIAS_VL:
    case ENG_ROLE_FFN_NORM:
        return ENG_PART_ROUTER;
    case ENG_ROLE_HC_FN:
    case ENG_ROLE_HC_BASE:
    case ENG_ROLE_HC_SCALE:
        return ENG_PART_MIX;
    case ENG_ROLE_ENGRAM_WKV:
    case ENG_ROLE_ENGRAM_Q:
    case ENG_ROLE_ENGRAM_K:
        return ENG_PART_ENGRAM;
    case ENG_ROLE_ENGRAM_ROWS:
        return ENG_PART_TABLES;
    default:
        return ENG_PART_ATTENTION;
    }
}

static bool makes_rows(const struct eng_tensor_spec *spec)
{
    return spec->role == ENG_ROLE_CMP_WKV || spec->role == ENG_ROLE_CMP_NORM ||
           spec->role == ENG_ROLE_IX_WK || spec->role == ENG_ROLE_IX_K_NORM ||
           spec->role == ENG_ROLE_ATTN_NORM;
}

/* Numbers of experts are summed first and divided once, so that nothing is rounded. */
struct counting {
    struct eng_inspect *inspect;
    uint64_t decode_experts, prefill_experts, draft_experts;
};

static void count_active(struct counting *counting, const struct eng_tensor_spec *spec,
                         enum eng_part part)
{
    struct eng_inspect *inspect = counting->inspect;
    const struct eng_config *config = &inspect->config;
    const uint64_t values = eng_tensor_values(spec);
    const bool expert = spec->expert != ENG_NO_SOURCE;

    if (part == ENG_PART_TABLES || spec->role == ENG_ROLE_EMBED) return;
    if (part == ENG_PART_DRAFT) {
        if (expert)
            counting->draft_experts += values;
        else if (spec->role != ENG_ROLE_MARKOV_EMBED)
            inspect->active_draft += values;
        return;
    }
    const bool in_prefill = spec->layer < config->encoder_layers ||
                            (spec->layer == config->encoder_layers && makes_rows(spec));
    if (expert) {
        counting->decode_experts += values;
        counting->prefill_experts += in_prefill ? values : 0;
    } else {
        inspect->active_decode += values;
        inspect->active_prefill += in_prefill ? values : 0;
    }
}

static bool count(void *context, const struct eng_tensor_spec *spec)
{
    struct counting *counting = context;
    struct eng_inspect *inspect = counting->inspect;
    const enum eng_part part = eng_part_of(&inspect->config, spec);

    inspect->tensors++;
    inspect->values[part] += eng_tensor_values(spec);
    inspect->bytes[part] += eng_tensor_bytes(spec);
    inspect->total_bytes += eng_tensor_bytes(spec);
    count_active(counting, spec, part);
    return true;
}

static void count_state(struct eng_inspect *inspect)
{
    const struct eng_config *config = &inspect->config;
    const struct kv_layout *layout = &inspect->layout;
    const uint64_t layers = (uint64_t)layout->encoder_layers + layout->decoder_layers;
    const uint64_t window = (uint64_t)layout->window_tokens * layout->window_row_bytes;
    const uint64_t stored = (uint64_t)layout->window_rows * layout->window_row_bytes;

    inspect->window_bytes = layers * window;
    inspect->image_window_bytes = layers * stored;
    inspect->draft_window_bytes = layout->draft_stages * window;
    inspect->image_draft_bytes = layout->draft_stages * stored;
    for (uint32_t i = 0; i < layout->source_count; i++)
        inspect->tail_bytes += layout->sources[i].tail_bytes;
    if (config->engram_count > 0)
        inspect->engram_read_bytes = (uint64_t)config->engram_count *
                                     eng_config_engram_columns(config) *
                                     (config->engram_dim + config->engram_dim / 32);
}

kv_status eng_inspect(const struct eng_config *config, struct eng_inspect *ret_inspect,
                      struct kv_error *err)
{
    struct eng_inspect inspect = {.config = *config};
    struct counting counting = {.inspect = &inspect};

    const kv_status status = eng_config_layout(config, ENG_INSPECT_SPARE, &inspect.layout, err);
    if (status != KV_OK) return status;
    (void)eng_tensors_each(config, count, &counting);
    inspect.active_decode += counting.decode_experts / config->experts * config->experts_active;
    inspect.active_prefill += counting.prefill_experts / config->experts * config->experts_active;
    if (config->draft_stages > 0)
        inspect.active_draft +=
            counting.draft_experts / config->draft_experts * config->draft_active;
    for (int part = 0; part < ENG_PART_COUNT; part++)
        if (part != ENG_PART_ENGRAM && part != ENG_PART_TABLES && part != ENG_PART_DRAFT)
            inspect.backbone += inspect.values[part];
    count_state(&inspect);
    *ret_inspect = inspect;
    return KV_OK;
}
