/* Sizes and offsets of pages and images: the numbers of the two models we know, and what is
 * refused.
 */

#include "kvstore/format/layout.h"
#include "tests/harness.h"

static struct kv_layout tiny(void)
{
    struct kv_layout layout = {
        .vocab_tokens = 512,
        .context_tokens = KV_PROMPT_TOKENS_MAX,
        .window_tokens = 16,
        .spare_tokens = 16,
        .encoder_layers = 8,
        .decoder_layers = 8,
        .window_row_bytes = 66,
        .source_count = 4,
    };
    for (uint32_t i = 0; i < 4; i++)
        layout.sources[i] = (struct kv_source){.layer = 2 + 2 * i,
                                               .ratio = i < 3 ? 2 : 1,
                                               .main_bytes = 36,
                                               .index_bytes = 17,
                                               .tail_bytes = i < 3 ? 512 : 0};
    return layout;
}

static struct kv_layout real(void)
{
    struct kv_layout layout = {
        .vocab_tokens = 129280,
        .context_tokens = KV_PROMPT_TOKENS_MAX,
        .window_tokens = 128,
        .spare_tokens = 16,
        .encoder_layers = 20,
        .decoder_layers = 20,
        .draft_stages = 3,
        .window_row_bytes = 528,
        .source_count = 4,
    };
    for (uint32_t i = 0; i < 4; i++)
        layout.sources[i] = (struct kv_source){.layer = 2 + 6 * i,
                                               .ratio = i < 3 ? 2 : 1,
                                               .main_bytes = 288,
                                               .index_bytes = 68,
                                               .tail_bytes = i < 3 ? 4096 : 0};
    return layout;
}

static void test_tiny(void)
{
    struct kv_layout layout = tiny();
    struct kv_error err;
    EXPECT(kv_layout_finish(&layout, &err) == KV_OK);
    EXPECT_EQ_U32(layout.rows_bytes_per_page, 16960); /* 132.5 x 128 */
    EXPECT_EQ_U32(layout.page_bytes, 20480);
    EXPECT_EQ_U32(layout.window_rows, 32);
    EXPECT_EQ_U32(layout.main_offset[0], 768);
    EXPECT_EQ_U32(layout.index_offset[0], 768 + 64 * 36);
    EXPECT_EQ_U32(layout.main_offset[1], 768 + 64 * 53);
    EXPECT_EQ_U32(layout.main_offset[3], 768 + 3 * 64 * 53);
    EXPECT_EQ_U32(layout.index_offset[3], 768 + 3 * 64 * 53 + 128 * 36);
    EXPECT_EQ_U32(layout.tails_offset, 256 + 16 * 32 * 66);
    EXPECT_EQ_U32(layout.image_bytes, (256 + 16 * 32 * 66 + 3 * 512 + 63) / 64 * 64);
    EXPECT_EQ_U32(kv_layout_window_offset(&layout, 0), 256);
    EXPECT_EQ_U32(kv_layout_window_offset(&layout, 15), 256 + 15 * 32 * 66);
}

static void test_real(void)
{
    struct kv_layout layout = real();
    struct kv_error err;
    EXPECT(kv_layout_finish(&layout, &err) == KV_OK);
    EXPECT_EQ_U32(layout.rows_bytes_per_page, 113920); /* 890 x 128 */
    EXPECT_EQ_U32(layout.page_bytes, 114688);
    EXPECT_EQ_U32(layout.page_bytes, 28 * 4096);
    EXPECT_EQ_U32(layout.window_rows, 144);
    EXPECT_EQ_U32(layout.tails_offset, 256 + 43 * 144 * 528);
    EXPECT(layout.image_bytes >= layout.tails_offset + 12288);
    EXPECT(layout.image_bytes < layout.tails_offset + 12288 + 64);
    EXPECT_EQ_U32(layout.image_bytes % 64, 0);
}

