#pragma once

/* The shape that the fuzzers of pages and images use: small, one source of each ratio. */

#include "kvstore/format/layout.h"
#include "tests/harness.h"

static inline struct kv_layout fuzz_layout(void)
{
    struct kv_layout layout = {
        .vocab_tokens = 512,
        .context_tokens = KV_PROMPT_TOKENS_MAX,
        .window_tokens = 8,
        .spare_tokens = 4,
        .encoder_layers = 2,
        .decoder_layers = 2,
        .draft_stages = 1,
        .window_row_bytes = 24,
        .source_count = 2,
        .sources =
            {
                {.layer = 0, .ratio = 2, .main_bytes = 12, .index_bytes = 4, .tail_bytes = 40},
                {.layer = 2, .ratio = 1, .main_bytes = 10, .index_bytes = 3},
            },
    };
    EXPECT(kv_layout_finish(&layout, NULL) == KV_OK);
    return layout;
}
