#pragma once

/*
 * The file DIR/acknowledged: the number of the last batch of records that was durable
 * (docs/format.md).  Two slots of 4 KiB, written in turn, so that a torn write leaves the other
 * one. A slot, by offset:
 *
 *     0  magic "KVACKED\n"
 *     8  u32 checksum: CRC-32C of bytes 12 .. 4096
 *    12  u32 layout version
 *    16  directory id, 16 B
 *    32  u64 number
 *    40  zeros
 *
 * A slot of zeros was never written.  Pure; any thread.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"

#include <stdint.h>

#define KV_ACKNOWLEDGED_NAME "acknowledged"
#define KV_ACKNOWLEDGED_SLOT_BYTES 4096u
#define KV_ACKNOWLEDGED_BYTES (2u * KV_ACKNOWLEDGED_SLOT_BYTES)

struct kv_acknowledged {
    struct kv_directory_id directory;
    uint64_t number;
};

void kv_acknowledged_encode(const struct kv_acknowledged *acknowledged,
                            uint8_t slot[KV_ACKNOWLEDGED_SLOT_BYTES]);

/* The whole slot with the higher number; *ret_slot is its index, 0 or 1.  KV_MISS: both were never
 * written; KV_CORRUPT: none is whole.  *ret_damaged, always: slots that are neither. */
kv_status kv_acknowledged_decode(const uint8_t bytes[KV_ACKNOWLEDGED_BYTES],
                                 struct kv_acknowledged *ret_acknowledged, uint32_t *ret_slot,
                                 uint32_t *ret_damaged) KV_MUST_CHECK;
