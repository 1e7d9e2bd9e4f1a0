/*
 * Encodes and checks the header of a page of rows.
 *
 * Verification compares every field and the checksum of all bytes after it, so a page that passes
 * is the one the index meant: right user, right model, right place in the chain, this write of it.
 * The checksum runs last because the fields name the cause better and cost nothing.
 */

#include "kvstore/format/page.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"

#include <assert.h>

static const uint8_t page_magic[8] = {'K', 'V', 'P', 'A', 'G', 'E', '1', '\n'};

enum {
    AT_CHECKSUM = 8,
    AT_COUNT = 12,
    AT_POSITION = 16,
    AT_PAGE_BYTES = 20,
    AT_GENERATION = 24,
    AT_USER = 32,
    AT_MODEL = 48,
    AT_CHAIN = 80,
    AT_DIRECTORY = 112,
    AT_CIPHER = 128,
    AT_ZEROS = 130,
    AT_KEY_ID = 132,
    AT_NONCE = 136,
    AT_TAG = 148,
    AT_RUN = 164,
    AT_LAST_ZEROS = 180,
};

enum { CIPHER_NONE = 0, CIPHER_AES_256_GCM = 1 };

static uint32_t page_checksum(const struct kv_layout *layout, const uint8_t *page)
{
    return kv_checksum(page + AT_COUNT, layout->page_bytes - AT_COUNT);
}

void kv_page_stamp(const struct kv_layout *layout, uint8_t *page,
                   const struct kv_page_header *header)
{
    assert(header->count >= 1 && header->count <= KV_PAGE_TOKENS);
    assert(header->position % KV_PAGE_TOKENS == 0);
    assert(header->position < KV_PROMPT_TOKENS_MAX);

    memset(page, 0, KV_PAGE_HEADER_BYTES);
    memcpy(page, page_magic, sizeof(page_magic));
    kv_store32(page + AT_COUNT, header->count);
    kv_store32(page + AT_POSITION, header->position);
    kv_store32(page + AT_PAGE_BYTES, layout->page_bytes);
    kv_store64(page + AT_GENERATION, header->generation);
    memcpy(page + AT_USER, header->user.bytes, sizeof(header->user.bytes));
    memcpy(page + AT_MODEL, header->model.bytes, sizeof(header->model.bytes));
    memcpy(page + AT_CHAIN, header->chain.bytes, sizeof(header->chain.bytes));
    memcpy(page + AT_DIRECTORY, header->directory.bytes, sizeof(header->directory.bytes));
}

void kv_page_seal(const struct kv_layout *layout, uint8_t *page,
                  const struct kv_page_header *header)
{
    kv_page_stamp(layout, page, header);
    kv_store32(page + AT_CHECKSUM, page_checksum(layout, page));
}

static kv_status check_zeros(const uint8_t *page, uint32_t from, uint32_t to, struct kv_error *err)
{
    for (uint32_t i = from; i < to; i++)
        if (page[i] != 0) return KV_FAIL(err, KV_CORRUPT, "page: header byte %u is not zero", i);
    return KV_OK;
}

static uint32_t cipher_of(const uint8_t *page)
{
    return page[AT_CIPHER] | (uint32_t)page[AT_CIPHER + 1] << 8;
}

static kv_status check_cipher(const uint8_t *page, struct kv_error *err)
{
    const uint32_t cipher = cipher_of(page);
    if (cipher == CIPHER_NONE) return check_zeros(page, AT_CIPHER, KV_PAGE_HEADER_BYTES, err);
    if (cipher != CIPHER_AES_256_GCM)
        return KV_FAIL(err, KV_CORRUPT, "page: cipher %u, expected 0 or 1", cipher);
    if (kv_load32(page + AT_KEY_ID) == 0)
        return KV_FAIL(err, KV_CORRUPT, "page: encrypted without a key id");
    if (kv_load64(page + AT_NONCE + 4) != kv_load64(page + AT_GENERATION))
        return KV_FAIL(err, KV_CORRUPT, "page: its nonce is of another generation");
    const kv_status status = check_zeros(page, AT_ZEROS, AT_KEY_ID, err);
    return status != KV_OK ? status : check_zeros(page, AT_LAST_ZEROS, KV_PAGE_HEADER_BYTES, err);
}

static kv_status check_bounds(const struct kv_layout *layout, const uint8_t *page,
                              struct kv_error *err)
{
    const uint32_t count = kv_load32(page + AT_COUNT);
    const uint32_t position = kv_load32(page + AT_POSITION);
    const uint32_t page_bytes = kv_load32(page + AT_PAGE_BYTES);

