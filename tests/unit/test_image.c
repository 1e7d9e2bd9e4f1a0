/* Images: header round trip, damage, and the positions an image serves. */

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/image.h"
#include "tests/harness.h"

static struct kv_layout layout;
static uint8_t *image;

static struct kv_image_header sample_header(uint32_t tokens)
{
    struct kv_image_header header = {
        .state = {.tokens = tokens,
                  .encoder_first = kv_layout_image_base(&layout, tokens),
                  .decoder_first = tokens - 3,
                  .draft_first = tokens,
                  .replay_at = tokens / 2,
                  .has_pending = true,
                  .pending = 99},
        .generation = 0x0102030405060708u,
        .kernels = 0x1112131415161718u,
    };
    memset(header.user.bytes, 0x44, 16);
    memset(header.model.bytes, 0x55, 32);
    memset(header.digest.bytes, 0x66, 32);
    return header;
}

static void make_image(const struct kv_image_header *header)
{
    memset(image, 0, layout.image_bytes);
    for (uint32_t i = 256; i < layout.tails_offset; i++)
        image[i] = (uint8_t)(i * 3 + 1);
    if (header->state.tokens % 2 == 1) memset(image + layout.tails_offset, 0x77, 3 * 512);
    kv_image_seal(&layout, image, header);
}

/* As someone who can compute a checksum but writes nonsense. */
static void reseal(void)
{
    kv_store32(image + 8, kv_checksum(image + 12, layout.image_bytes - 12));
}

static void test_round_trip(void)
{
    for (uint32_t tokens = 100; tokens < 102; tokens++) {
        const struct kv_image_header want = sample_header(tokens);
        struct kv_image_header got;
        struct kv_error err;
        make_image(&want);
        EXPECT(kv_image_decode(&layout, image, &got, &err) == KV_OK);
        EXPECT_EQ_MEM(&got.state.tokens, &want.state.tokens, 5 * sizeof(uint32_t));
        EXPECT(got.state.has_pending);
        EXPECT_EQ_U32(got.state.pending, 99);
        EXPECT_EQ_U64(got.generation, want.generation);
        EXPECT_EQ_U64(got.kernels, want.kernels);
        EXPECT_EQ_U64(kv_load64(image + 136), want.kernels);
        EXPECT_EQ_MEM(got.user.bytes, want.user.bytes, 16);
        EXPECT_EQ_MEM(got.model.bytes, want.model.bytes, 32);
        EXPECT_EQ_MEM(got.digest.bytes, want.digest.bytes, 32);
        EXPECT_EQ_U32(kv_load32(image + 24), tokens);
        EXPECT_EQ_U32(kv_load32(image + 44), tokens % 2 == 1 ? 3 : 1);
    }
}

static void test_every_flip_is_found(void)
{
    const struct kv_image_header header = sample_header(101);
    struct kv_image_header got;
    make_image(&header);
    for (uint32_t at = 0; at < layout.image_bytes; at += at < 256 ? 1 : 997)
        for (int bit = 0; bit < 8; bit++) {
            image[at] ^= (uint8_t)(1 << bit);
            EXPECT(kv_image_decode(&layout, image, &got, NULL) == KV_CORRUPT);
            image[at] ^= (uint8_t)(1 << bit);
        }
    EXPECT(kv_image_decode(&layout, image, &got, NULL) == KV_OK);
}

static void expect_nonsense(uint32_t at, uint32_t value, const char *word)
{
    const struct kv_image_header header = sample_header(100);
    struct kv_image_header got;
    struct kv_error err = {0};
    make_image(&header);
    kv_store32(image + at, value);
    reseal();
    EXPECT(kv_image_decode(&layout, image, &got, &err) == KV_CORRUPT);
    EXPECT(strstr(err.text, word) != NULL);
}

static void test_nonsense_with_a_good_checksum(void)
{
    expect_nonsense(12, layout.image_bytes + 1, "image_bytes");
    expect_nonsense(28, 101, "encoder_first");
    expect_nonsense(28, 67, "encoder_first"); /* Base of 100 is 68. */
    expect_nonsense(32, 101, "decoder_first");
    expect_nonsense(36, 101, "draft_first");
    expect_nonsense(40, 101, "replay_at");
    expect_nonsense(44, 4, "");
    expect_nonsense(44, 5, "flags");
    expect_nonsense(44, 3, "tails");
    expect_nonsense(44, 0, "pending");
    expect_nonsense(48, 512, "pending");
    expect_nonsense(52, 1, "52");
    expect_nonsense(144, 1, "144");
    expect_nonsense(252, 0x01000000u, "255");
    expect_nonsense(layout.tails_offset, 1, "zero");
    expect_nonsense(layout.image_bytes - 4, 1, "zero");
    expect_nonsense(24, KV_PROMPT_TOKENS_MAX + 1, "");
}

static void test_cut(void)
{
    struct kv_image_state state = {
        .tokens = 101, .encoder_first = 69, .decoder_first = 85, .draft_first = 101};

    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 101), 101);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 5000), 101);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 100), 100);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 99), 98);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 86), 86); /* 15 back; rows from 70. */
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 85), 0);  /* 17 back. */
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 0), 0);

    state.encoder_first = 80; /* After a short replay: fewer rows than spare promises. */
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 97), 96);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 95), 0);
    state.encoder_first = 69;
    state.replay_at = 96;
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 98), 98);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 97), 0);

    state = (struct kv_image_state){.tokens = 12};
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 11), 10);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 3), 2);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 1), 0);
    EXPECT_EQ_U32(kv_image_cut(&layout, &state, 12), 12);
}

/* The rule as the comment states it, against every match of many states. */
static void test_cut_by_definition(void)
{
    for (uint32_t tokens = 1; tokens < 90; tokens++)
        for (uint32_t first = kv_layout_image_base(&layout, tokens); first <= tokens; first += 5)
            for (uint32_t replay = 0; replay <= tokens; replay += 7)
                for (uint32_t match = 0; match <= tokens + 1; match++) {
                    const struct kv_image_state state = {
                        .tokens = tokens, .encoder_first = first, .replay_at = replay};
                    uint32_t want = 0;
                    for (uint32_t p = 2; p <= match && p < tokens; p += 2) {
                        const bool rows = first == 0 || (p >= 16 && first <= p - 16);
                        if (tokens - p <= 16 && p > replay && rows) want = p;
                    }
                    if (match >= tokens) want = tokens;
                    EXPECT_EQ_U32(kv_image_cut(&layout, &state, match), want);
                }
}

int main(void)
{
    layout = (struct kv_layout){.vocab_tokens = 512,
                                .context_tokens = KV_PROMPT_TOKENS_MAX,
                                .window_tokens = 16,
                                .spare_tokens = 16,
                                .encoder_layers = 8,
                                .decoder_layers = 8,
                                .window_row_bytes = 66,
                                .source_count = 4};
    for (uint32_t i = 0; i < 4; i++)
        layout.sources[i] = (struct kv_source){2 + 2 * i, i < 3 ? 2 : 1, 36, 17, i < 3 ? 512 : 0};
    EXPECT(kv_layout_finish(&layout, NULL) == KV_OK);
    image = malloc(layout.image_bytes);
    EXPECT(image != NULL);

    test_round_trip();
    test_every_flip_is_found();
    test_nonsense_with_a_good_checksum();
    test_cut();
    test_cut_by_definition();
    free(image);
    HARNESS_END();
}