static void test_base(void)
{
    struct kv_layout layout = tiny();
    struct kv_error err;
    EXPECT(kv_layout_finish(&layout, &err) == KV_OK);
    EXPECT_EQ_U32(kv_layout_image_base(&layout, 0), 0);
    EXPECT_EQ_U32(kv_layout_image_base(&layout, 32), 0);
    EXPECT_EQ_U32(kv_layout_image_base(&layout, 33), 1);
    EXPECT_EQ_U32(kv_layout_image_base(&layout, 1000), 968);
    EXPECT_EQ_U32(kv_pages_for(0), 0);
    EXPECT_EQ_U32(kv_pages_for(1), 1);
    EXPECT_EQ_U32(kv_pages_for(128), 1);
    EXPECT_EQ_U32(kv_pages_for(129), 2);
}

static void test_window_only_model(void)
{
    struct kv_layout layout = {.vocab_tokens = 512,
                               .context_tokens = KV_PROMPT_TOKENS_MAX,
                               .window_tokens = 4096,
                               .spare_tokens = 4,
                               .encoder_layers = 10,
                               .window_row_bytes = 64};
    struct kv_error err;
    EXPECT(kv_layout_finish(&layout, &err) == KV_OK);
    EXPECT_EQ_U32(layout.rows_bytes_per_page, 0);
    EXPECT_EQ_U32(layout.page_bytes, 4096);
}

static void refuse(struct kv_layout layout, const char *field)
{
    struct kv_error err = {0};
    EXPECT(kv_layout_finish(&layout, &err) == KV_INVALID);
    EXPECT(strstr(err.text, field) != NULL);
    EXPECT(kv_layout_finish(&layout, NULL) == KV_INVALID);
}

#define REFUSE(change, field)                                                                      \
    do {                                                                                           \
        struct kv_layout layout = tiny();                                                          \
        layout.change;                                                                             \
        refuse(layout, field);                                                                     \
    } while (0)

static void test_refusals(void)
{
    REFUSE(vocab_tokens = 0, "vocab_tokens");
    REFUSE(vocab_tokens = 1u << 31, "vocab_tokens");
    REFUSE(context_tokens = 0, "context_tokens");
    REFUSE(context_tokens = KV_PROMPT_TOKENS_MAX + 1, "context_tokens must be 1 to 1048576");
    REFUSE(window_tokens = 0, "window_tokens");
    REFUSE(window_tokens = UINT32_MAX, "window_tokens");
    REFUSE(spare_tokens = 3, "spare_tokens");
    REFUSE(spare_tokens = 129, "spare_tokens");
    REFUSE(encoder_layers = 0, "encoder_layers");
    REFUSE(encoder_layers = UINT32_MAX, "encoder_layers");
    REFUSE(decoder_layers = 60, "decoder_layers");
    REFUSE(draft_stages = 5, "draft_stages");
    REFUSE(window_row_bytes = 0, "window_row_bytes");
    REFUSE(window_row_bytes = UINT32_MAX, "window_row_bytes");
    REFUSE(source_count = 9, "source_count");
    REFUSE(sources[1].ratio = 3, "ratio");
    REFUSE(sources[1].ratio = 0, "ratio");
    REFUSE(sources[3].layer = 16, "layer");
    REFUSE(sources[1].layer = 2, "ascend");
    REFUSE(sources[0].main_bytes = 0, "main_bytes");
    REFUSE(sources[0].main_bytes = UINT32_MAX, "main_bytes");
    REFUSE(sources[0].index_bytes = UINT32_MAX, "index_bytes");
    REFUSE(sources[0].tail_bytes = 0, "tail_bytes");
    REFUSE(sources[3].tail_bytes = 1, "tail");
    REFUSE(sources[3].main_bytes = 1u << 20, "page_bytes");
    REFUSE(window_tokens = 65536; layout.window_row_bytes = 1u << 20, "image_bytes");
}

int main(void)
{
    test_tiny();
    test_real();
    test_base();
    test_window_only_model();
    test_refusals();
    HARNESS_END();
}
