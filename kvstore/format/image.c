/*
 * Encodes and checks the header of a window image, and decides which positions an image serves.
 *
 * An image is taken at one position but holds spare rows, so it also serves the even positions a
 * little below: even, because tails (the raw half of a pair) are kept for t alone.  What decides is
 * what the image itself says it holds, never what the window would hold in theory.
 */

#include "kvstore/format/image.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"

#include <assert.h>

static const uint8_t image_magic[8] = {'K', 'V', 'I', 'M', 'A', 'G', '2', '\n'};

enum {
    AT_CHECKSUM = 8,
    AT_IMAGE_BYTES = 12,
    AT_GENERATION = 16,
    AT_TOKENS = 24,
    AT_ENCODER_FIRST = 28,
    AT_DECODER_FIRST = 32,
    AT_DRAFT_FIRST = 36,
    AT_REPLAY = 40,
    AT_FLAGS = 44,
    AT_PENDING = 48,
    AT_ZERO = 52,
    AT_USER = 56,
    AT_MODEL = 72,
    AT_DIGEST = 104,
    AT_KERNELS = 136,
    AT_ZEROS = 144,
};

enum { FLAG_PENDING = 1, FLAG_TAILS = 2 };

static uint32_t image_checksum(const struct kv_layout *layout, const uint8_t *image)
{
    return kv_checksum(image + AT_IMAGE_BYTES, layout->image_bytes - AT_IMAGE_BYTES);
}

static uint32_t tails_bytes(const struct kv_layout *layout)
{
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < layout->source_count; i++)
        bytes += layout->sources[i].tail_bytes;
    return bytes;
}

static bool has_tails(const struct kv_layout *layout, uint32_t tokens)
{
    return tokens % 2 == 1 && tails_bytes(layout) > 0;
}

void kv_image_seal(const struct kv_layout *layout, uint8_t *image,
                   const struct kv_image_header *header)
{
    const struct kv_image_state *state = &header->state;
    assert(state->encoder_first <= state->tokens);
    assert(state->decoder_first <= state->tokens);
    assert(state->draft_first <= state->tokens);
    assert(state->replay_at <= state->tokens);
    assert(state->encoder_first >= kv_layout_image_base(layout, state->tokens));
    assert(state->decoder_first >= kv_layout_image_base(layout, state->tokens));
    assert(state->draft_first >= kv_layout_image_base(layout, state->tokens));
    if (state->has_pending) assert(state->pending < layout->vocab_tokens);

    uint32_t flags = 0;
    if (state->has_pending) flags |= FLAG_PENDING;
    if (has_tails(layout, state->tokens)) flags |= FLAG_TAILS;

    memset(image, 0, KV_IMAGE_HEADER_BYTES);
    memcpy(image, image_magic, sizeof(image_magic));
    kv_store32(image + AT_IMAGE_BYTES, layout->image_bytes);
    kv_store64(image + AT_GENERATION, header->generation);
    kv_store32(image + AT_TOKENS, state->tokens);
    kv_store32(image + AT_ENCODER_FIRST, state->encoder_first);
    kv_store32(image + AT_DECODER_FIRST, state->decoder_first);
    kv_store32(image + AT_DRAFT_FIRST, state->draft_first);
    kv_store32(image + AT_REPLAY, state->replay_at);
    kv_store32(image + AT_FLAGS, flags);
    kv_store32(image + AT_PENDING, state->has_pending ? state->pending : 0);
    memcpy(image + AT_USER, header->user.bytes, sizeof(header->user.bytes));
    memcpy(image + AT_MODEL, header->model.bytes, sizeof(header->model.bytes));
    memcpy(image + AT_DIGEST, header->digest.bytes, sizeof(header->digest.bytes));
    kv_store64(image + AT_KERNELS, header->kernels);
    kv_store32(image + AT_CHECKSUM, image_checksum(layout, image));
}

static void read_fields(const uint8_t *image, struct kv_image_header *header)
{
    const uint32_t flags = kv_load32(image + AT_FLAGS);
    header->generation = kv_load64(image + AT_GENERATION);
    header->kernels = kv_load64(image + AT_KERNELS);
    header->state = (struct kv_image_state){
        .tokens = kv_load32(image + AT_TOKENS),
        .encoder_first = kv_load32(image + AT_ENCODER_FIRST),
        .decoder_first = kv_load32(image + AT_DECODER_FIRST),
        .draft_first = kv_load32(image + AT_DRAFT_FIRST),
        .replay_at = kv_load32(image + AT_REPLAY),
        .has_pending = (flags & FLAG_PENDING) != 0,
        .pending = kv_load32(image + AT_PENDING),
    };
    memcpy(header->user.bytes, image + AT_USER, sizeof(header->user.bytes));
    memcpy(header->model.bytes, image + AT_MODEL, sizeof(header->model.bytes));
    memcpy(header->digest.bytes, image + AT_DIGEST, sizeof(header->digest.bytes));
}