    if (memcmp(page, page_magic, sizeof(page_magic)) != 0)
        return KV_FAIL(err, KV_CORRUPT, "page: wrong magic");
    if (page_bytes != layout->page_bytes)
        return KV_FAIL(err, KV_CORRUPT, "page: page_bytes %u, expected %u", page_bytes,
                       layout->page_bytes);
    if (count < 1 || count > KV_PAGE_TOKENS)
        return KV_FAIL(err, KV_CORRUPT, "page: count %u, expected 1 to %u", count, KV_PAGE_TOKENS);
    if (position % KV_PAGE_TOKENS != 0 || position >= KV_PROMPT_TOKENS_MAX)
        return KV_FAIL(err, KV_CORRUPT, "page: position %u is not a page start", position);
    return check_cipher(page, err);
}

static kv_status check_sum(const struct kv_layout *layout, const uint8_t *page,
                           struct kv_error *err)
{
    const uint32_t stored = kv_load32(page + AT_CHECKSUM);
    const uint32_t computed = page_checksum(layout, page);
    if (stored == computed) return KV_OK;
    return KV_FAIL(err, KV_CORRUPT, "page: checksum 0x%08x, computed 0x%08x", stored, computed);
}

void kv_page_peek(const uint8_t *page, struct kv_page_header *ret_header)
{
    ret_header->cipher = (struct kv_page_cipher){0};
    ret_header->count = kv_load32(page + AT_COUNT);
    ret_header->position = kv_load32(page + AT_POSITION);
    ret_header->generation = kv_load64(page + AT_GENERATION);
    memcpy(ret_header->user.bytes, page + AT_USER, sizeof(ret_header->user.bytes));
    memcpy(ret_header->model.bytes, page + AT_MODEL, sizeof(ret_header->model.bytes));
    memcpy(ret_header->chain.bytes, page + AT_CHAIN, sizeof(ret_header->chain.bytes));
    memcpy(ret_header->directory.bytes, page + AT_DIRECTORY, sizeof(ret_header->directory.bytes));
    if (cipher_of(page) == CIPHER_NONE) return;
    ret_header->cipher.key_id = kv_load32(page + AT_KEY_ID);
    ret_header->cipher.ssd_page = kv_load32(page + AT_NONCE);
    memcpy(ret_header->cipher.run, page + AT_RUN, sizeof(ret_header->cipher.run));
}

bool kv_page_is_encrypted(const uint8_t *page)
{
    return cipher_of(page) != CIPHER_NONE;
}

kv_status kv_page_compare(const struct kv_layout *layout, const uint8_t *page,
                          const struct kv_page_header *want, struct kv_error *err)
{
    kv_status status = check_bounds(layout, page, err);
    if (status != KV_OK) return status;

    struct kv_page_header found;
    kv_page_peek(page, &found);
    if (!kv_id_equal(found.directory.bytes, want->directory.bytes))
        return KV_FAIL(err, KV_CORRUPT, "page: belongs to another state directory");
    if (found.count != want->count)
        return KV_FAIL(err, KV_CORRUPT, "page: count %u, expected %u", found.count, want->count);
    if (found.position != want->position)
        return KV_FAIL(err, KV_CORRUPT, "page: position %u, expected %u", found.position,
                       want->position);
    if (found.generation != want->generation)
        return KV_FAIL(err, KV_CORRUPT, "page: generation %llu, expected %llu",
                       (unsigned long long)found.generation, (unsigned long long)want->generation);
    if (!kv_id_equal(found.user.bytes, want->user.bytes))
        return KV_FAIL(err, KV_CORRUPT, "page: belongs to another user");
    if (memcmp(found.model.bytes, want->model.bytes, sizeof(found.model.bytes)) != 0)
        return KV_FAIL(err, KV_CORRUPT, "page: made by another model");
    if (memcmp(found.chain.bytes, want->chain.bytes, sizeof(found.chain.bytes)) != 0)
        return KV_FAIL(err, KV_CORRUPT, "page: stands after other tokens");
    return KV_OK;
}

kv_status kv_page_verify(const struct kv_layout *layout, const uint8_t *page,
                         const struct kv_page_header *want, struct kv_error *err)
{
    const kv_status status = kv_page_compare(layout, page, want, err);
    return status == KV_OK ? check_sum(layout, page, err) : status;
}

