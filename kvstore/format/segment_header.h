#pragma once

/*
 * First 4 KiB of a segment file (docs/format.md).  Layout version 1, by offset:
 *
 *     0  magic "KVSEGM1\n"
 *     8  u32 checksum: CRC-32C of bytes 12 .. 4096
 *    12  u32 page_bytes
 *    16  u64 segment_bytes: of the file, this header included
 *    24  u32 number: the one in the file's name
 *    28  u32 layout version
 *    32  directory id, 16 B: of the superblock
 *    48  zeros
 *
 * Pure; any thread.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"

#include <stdint.h>

#define KV_SEGMENT_HEADER_BYTES 4096u

struct kv_segment_header {
    uint64_t segment_bytes;
    uint32_t page_bytes;
    uint32_t number;
    struct kv_directory_id directory;
};

void kv_segment_header_encode(const struct kv_segment_header *header,
                              uint8_t bytes[KV_SEGMENT_HEADER_BYTES]);

/* KV_MISS: all zeros, as a crash between reserving and writing leaves it; KV_INVALID: whole, of
 * another layout version, which is then all that *ret_version says (1 with KV_OK); KV_CORRUPT:
 * anything else that encode does not produce. */
kv_status kv_segment_header_decode(const uint8_t bytes[KV_SEGMENT_HEADER_BYTES],
                                   struct kv_segment_header *ret_header,
                                   uint32_t *ret_version) KV_MUST_CHECK;