static kv_status check_state(const struct kv_layout *layout, const struct kv_image_state *state,
                             struct kv_error *err)
{
    const uint32_t base = kv_layout_image_base(layout, state->tokens);
    const uint32_t firsts[] = {state->encoder_first, state->decoder_first, state->draft_first};
    static const char *const names[] = {"encoder_first", "decoder_first", "draft_first"};

    if (state->tokens > KV_PROMPT_TOKENS_MAX)
        return KV_FAIL(err, KV_CORRUPT, "image: tokens %u, at most %u", state->tokens,
                       KV_PROMPT_TOKENS_MAX);
    for (int i = 0; i < 3; i++)
        if (firsts[i] > state->tokens || firsts[i] < base)
            return KV_FAIL(err, KV_CORRUPT, "image: %s %u, expected %u to %u", names[i], firsts[i],
                           base, state->tokens);
    if (state->replay_at > state->tokens)
        return KV_FAIL(err, KV_CORRUPT, "image: replay_at %u beyond %u", state->replay_at,
                       state->tokens);
    if (state->has_pending && state->pending >= layout->vocab_tokens)
        return KV_FAIL(err, KV_CORRUPT, "image: pending token %u of %u", state->pending,
                       layout->vocab_tokens);
    if (!state->has_pending && state->pending != 0)
        return KV_FAIL(err, KV_CORRUPT, "image: pending token %u without its flag", state->pending);
    return KV_OK;
}

static kv_status check_zeros(const struct kv_layout *layout, const uint8_t *image, uint32_t tokens,
                             struct kv_error *err)
{
    uint32_t used = layout->tails_offset;
    if (tokens % 2 == 1) used += tails_bytes(layout);

    if (kv_load32(image + AT_ZERO) != 0)
        return KV_FAIL(err, KV_CORRUPT, "image: header byte %d is not zero", AT_ZERO);
    for (uint32_t i = AT_ZEROS; i < KV_IMAGE_HEADER_BYTES; i++)
        if (image[i] != 0) return KV_FAIL(err, KV_CORRUPT, "image: header byte %u is not zero", i);
    for (uint32_t i = used; i < layout->image_bytes; i++)
        if (image[i] != 0) return KV_FAIL(err, KV_CORRUPT, "image: byte %u is not zero", i);
    return KV_OK;
}

kv_status kv_image_decode(const struct kv_layout *layout, const uint8_t *image,
                          struct kv_image_header *ret_header, struct kv_error *err)
{
    const uint32_t image_bytes = kv_load32(image + AT_IMAGE_BYTES);
    const uint32_t stored = kv_load32(image + AT_CHECKSUM);
    struct kv_image_header header;

    if (memcmp(image, image_magic, sizeof(image_magic)) != 0)
        return KV_FAIL(err, KV_CORRUPT, "image: wrong magic");
    if (image_bytes != layout->image_bytes)
        return KV_FAIL(err, KV_CORRUPT, "image: image_bytes %u, expected %u", image_bytes,
                       layout->image_bytes);
    const uint32_t computed = image_checksum(layout, image);
    if (stored != computed)
        return KV_FAIL(err, KV_CORRUPT, "image: checksum 0x%08x, computed 0x%08x", stored,
                       computed);
    read_fields(image, &header);
    const kv_status status = check_state(layout, &header.state, err);
    if (status != KV_OK) return status;

    const uint32_t flags = kv_load32(image + AT_FLAGS);
    const bool tails = (flags & FLAG_TAILS) != 0;
    if ((flags & ~(uint32_t)(FLAG_PENDING | FLAG_TAILS)) != 0)
        return KV_FAIL(err, KV_CORRUPT, "image: unknown flags 0x%x", flags);
    if (tails != has_tails(layout, header.state.tokens))
        return KV_FAIL(err, KV_CORRUPT, "image: tails %s at %u tokens",
                       tails ? "present" : "missing", header.state.tokens);
    const kv_status zeros = check_zeros(layout, image, header.state.tokens, err);
    if (zeros == KV_OK) *ret_header = header;
    return zeros;
}

uint32_t kv_image_cut(const struct kv_layout *layout, const struct kv_image_state *state,
                      uint32_t match)
{
    if (match >= state->tokens) return state->tokens;

    const uint32_t cut = match - match % 2;
    const uint32_t first = cut > layout->window_tokens ? cut - layout->window_tokens : 0;
    if (cut == 0) return 0;
    if (state->tokens - cut > layout->spare_tokens) return 0;
    if (cut <= state->replay_at) return 0;
    /* Every smaller even position asks for rows further back, so if this one fails, all do. */
    if (state->encoder_first > first) return 0;
    return cut;
}
