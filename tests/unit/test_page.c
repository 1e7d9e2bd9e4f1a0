/* Pages: what is sealed verifies, every flipped bit and every other expectation does not. */

#include "kvstore/format/page.h"
#include "tests/harness.h"

static struct kv_layout layout;
static uint8_t page[20480], copy[20480];

static struct kv_page_header sample_header(void)
{
    struct kv_page_header header = {
        .count = 77, .position = 1280, .generation = 0x1122334455667788u};
    memset(header.user.bytes, 0x11, sizeof(header.user.bytes));
    memset(header.model.bytes, 0x22, sizeof(header.model.bytes));
    memset(header.chain.bytes, 0x33, sizeof(header.chain.bytes));
    memset(header.directory.bytes, 0x44, sizeof(header.directory.bytes));
    return header;
}

static void fill_page(void)
{
    for (uint32_t i = 0; i < layout.page_bytes; i++)
        page[i] = (uint8_t)(i * 7 + 1);
    kv_page_clear_after(&layout, page, 77);
}

static void test_round_trip(void)
{
    const struct kv_page_header want = sample_header();
    struct kv_page_header got;
    struct kv_error err;

    fill_page();
    kv_page_set_id(page, 3, 500);
    kv_page_seal(&layout, page, &want);
    EXPECT(kv_page_verify(&layout, page, &want, &err) == KV_OK);
    EXPECT(kv_page_decode(&layout, page, &got, &err) == KV_OK);
    EXPECT_EQ_U32(got.count, want.count);
    EXPECT_EQ_U32(got.position, want.position);
    EXPECT_EQ_U64(got.generation, want.generation);
    EXPECT_EQ_MEM(got.user.bytes, want.user.bytes, 16);
    EXPECT_EQ_MEM(got.model.bytes, want.model.bytes, 32);
    EXPECT_EQ_MEM(got.chain.bytes, want.chain.bytes, 32);
    EXPECT_EQ_U32(kv_page_id(page, 3), 500);
}

static void test_offsets_are_the_documented_ones(void)
{
    const struct kv_page_header header = sample_header();
    fill_page();
    kv_page_seal(&layout, page, &header);
    EXPECT_EQ_MEM(page, "KVPAGE1\n", 8);
    EXPECT_EQ_U32(kv_load32(page + 12), 77);
    EXPECT_EQ_U32(kv_load32(page + 16), 1280);
    EXPECT_EQ_U32(kv_load32(page + 20), 20480);
    EXPECT_EQ_U64(kv_load64(page + 24), 0x1122334455667788u);
    EXPECT_EQ_U32(page[32], 0x11);
    EXPECT_EQ_U32(page[48], 0x22);
    EXPECT_EQ_U32(page[80], 0x33);
    for (int i = 112; i < 128; i++)
        EXPECT_EQ_U32(page[i], 0x44);
    for (int i = 128; i < 256; i++)
        EXPECT_EQ_U32(page[i], 0);
}

static void test_every_flip_is_found(void)
{
    const struct kv_page_header want = sample_header();
    struct kv_page_header got;
    struct kv_error err;

    fill_page();
    kv_page_seal(&layout, page, &want);
    for (uint32_t at = 0; at < layout.page_bytes; at += at < 256 ? 1 : 97)
        for (int bit = 0; bit < 8; bit++) {
            page[at] ^= (uint8_t)(1 << bit);
            EXPECT(kv_page_verify(&layout, page, &want, &err) == KV_CORRUPT);
            EXPECT(kv_page_decode(&layout, page, &got, NULL) == KV_CORRUPT);
            page[at] ^= (uint8_t)(1 << bit);
        }
    EXPECT(kv_page_verify(&layout, page, &want, &err) == KV_OK);
}

static void expect_other(const struct kv_page_header *want, const char *word)
{
    struct kv_error err = {0};
    EXPECT(kv_page_verify(&layout, page, want, &err) == KV_CORRUPT);
    EXPECT(strstr(err.text, word) != NULL);
}

static void test_every_expectation_counts(void)
{
    struct kv_page_header want = sample_header();
    fill_page();
    kv_page_seal(&layout, page, &want);

    want.count++;
    expect_other(&want, "count");
    want = sample_header();
    want.position += 128;
    expect_other(&want, "position");
    want = sample_header();
    want.generation++;
    expect_other(&want, "generation");
    want = sample_header();
    want.user.bytes[15] ^= 1;
    expect_other(&want, "user");
    want = sample_header();
    want.model.bytes[31] ^= 1;
    expect_other(&want, "model");
    want = sample_header();
    want.chain.bytes[31] ^= 1;
    expect_other(&want, "tokens");
    want = sample_header();
    want.directory.bytes[15] ^= 1;
    expect_other(&want, "directory");
}