kv_status kv_page_decode(const struct kv_layout *layout, const uint8_t *page,
                         struct kv_page_header *ret_header, struct kv_error *err)
{
    kv_status status = check_bounds(layout, page, err);
    if (status == KV_OK) status = check_sum(layout, page, err);
    if (status == KV_OK) kv_page_peek(page, ret_header);
    return status;
}

void kv_page_copy(const struct kv_layout *layout, const uint8_t *page, uint32_t count, uint8_t *to)
{
    assert(count <= KV_PAGE_TOKENS);
    memset(to, 0, layout->page_bytes);
    memcpy(to, page, KV_PAGE_IDS_OFFSET + 4u * count);
    for (uint32_t i = 0; i < layout->source_count; i++) {
        const struct kv_source *source = &layout->sources[i];
        const size_t have = count / source->ratio;
        memcpy(to + layout->main_offset[i], page + layout->main_offset[i],
               have * source->main_bytes);
        memcpy(to + layout->index_offset[i], page + layout->index_offset[i],
               have * source->index_bytes);
    }
}

/* ---- encryption ---- */

/* The header with zeros for checksum and tag. */
static void about_of(const uint8_t *page, uint8_t about[KV_PAGE_HEADER_BYTES])
{
    memcpy(about, page, KV_PAGE_HEADER_BYTES);
    memset(about + AT_CHECKSUM, 0, 4);
    memset(about + AT_TAG, 0, KV_TAG_BYTES);
}

void kv_page_encrypt(struct kv_aead *aead, const struct kv_layout *layout,
                     const uint8_t key[KV_KEY_BYTES], const struct kv_page_cipher *cipher,
                     const uint8_t *from, uint8_t *to)
{
    uint8_t about[KV_PAGE_HEADER_BYTES];
    assert(cipher->key_id > 0);
    memcpy(to, from, KV_PAGE_HEADER_BYTES);
    memset(to + AT_CIPHER, 0, KV_PAGE_HEADER_BYTES - AT_CIPHER);
    to[AT_CIPHER] = CIPHER_AES_256_GCM;
    kv_store32(to + AT_KEY_ID, cipher->key_id);
    kv_store32(to + AT_NONCE, cipher->ssd_page);
    kv_store64(to + AT_NONCE + 4, kv_load64(from + AT_GENERATION));
    memcpy(to + AT_RUN, cipher->run, sizeof(cipher->run));
    about_of(to, about);
    kv_aead_seal(aead, &(struct kv_aead_with){key, to + AT_NONCE, about, sizeof(about)},
                 from + KV_PAGE_HEADER_BYTES, layout->page_bytes - KV_PAGE_HEADER_BYTES,
                 to + KV_PAGE_HEADER_BYTES, to + AT_TAG);
    kv_store32(to + AT_CHECKSUM, page_checksum(layout, to));
}

kv_status kv_page_decrypt(struct kv_aead *aead, const struct kv_layout *layout,
                          const uint8_t key[KV_KEY_BYTES], uint8_t *page, struct kv_error *err)
{
    uint8_t about[KV_PAGE_HEADER_BYTES];
    about_of(page, about);
    const struct kv_aead_with with = {key, page + AT_NONCE, about, sizeof(about)};
    if (!kv_aead_open(aead, &with, page + KV_PAGE_HEADER_BYTES,
                      layout->page_bytes - KV_PAGE_HEADER_BYTES, page + KV_PAGE_HEADER_BYTES,
                      page + AT_TAG))
        return KV_FAIL(err, KV_CORRUPT, "page: damaged, or encrypted with another key");
    memset(page + AT_CIPHER, 0, KV_PAGE_HEADER_BYTES - AT_CIPHER);
    return KV_OK;
}

void kv_page_clear_after(const struct kv_layout *layout, uint8_t *page, uint32_t count)
{
    assert(count <= KV_PAGE_TOKENS);
    memset(page + KV_PAGE_IDS_OFFSET + 4u * count, 0, 4u * (KV_PAGE_TOKENS - count));
    for (uint32_t i = 0; i < layout->source_count; i++) {
        const struct kv_source *source = &layout->sources[i];
        const uint32_t have = count / source->ratio;
        const size_t gone = KV_PAGE_TOKENS / source->ratio - have;
        memset(page + layout->main_offset[i] + (size_t)have * source->main_bytes, 0,
               gone * source->main_bytes);
        memset(page + layout->index_offset[i] + (size_t)have * source->index_bytes, 0,
               gone * source->index_bytes);
    }
    const uint32_t rows_end = KV_PAGE_ROWS_OFFSET + layout->rows_bytes_per_page;
    memset(page + rows_end, 0, layout->page_bytes - rows_end);
}
