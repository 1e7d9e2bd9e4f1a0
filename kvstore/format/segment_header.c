/*
 * Encoding of a segment's header.
 *
 * It says what a reader must know before it trusts an offset: with another page size every page
 * number in the index would point into the middle of somebody else's rows.  It names its directory,
 * so that a file copied from elsewhere is seen before a page of it is.  All zeros decode as
 * "fresh", so that a crash while a segment is made needs no repair code.
 */

#include "kvstore/format/segment_header.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/superblock.h"

#include <assert.h>

#define CHECKSUM_OFFSET 8u
#define CHECKED_OFFSET 12u
#define VERSION_OFFSET 28u
#define DIRECTORY_OFFSET 32u
#define END_OFFSET 48u

static const uint8_t magic[8] = {'K', 'V', 'S', 'E', 'G', 'M', '1', '\n'};

static bool is_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0) return false;
    return true;
}

void kv_segment_header_encode(const struct kv_segment_header *header,
                              uint8_t bytes[KV_SEGMENT_HEADER_BYTES])
{
    assert(header->page_bytes > 0);
    assert(header->segment_bytes > KV_SEGMENT_HEADER_BYTES);

    memset(bytes, 0, KV_SEGMENT_HEADER_BYTES);
    memcpy(bytes, magic, sizeof(magic));
    kv_store32(bytes + 12, header->page_bytes);
    kv_store64(bytes + 16, header->segment_bytes);
    kv_store32(bytes + 24, header->number);
    kv_store32(bytes + VERSION_OFFSET, KV_LAYOUT_VERSION);
    memcpy(bytes + DIRECTORY_OFFSET, header->directory.bytes, sizeof(header->directory.bytes));
    kv_store32(bytes + CHECKSUM_OFFSET,
               kv_checksum(bytes + CHECKED_OFFSET, KV_SEGMENT_HEADER_BYTES - CHECKED_OFFSET));
}

kv_status kv_segment_header_decode(const uint8_t bytes[KV_SEGMENT_HEADER_BYTES],
                                   struct kv_segment_header *ret_header, uint32_t *ret_version)
{
    if (is_zero(bytes, KV_SEGMENT_HEADER_BYTES)) return KV_MISS;
    if (memcmp(bytes, magic, sizeof(magic)) != 0) return KV_CORRUPT;
    const uint32_t want =
        kv_checksum(bytes + CHECKED_OFFSET, KV_SEGMENT_HEADER_BYTES - CHECKED_OFFSET);
    if (kv_load32(bytes + CHECKSUM_OFFSET) != want) return KV_CORRUPT;
    *ret_version = kv_load32(bytes + VERSION_OFFSET);
    if (*ret_version != KV_LAYOUT_VERSION) return KV_INVALID;
    if (!is_zero(bytes + END_OFFSET, KV_SEGMENT_HEADER_BYTES - END_OFFSET)) return KV_CORRUPT;

    struct kv_segment_header header = {
        .page_bytes = kv_load32(bytes + 12),
        .segment_bytes = kv_load64(bytes + 16),
        .number = kv_load32(bytes + 24),
    };
    if (header.page_bytes == 0) return KV_CORRUPT;
    if (header.segment_bytes <= KV_SEGMENT_HEADER_BYTES) return KV_CORRUPT;
    memcpy(header.directory.bytes, bytes + DIRECTORY_OFFSET, sizeof(header.directory.bytes));
    *ret_header = header;
    return KV_OK;
}
