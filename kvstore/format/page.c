/*
 * Encodes and checks the header of a page of rows.
 *
 * Verification compares every field and the checksum of all bytes after it, so a page that passes
 * is the one the index meant: right user, right model, right place in the chain, this write of it.
 * The checksum runs last because the fields name the cause better and cost nothing.
 */

#include "kvstore/format/page.h"

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
    AT_ZEROS = 128, /* Cipher, key, nonce and tag among them. */
};

static uint32_t page_checksum(const struct kv_layout *layout, const uint8_t *page)
{
    return kv_checksum(page + AT_COUNT, layout->page_bytes - AT_COUNT);
}

void kv_page_seal(const struct kv_layout *layout, uint8_t *page,
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
    kv_store32(page + AT_CHECKSUM, page_checksum(layout, page));
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
    for (uint32_t i = AT_ZEROS; i < KV_PAGE_HEADER_BYTES; i++)
        if (page[i] != 0) return KV_FAIL(err, KV_CORRUPT, "page: header byte %u is not zero", i);
    return KV_OK;
}

static kv_status check_sum(const struct kv_layout *layout, const uint8_t *page,
                           struct kv_error *err)
{
    const uint32_t stored = kv_load32(page + AT_CHECKSUM);
    const uint32_t computed = page_checksum(layout, page);
    if (stored == computed) return KV_OK;
    return KV_FAIL(err, KV_CORRUPT, "page: checksum 0x%08x, computed 0x%08x", stored, computed);
}

static void read_fields(const uint8_t *page, struct kv_page_header *header)
{
    header->count = kv_load32(page + AT_COUNT);
    header->position = kv_load32(page + AT_POSITION);
    header->generation = kv_load64(page + AT_GENERATION);
    memcpy(header->user.bytes, page + AT_USER, sizeof(header->user.bytes));
    memcpy(header->model.bytes, page + AT_MODEL, sizeof(header->model.bytes));
    memcpy(header->chain.bytes, page + AT_CHAIN, sizeof(header->chain.bytes));
    memcpy(header->directory.bytes, page + AT_DIRECTORY, sizeof(header->directory.bytes));
}

kv_status kv_page_verify(const struct kv_layout *layout, const uint8_t *page,
                         const struct kv_page_header *want, struct kv_error *err)
{
    kv_status status = check_bounds(layout, page, err);
    if (status != KV_OK) return status;

    struct kv_page_header found;
    read_fields(page, &found);
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
    return check_sum(layout, page, err);
}

kv_status kv_page_decode(const struct kv_layout *layout, const uint8_t *page,
                         struct kv_page_header *ret_header, struct kv_error *err)
{
    kv_status status = check_bounds(layout, page, err);
    if (status == KV_OK) status = check_sum(layout, page, err);
    if (status == KV_OK) read_fields(page, ret_header);
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
