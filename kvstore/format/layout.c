/*
 * Derives every offset and size of pages and images from a model's shape, and refuses shapes that
 * the formats cannot hold.
 *
 * All sums run in 64 bits over fields that were bounded first, so nothing wraps: at most 8 sources
 * of 128 rows of 1 MiB, and 132 layers of 65,664 rows of 1 MiB.  Sizes on disk stay u32, which is
 * the last check.
 */

#include "kvstore/format/layout.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

#define ROW_BYTES_MAX (1u << 20)
#define WINDOW_TOKENS_MAX 65536u
#define VOCAB_TOKENS_MAX (1u << 24)
#define PAGE_BYTES_MAX (64u << 20)
#define IMAGE_BYTES_MAX (1u << 30)

static kv_status check_range(const char *field, uint64_t value, uint64_t min, uint64_t max,
                             struct kv_error *err)
{
    if (value >= min && value <= max) return KV_OK;
    return KV_FAIL(err, KV_INVALID, "layout: %s must be %llu to %llu, found %llu", field,
                   (unsigned long long)min, (unsigned long long)max, (unsigned long long)value);
}

static kv_status check_fields(const struct kv_layout *layout, struct kv_error *err)
{
    const struct {
        const char *field;
        uint64_t value, min, max;
    } ranges[] = {
        {"vocab_tokens", layout->vocab_tokens, 2, VOCAB_TOKENS_MAX},
        {"context_tokens", layout->context_tokens, 1, KV_PROMPT_TOKENS_MAX},
        {"window_tokens", layout->window_tokens, 1, WINDOW_TOKENS_MAX},
        {"spare_tokens", layout->spare_tokens, KV_SPARE_TOKENS_MIN, KV_SPARE_TOKENS_MAX},
        {"encoder_layers", layout->encoder_layers, 1, KV_LAYERS_MAX},
        {"decoder_layers", layout->decoder_layers, 0, KV_LAYERS_MAX},
        {"draft_stages", layout->draft_stages, 0, KV_DRAFT_STAGES_MAX},
        {"window_row_bytes", layout->window_row_bytes, 1, ROW_BYTES_MAX},
        {"source_count", layout->source_count, 0, KV_SOURCES_MAX},
        {"encoder_layers + decoder_layers",
         (uint64_t)layout->encoder_layers + layout->decoder_layers, 1, KV_LAYERS_MAX},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(ranges); i++) {
        const kv_status status =
            check_range(ranges[i].field, ranges[i].value, ranges[i].min, ranges[i].max, err);
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

static kv_status check_source(const struct kv_layout *layout, uint32_t index, struct kv_error *err)
{
    const struct kv_source *source = &layout->sources[index];
    const uint32_t layers = layout->encoder_layers + layout->decoder_layers;

    if (source->ratio != 1 && source->ratio != 2)
        return KV_FAIL(err, KV_INVALID, "layout: ratio of source %u must be 1 or 2, found %u",
                       index, source->ratio);
    if (source->layer >= layers)
        return KV_FAIL(err, KV_INVALID, "layout: source %u names layer %u of %u", index,
                       source->layer, layers);
    if (index > 0 && source->layer <= source[-1].layer)
        return KV_FAIL(err, KV_INVALID, "layout: source %u (layer %u) does not ascend", index,
                       source->layer);
    if (source->ratio == 1 && source->tail_bytes != 0)
        return KV_FAIL(err, KV_INVALID, "layout: source %u has ratio 1 and a tail of %u bytes",
                       index, source->tail_bytes);
    kv_status status = check_range("main_bytes", source->main_bytes, 1, ROW_BYTES_MAX, err);
    if (status == KV_OK)
        status = check_range("index_bytes", source->index_bytes, 0, ROW_BYTES_MAX, err);
    if (status == KV_OK && source->ratio == 2)
        status = check_range("tail_bytes", source->tail_bytes, 1, ROW_BYTES_MAX, err);
    return status;
}

static kv_status derive_page(struct kv_layout *layout, struct kv_error *err)
{
    uint64_t offset = KV_PAGE_ROWS_OFFSET;

    for (uint32_t i = 0; i < KV_SOURCES_MAX; i++) {
        layout->main_offset[i] = 0;
        layout->index_offset[i] = 0;
        if (i >= layout->source_count) continue;
        const struct kv_source *source = &layout->sources[i];
        const uint64_t entries = KV_PAGE_TOKENS / source->ratio;
        layout->main_offset[i] = (uint32_t)offset;
        offset += entries * source->main_bytes;
        layout->index_offset[i] = (uint32_t)offset;
        offset += entries * source->index_bytes;
        if (offset > PAGE_BYTES_MAX) break;
    }
    layout->rows_bytes_per_page = (uint32_t)(offset - KV_PAGE_ROWS_OFFSET);
    const uint64_t page_bytes = kv_round_up(offset, KV_IO_ALIGN);
    layout->page_bytes = (uint32_t)page_bytes;
    return check_range("page_bytes", page_bytes, KV_IO_ALIGN, PAGE_BYTES_MAX, err);
}

static kv_status derive_image(struct kv_layout *layout, struct kv_error *err)
{
    const uint64_t layers =
        (uint64_t)layout->encoder_layers + layout->decoder_layers + layout->draft_stages;
    const uint64_t window_rows = (uint64_t)layout->window_tokens + layout->spare_tokens;
    const uint64_t tails_offset =
        KV_IMAGE_HEADER_BYTES + layers * window_rows * layout->window_row_bytes;
    uint64_t end = tails_offset;

    for (uint32_t i = 0; i < layout->source_count; i++)
        end += layout->sources[i].tail_bytes;
    end = kv_round_up(end, 64);
    const kv_status status =
        check_range("image_bytes", end, KV_IMAGE_HEADER_BYTES, IMAGE_BYTES_MAX, err);
    if (status != KV_OK) return status;
    layout->window_rows = (uint32_t)window_rows;
    layout->tails_offset = (uint32_t)tails_offset;
    layout->image_bytes = (uint32_t)end;
    return KV_OK;
}

kv_status kv_layout_finish(struct kv_layout *layout, struct kv_error *err)
{
    assert(layout != NULL);

    kv_status status = check_fields(layout, err);
    for (uint32_t i = 0; status == KV_OK && i < layout->source_count; i++)
        status = check_source(layout, i, err);
    if (status == KV_OK) status = derive_page(layout, err);
    if (status == KV_OK) status = derive_image(layout, err);
    return status;
}

uint32_t kv_layout_window_offset(const struct kv_layout *layout, uint32_t layer)
{
    assert(layer < layout->encoder_layers + layout->decoder_layers + layout->draft_stages);
    return KV_IMAGE_HEADER_BYTES + layer * layout->window_rows * layout->window_row_bytes;
}

uint32_t kv_layout_image_base(const struct kv_layout *layout, uint32_t t)
{
    return t > layout->window_rows ? t - layout->window_rows : 0;
}
