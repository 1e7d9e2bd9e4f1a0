#pragma once

/*
 * The file DIR/superblock: what a state directory is (docs/format.md).  Two equal copies of 4 KiB,
 * so that one damaged sector loses nothing.  A copy, by offset:
 *
 *     0  magic "KVSUPER\n"
 *     8  u32 checksum: CRC-32C of bytes 12 .. 4096
 *    12  u32 layout version
 *    16  directory id, 16 B: random
 *    32  u32 page_bytes
 *    36  u32 window_tokens
 *    40  u64 segment_bytes
 *    48  u64 features: one bit for each addition that a reader must know
 *    56  u64 created_ms: wall time
 *    64  with KV_FEATURE_ENCRYPTION: id (8 B), nonce (12 B) and tag (16 B) of the master key
 *   100  the same of the next one, while it takes its place; else zeros
 *   136  zeros
 *
 * Magic, checksum and version stand at these places in every version to come; the rest is version
 * 1's.  Pure; any thread.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/key_record.h"

#include <stdint.h>

/* Of everything in a state directory: superblock, segments, pages, records. */
#define KV_LAYOUT_VERSION 1u

#define KV_SUPERBLOCK_COPY_BYTES 4096u
#define KV_SUPERBLOCK_BYTES (2u * KV_SUPERBLOCK_COPY_BYTES)

/* Bits of `features` that this build knows. */
#define KV_FEATURE_SEGMENTS 1ull   /* Segment records: a start reads no trees. */
#define KV_FEATURE_ENCRYPTION 2ull /* Pages may be encrypted; records K. */
#define KV_FEATURE_QUARANTINE 4ull /* Records Q. */
#define KV_FEATURE_FORKS 16ull     /* Sessions and nodes of version 2. */
#define KV_FEATURE_HISTORY 32ull   /* Records T H, D and L. */
#define KV_FEATURE_QUOTAS 64ull    /* Records Y and B. */
#define KV_FEATURE_PLAN_TTL 128ull /* Sessions whose ttl_ms is 0. */
#define KV_FEATURES_KNOWN                                                                          \
    (KV_FEATURE_SEGMENTS | KV_FEATURE_ENCRYPTION | KV_FEATURE_QUARANTINE | KV_FEATURE_FORKS |      \
     KV_FEATURE_HISTORY | KV_FEATURE_QUOTAS | KV_FEATURE_PLAN_TTL)

struct kv_superblock {
    struct kv_directory_id id;
    uint32_t page_bytes;
    uint32_t window_tokens;
    uint64_t segment_bytes;
    uint64_t features;
    uint64_t created_ms;
    /* With KV_FEATURE_ENCRYPTION: of the master key, and of the one that takes its place. */
    struct kv_key_check master, next_master;
    bool has_next_master;
};

/* Writes both copies. */
void kv_superblock_encode(const struct kv_superblock *superblock,
                          uint8_t bytes[KV_SUPERBLOCK_BYTES]);

/* The first copy that is whole.  KV_CORRUPT: neither is; KV_INVALID: it is of another layout
 * version, which is then all that is known.  *ret_version is set unless KV_CORRUPT; *ret_damaged:
 * copies that are not what encode writes.  Features are not judged. */
kv_status kv_superblock_decode(const uint8_t bytes[KV_SUPERBLOCK_BYTES],
                               struct kv_superblock *ret_superblock, uint32_t *ret_version,
                               uint32_t *ret_damaged) KV_MUST_CHECK;