static void test_encrypted(void)
{
    static uint8_t sealed[20480], back[20480];
    const struct kv_page_header want = sample_header();
    const struct kv_page_cipher cipher = {.key_id = 3, .ssd_page = 77, .run = {9, 8, 7}};
    uint8_t key[KV_KEY_BYTES] = {1, 2, 3}, other[KV_KEY_BYTES] = {1, 2, 4};
    struct kv_page_header got;
    struct kv_aead *aead;
    struct kv_error err = {0};

    EXPECT(kv_aead_create(&aead, NULL) == KV_OK);
    fill_page();
    kv_page_stamp(&layout, page, &want);
    kv_page_encrypt(aead, &layout, key, &cipher, page, sealed);
    EXPECT(kv_page_verify(&layout, sealed, &want, &err) == KV_OK);
    EXPECT(kv_page_decode(&layout, sealed, &got, &err) == KV_OK);
    EXPECT_EQ_U32(got.cipher.key_id, 3);
    EXPECT_EQ_U32(got.cipher.ssd_page, 77);
    EXPECT_EQ_MEM(got.cipher.run, cipher.run, KV_RUN_BYTES);
    /* The documented offsets. */
    EXPECT_EQ_U32(kv_load32(sealed + 128), 1);
    EXPECT_EQ_U32(kv_load32(sealed + 132), 3);
    EXPECT_EQ_U32(kv_load32(sealed + 136), 77);
    EXPECT_EQ_U64(kv_load64(sealed + 140), want.generation);
    EXPECT_EQ_U32(sealed[164], 9);
    for (int i = 180; i < 256; i++)
        EXPECT_EQ_U32(sealed[i], 0);
    EXPECT(memcmp(sealed + 256, page + 256, 512) != 0);

    memcpy(back, sealed, sizeof(back));
    EXPECT(kv_page_decrypt(aead, &layout, other, back, &err) == KV_CORRUPT);
    memcpy(back, sealed, sizeof(back));
    EXPECT(kv_page_decrypt(aead, &layout, key, back, &err) == KV_OK);
    EXPECT_EQ_MEM(back + 256, page + 256, sizeof(back) - 256);
    kv_page_peek(back, &got);
    EXPECT_EQ_U32(got.cipher.key_id, 0);
    EXPECT_EQ_U64(got.generation, want.generation);

    /* Whatever is changed does not open, whatever its checksum says; but for that itself. */
    for (uint32_t at = 8; at < layout.page_bytes; at += at < 256 ? 1 : 211) {
        memcpy(back, sealed, sizeof(back));
        back[at] ^= 0x10;
        EXPECT(kv_page_decode(&layout, back, &got, NULL) == KV_CORRUPT);
        if (at < 12) continue;
        EXPECT(kv_page_decrypt(aead, &layout, key, back, &err) == KV_CORRUPT);
    }
    kv_aead_destroy(aead);
}

static void test_clear_after(void)
{
    for (uint32_t count = 0; count <= 128; count++) {
        memset(page, 0xff, layout.page_bytes);
        kv_page_copy(&layout, page, count, copy);
        kv_page_clear_after(&layout, page, count);
        EXPECT(memcmp(copy, page, layout.page_bytes) == 0);
        for (uint32_t i = 0; i < 128; i++)
            EXPECT_EQ_U32(kv_page_id(page, i), i < count ? 0xffffffffu : 0);
        for (uint32_t s = 0; s < layout.source_count; s++) {
            const struct kv_source *source = &layout.sources[s];
            for (uint32_t e = 0; e < 128 / source->ratio; e++) {
                const uint8_t want = e < count / source->ratio ? 0xff : 0;
                EXPECT_EQ_U32(page[layout.main_offset[s] + e * source->main_bytes], want);
                EXPECT_EQ_U32(page[layout.index_offset[s] + e * source->index_bytes], want);
            }
        }
        EXPECT_EQ_U32(page[layout.page_bytes - 1], 0);
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
    EXPECT_EQ_U32(layout.page_bytes, sizeof(page));

    test_round_trip();
    test_offsets_are_the_documented_ones();
    test_every_flip_is_found();
    test_every_expectation_counts();
    test_encrypted();
    test_clear_after();
    HARNESS_END();
}
