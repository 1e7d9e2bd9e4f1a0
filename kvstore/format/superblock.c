/*
 * Encoding of the superblock.
 *
 * It is read before anything else of a state directory, and by builds older and newer than the one
 * that wrote it, so the version can be told from the first 16 bytes and the checksum whatever the
 * rest means.  The copies are equal: which one is read makes no difference.
 */

#include "kvstore/format/superblock.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <stdbool.h>

enum {
    AT_CHECKSUM = 8,
    AT_VERSION = 12,
    AT_ID = 16,
    AT_PAGE_BYTES = 32,
    AT_WINDOW_TOKENS = 36,
    AT_SEGMENT_BYTES = 40,
    AT_FEATURES = 48,
    AT_CREATED = 56,
    AT_MASTER = 64,
    AT_NEXT_MASTER = AT_MASTER + KV_KEY_CHECK_BYTES,
    AT_ZEROS = AT_NEXT_MASTER + KV_KEY_CHECK_BYTES,
};

static const uint8_t magic[8] = {'K', 'V', 'S', 'U', 'P', 'E', 'R', '\n'};

static uint32_t checksum_of(const uint8_t *copy)
{
    return kv_checksum(copy + AT_VERSION, KV_SUPERBLOCK_COPY_BYTES - AT_VERSION);
}

static void write_check(const struct kv_key_check *check, uint8_t *at)
{
    memcpy(at, check->master.bytes, KV_MASTER_ID_BYTES);
    memcpy(at + KV_MASTER_ID_BYTES, check->nonce, KV_NONCE_BYTES);
    memcpy(at + KV_MASTER_ID_BYTES + KV_NONCE_BYTES, check->tag, KV_TAG_BYTES);
}

static void read_check(const uint8_t *at, struct kv_key_check *check)
{
    memcpy(check->master.bytes, at, KV_MASTER_ID_BYTES);
    memcpy(check->nonce, at + KV_MASTER_ID_BYTES, KV_NONCE_BYTES);
    memcpy(check->tag, at + KV_MASTER_ID_BYTES + KV_NONCE_BYTES, KV_TAG_BYTES);
}

static bool is_zero(const uint8_t *bytes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (bytes[i] != 0) return false;
    return true;
}

void kv_superblock_encode(const struct kv_superblock *superblock,
                          uint8_t bytes[KV_SUPERBLOCK_BYTES])
{
    assert(superblock->page_bytes > 0 && superblock->page_bytes % KV_IO_ALIGN == 0);
    assert(superblock->segment_bytes > superblock->page_bytes);
    assert(superblock->window_tokens > 0);

    memset(bytes, 0, KV_SUPERBLOCK_BYTES);
    memcpy(bytes, magic, sizeof(magic));
    kv_store32(bytes + AT_VERSION, KV_LAYOUT_VERSION);
    memcpy(bytes + AT_ID, superblock->id.bytes, sizeof(superblock->id.bytes));
    kv_store32(bytes + AT_PAGE_BYTES, superblock->page_bytes);
    kv_store32(bytes + AT_WINDOW_TOKENS, superblock->window_tokens);
    kv_store64(bytes + AT_SEGMENT_BYTES, superblock->segment_bytes);
    kv_store64(bytes + AT_FEATURES, superblock->features);
    kv_store64(bytes + AT_CREATED, superblock->created_ms);
    if ((superblock->features & KV_FEATURE_ENCRYPTION) != 0) {
        write_check(&superblock->master, bytes + AT_MASTER);
        if (superblock->has_next_master)
            write_check(&superblock->next_master, bytes + AT_NEXT_MASTER);
    }
    kv_store32(bytes + AT_CHECKSUM, checksum_of(bytes));
    memcpy(bytes + KV_SUPERBLOCK_COPY_BYTES, bytes, KV_SUPERBLOCK_COPY_BYTES);
}

/* As kv_superblock_decode, of one copy. */
static kv_status decode_copy(const uint8_t *copy, struct kv_superblock *ret_superblock,
                             uint32_t *ret_version)
{
    if (memcmp(copy, magic, sizeof(magic)) != 0) return KV_CORRUPT;
    if (kv_load32(copy + AT_CHECKSUM) != checksum_of(copy)) return KV_CORRUPT;
    const uint32_t version = kv_load32(copy + AT_VERSION);
    if (version != KV_LAYOUT_VERSION) {
        *ret_version = version;
        return KV_INVALID;
    }
    const bool is_encrypted = (kv_load64(copy + AT_FEATURES) & KV_FEATURE_ENCRYPTION) != 0;
    const uint32_t zeros_from = is_encrypted ? AT_ZEROS : AT_MASTER;
    if (!is_zero(copy + zeros_from, KV_SUPERBLOCK_COPY_BYTES - zeros_from)) return KV_CORRUPT;
    if (is_encrypted && is_zero(copy + AT_MASTER, KV_KEY_CHECK_BYTES)) return KV_CORRUPT;

    struct kv_superblock superblock = {
        .page_bytes = kv_load32(copy + AT_PAGE_BYTES),
        .window_tokens = kv_load32(copy + AT_WINDOW_TOKENS),
        .segment_bytes = kv_load64(copy + AT_SEGMENT_BYTES),
        .features = kv_load64(copy + AT_FEATURES),
        .created_ms = kv_load64(copy + AT_CREATED),
    };
    if (superblock.page_bytes == 0 || superblock.page_bytes % KV_IO_ALIGN != 0) return KV_CORRUPT;
    if (superblock.segment_bytes <= superblock.page_bytes) return KV_CORRUPT;
    if (superblock.window_tokens == 0) return KV_CORRUPT;
    memcpy(superblock.id.bytes, copy + AT_ID, sizeof(superblock.id.bytes));
    if (is_encrypted) {
        superblock.has_next_master = !is_zero(copy + AT_NEXT_MASTER, KV_KEY_CHECK_BYTES);
        read_check(copy + AT_MASTER, &superblock.master);
        read_check(copy + AT_NEXT_MASTER, &superblock.next_master);
    }
    *ret_superblock = superblock;
    *ret_version = version;
    return KV_OK;
}

kv_status kv_superblock_decode(const uint8_t bytes[KV_SUPERBLOCK_BYTES],
                               struct kv_superblock *ret_superblock, uint32_t *ret_version,
                               uint32_t *ret_damaged)
{
    const uint8_t *second = bytes + KV_SUPERBLOCK_COPY_BYTES;
    const bool equal = memcmp(bytes, second, KV_SUPERBLOCK_COPY_BYTES) == 0;
    kv_status status = decode_copy(bytes, ret_superblock, ret_version);
    *ret_damaged = status == KV_CORRUPT;
    if (status == KV_CORRUPT) status = decode_copy(second, ret_superblock, ret_version);
    /* A second copy that differs from a good first one was damaged or not finished. */
    if (*ret_damaged == 0 && !equal) *ret_damaged = 1;
    if (status == KV_CORRUPT) *ret_damaged = 2;
    return status;
}
