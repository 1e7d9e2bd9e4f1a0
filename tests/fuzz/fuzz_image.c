/*
 * Any bytes as a window image: what is accepted is exactly what kv_image_seal() writes for the
 * header it gives, and the positions it is said to serve keep the rules of a cut.  Each input is
 * tried as it is and with its checksum made right, so that the checksum does not hide the rest.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/image.h"
#include "tests/fuzz/fuzz_layout.h"

static void check_cut(const struct kv_layout *layout, const struct kv_image_state *state,
                      uint32_t match)
{
    const uint32_t cut = kv_image_cut(layout, state, match);
    EXPECT(cut <= match || match >= state->tokens);
    if (match >= state->tokens) EXPECT_EQ_U32(cut, state->tokens);
    if (cut == 0 || cut == state->tokens) return;
    EXPECT(cut % 2 == 0);
    EXPECT(cut > state->replay_at);
    EXPECT(state->tokens - cut <= layout->spare_tokens);
    EXPECT(state->encoder_first == 0 || state->encoder_first + layout->window_tokens <= cut);
}

static void check(const struct kv_layout *layout, const uint8_t *image)
{
    struct kv_image_header header;
    if (kv_image_decode(layout, image, &header, NULL) != KV_OK) return;

    const struct kv_image_state *state = &header.state;
    EXPECT(state->tokens <= KV_PROMPT_TOKENS_MAX);
    EXPECT(state->encoder_first <= state->tokens && state->decoder_first <= state->tokens);
    EXPECT(state->draft_first <= state->tokens && state->replay_at <= state->tokens);
    EXPECT(state->pending < layout->vocab_tokens);
    for (uint32_t below = 0; below <= 2 * layout->window_rows; below++)
        if (below <= state->tokens) check_cut(layout, state, state->tokens - below);
    check_cut(layout, state, 0);
    check_cut(layout, state, state->tokens + 1);
    check_cut(layout, state, UINT32_MAX);

    uint8_t *sealed = malloc(layout->image_bytes);
    EXPECT(sealed != NULL);
    memcpy(sealed, image, layout->image_bytes);
    kv_image_seal(layout, sealed, &header);
    EXPECT_EQ_MEM(sealed, image, layout->image_bytes);
    free(sealed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct kv_layout layout = fuzz_layout();
    uint8_t *image = calloc(1, layout.image_bytes);
    EXPECT(image != NULL);
    memcpy(image, data, KV_MIN(bytes, (size_t)layout.image_bytes));
    check(&layout, image);
    kv_store32(image + 8, kv_checksum(image + 12, layout.image_bytes - 12));
    check(&layout, image);
    free(image);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static const struct kv_image_state states[] = {
        {.tokens = 3, .draft_first = 3},
        {.tokens = 100, .encoder_first = 88, .decoder_first = 92, .draft_first = 100},
        {.tokens = 101,
         .encoder_first = 90,
         .decoder_first = 101,
         .draft_first = 99,
         .replay_at = 97,
         .has_pending = true,
         .pending = 511},
        {.tokens = 1048576,
         .encoder_first = 1048564,
         .decoder_first = 1048564,
         .draft_first = 1048564},
    };
    const struct kv_layout layout = fuzz_layout();
    if (index == sizeof(states) / sizeof(states[0])) return 0;

    EXPECT(layout.image_bytes <= bytes_max);
    memset(buf, 0, layout.image_bytes);
    const uint32_t used = layout.tails_offset + (states[index].tokens % 2 == 1 ? 40 : 0);
    for (uint32_t i = KV_IMAGE_HEADER_BYTES; i < used; i++)
        buf[i] = (uint8_t)(i * 5 + index);
    const struct kv_image_header header = {
        .state = states[index],
        .generation = 77,
        .user = {{(uint8_t)index}},
        .model = {{1, 2}},
        .digest = {{3, 4}},
    };
    kv_image_seal(&layout, buf, &header);
    return layout.image_bytes;
}
