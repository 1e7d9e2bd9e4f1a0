#pragma once

/*
 * Shape of a model's state, in bytes.  The store derives every size from this struct and knows
 * nothing else of the model.  Filled by the engine from the model's config (the fields above the
 * line), completed and checked by kv_layout_finish().  Immutable afterwards; any thread.
 *
 * Rows live in pages of 128 tokens.  A page is
 *
 *   offset 0    header, 256 B              (format/page.h)
 *   offset 256  128 token ids, u32 LE
 *   offset 768  for each source in order: 128/ratio main rows, then 128/ratio index rows
 *   ...         zeros up to a multiple of 4,096 B
 *
 * A window image is
 *
 *   offset 0    header, 256 B              (format/image.h)
 *   offset 256  encoder layers, decoder layers, draft stages in order: window_rows rows each
 *   ...         one tail per source with ratio 2: raw fp32 (kv, score) of the token at t - 1
 *   ...         zeros up to a multiple of 64 B
 */

#include "kvstore/base/limits.h"
#include "kvstore/base/status.h"

#include <stdint.h>

#define KV_PAGE_HEADER_BYTES 256u
#define KV_PAGE_IDS_OFFSET 256u
#define KV_PAGE_ROWS_OFFSET (KV_PAGE_IDS_OFFSET + 4u * KV_PAGE_TOKENS)
#define KV_IMAGE_HEADER_BYTES 256u

struct kv_source {
    uint32_t layer;
    uint32_t ratio;       /* Tokens per entry: 1 or 2. */
    uint32_t main_bytes;  /* Of one main KV entry. */
    uint32_t index_bytes; /* Of one index key. */
    uint32_t tail_bytes;  /* Raw half-pooled token; 0 for ratio 1. */
};

struct kv_layout {
    uint32_t vocab_tokens;
    uint32_t context_tokens; /* Most tokens of a session. */
    uint32_t window_tokens;  /* 128; 16 for tiny. */
    uint32_t spare_tokens;   /* Rows kept beyond the window, so that a cut of that many is exact. */
    uint32_t encoder_layers;
    uint32_t decoder_layers;
    uint32_t draft_stages;
    uint32_t window_row_bytes;
    uint32_t source_count;
    struct kv_source sources[KV_SOURCES_MAX];
    /* ---- derived ---- */
    uint32_t window_rows; /* window_tokens + spare_tokens: rows per layer in an image. */
    uint32_t page_bytes;
    uint32_t image_bytes;
    uint32_t main_offset[KV_SOURCES_MAX];  /* In a page. */
    uint32_t index_offset[KV_SOURCES_MAX]; /* In a page. */
    uint32_t tails_offset;                 /* In an image. */
    uint32_t rows_bytes_per_page;          /* Sum of all rows: 128 x (B/token). */
};

/* KV_INVALID with the field, its limit and its value. */
kv_status kv_layout_finish(struct kv_layout *layout, struct kv_error *err) KV_MUST_CHECK;

/* Offset in an image of the rows of `layer` (0.. encoder + decoder + draft - 1). */
uint32_t kv_layout_window_offset(const struct kv_layout *layout, uint32_t layer);

/* Position of row 0 of every layer in an image taken at t: rows stand at index p - base. */
uint32_t kv_layout_image_base(const struct kv_layout *layout, uint32_t t);

static inline uint32_t kv_pages_for(uint32_t tokens)
{
    return tokens / KV_PAGE_TOKENS + (tokens % KV_PAGE_TOKENS != 0);
}
