/*
 * Encoding of the file `acknowledged`.
 *
 * It is evidence, so it must not say too much: a slot counts only whole, and of two whole ones the
 * higher number counts, whatever order they were written in.
 */

#include "kvstore/format/acknowledged.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/superblock.h"

#include <stdbool.h>
#include <string.h>

enum { AT_CHECKSUM = 8, AT_VERSION = 12, AT_DIRECTORY = 16, AT_NUMBER = 32, AT_ZEROS = 40 };

static const uint8_t magic[8] = {'K', 'V', 'A', 'C', 'K', 'E', 'D', '\n'};

static uint32_t checksum_of(const uint8_t *slot)
{
    return kv_checksum(slot + AT_VERSION, KV_ACKNOWLEDGED_SLOT_BYTES - AT_VERSION);
}

void kv_acknowledged_encode(const struct kv_acknowledged *acknowledged,
                            uint8_t slot[KV_ACKNOWLEDGED_SLOT_BYTES])
{
    memset(slot, 0, KV_ACKNOWLEDGED_SLOT_BYTES);
    memcpy(slot, magic, sizeof(magic));
    kv_store32(slot + AT_VERSION, KV_LAYOUT_VERSION);
    memcpy(slot + AT_DIRECTORY, acknowledged->directory.bytes,
           sizeof(acknowledged->directory.bytes));
    kv_store64(slot + AT_NUMBER, acknowledged->number);
    kv_store32(slot + AT_CHECKSUM, checksum_of(slot));
}

static bool is_zeros(const uint8_t *bytes, uint32_t from)
{
    for (uint32_t i = from; i < KV_ACKNOWLEDGED_SLOT_BYTES; i++)
        if (bytes[i] != 0) return false;
    return true;
}

static kv_status decode_slot(const uint8_t *slot, struct kv_acknowledged *ret_acknowledged)
{
    if (is_zeros(slot, 0)) return KV_MISS;
    if (memcmp(slot, magic, sizeof(magic)) != 0) return KV_CORRUPT;
    if (kv_load32(slot + AT_CHECKSUM) != checksum_of(slot)) return KV_CORRUPT;
    if (kv_load32(slot + AT_VERSION) != KV_LAYOUT_VERSION) return KV_CORRUPT;
    if (!is_zeros(slot, AT_ZEROS)) return KV_CORRUPT;
    memcpy(ret_acknowledged->directory.bytes, slot + AT_DIRECTORY,
           sizeof(ret_acknowledged->directory.bytes));
    ret_acknowledged->number = kv_load64(slot + AT_NUMBER);
    return KV_OK;
}

kv_status kv_acknowledged_decode(const uint8_t bytes[KV_ACKNOWLEDGED_BYTES],
                                 struct kv_acknowledged *ret_acknowledged, uint32_t *ret_slot,
                                 uint32_t *ret_damaged)
{
    struct kv_acknowledged best = {.number = 0};
    uint32_t slot = 0, damaged = 0;
    bool found = false;
    for (uint32_t i = 0; i < 2; i++) {
        struct kv_acknowledged one;
        const kv_status status = decode_slot(bytes + (size_t)i * KV_ACKNOWLEDGED_SLOT_BYTES, &one);
        damaged += status == KV_CORRUPT;
        if (status != KV_OK || (found && one.number <= best.number)) continue;
        best = one;
        slot = i;
        found = true;
    }
    *ret_damaged = damaged;
    if (!found) return damaged > 0 ? KV_CORRUPT : KV_MISS;
    *ret_acknowledged = best;
    *ret_slot = slot;
    return KV_OK;
}
