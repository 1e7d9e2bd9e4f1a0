/*
 * Any bytes as a page of rows: what is accepted is exactly what kv_page_seal() writes for the
 * header it gives, and no other expectation accepts it.  Each input is tried as it is and with its
 * checksum made right, so that the checksum does not hide the rest.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/page.h"
#include "tests/fuzz/fuzz_layout.h"

static void check_other_expectations(const struct kv_layout *layout, const uint8_t *page,
                                     const struct kv_page_header *header)
{
    struct kv_page_header wants[7];
    for (int i = 0; i < 7; i++)
        wants[i] = *header;
    wants[0].count ^= 1;
    wants[1].position ^= KV_PAGE_TOKENS;
    wants[2].generation ^= 1ull << 63;
    wants[3].user.bytes[15] ^= 1;
    wants[4].model.bytes[31] ^= 1;
    wants[5].chain.bytes[0] ^= 1;
    wants[6].directory.bytes[8] ^= 1;
    for (int i = 0; i < 7; i++)
        EXPECT(kv_page_verify(layout, page, &wants[i], NULL) == KV_CORRUPT);
}

static void check(const struct kv_layout *layout, const uint8_t *page)
{
    struct kv_page_header header;
    if (kv_page_decode(layout, page, &header, NULL) != KV_OK) return;

    EXPECT(header.count >= 1 && header.count <= KV_PAGE_TOKENS);
    EXPECT(header.position % KV_PAGE_TOKENS == 0 && header.position < KV_PROMPT_TOKENS_MAX);
    EXPECT(kv_page_verify(layout, page, &header, NULL) == KV_OK);
    check_other_expectations(layout, page, &header);

    if (header.cipher.key_id != 0) return; /* Only who has the key can make it. */
    uint8_t *sealed = malloc(layout->page_bytes);
    EXPECT(sealed != NULL);
    memcpy(sealed, page, layout->page_bytes);
    kv_page_seal(layout, sealed, &header);
    EXPECT_EQ_MEM(sealed, page, layout->page_bytes);
    kv_page_clear_after(layout, sealed, header.count);
    free(sealed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct kv_layout layout = fuzz_layout();
    uint8_t *page = calloc(1, layout.page_bytes);
    EXPECT(page != NULL);
    memcpy(page, data, KV_MIN(bytes, (size_t)layout.page_bytes));
    check(&layout, page);
    kv_store32(page + 8, kv_checksum(page + 12, layout.page_bytes - 12));
    check(&layout, page);
    free(page);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    const struct kv_layout layout = fuzz_layout();
    if (index == 4) return 0;
    EXPECT(layout.page_bytes <= bytes_max);
    for (uint32_t i = 0; i < layout.page_bytes; i++)
        buf[i] = (uint8_t)(i * 7 + index);
    const struct kv_page_header header = {
        .count = 1 + index * 42,
        .position = index * KV_PAGE_TOKENS,
        .generation = (uint64_t)index << 40,
        .user = {{(uint8_t)index}},
        .model = {{1, 2}},
        .chain = {{3, 4}},
        .directory = {{5, 6}},
    };
    kv_page_clear_after(&layout, buf, header.count);
    kv_page_seal(&layout, buf, &header);
    if (index == 3) { /* One that is encrypted. */
        const uint8_t key[KV_KEY_BYTES] = {7};
        const struct kv_page_cipher cipher = {.key_id = 1, .ssd_page = 5};
        struct kv_aead *aead = NULL;
        uint8_t *plain = malloc(layout.page_bytes);
        EXPECT(plain != NULL && kv_aead_create(&aead, NULL) == KV_OK);
        memcpy(plain, buf, layout.page_bytes);
        kv_page_encrypt(aead, &layout, key, &cipher, plain, buf);
        kv_aead_destroy(aead);
        free(plain);
    }
    return layout.page_bytes;
}
