#pragma once

/*
 * The record of a place on SSD whose bytes were wrong: it is given to nobody any more
 * (docs/format.md).  Stands under "Q" page n (u32 BE); integers of the value little-endian:
 *
 *     0  version
 *     1  u32 page n of the directory
 *     5  u64 generation of the write that was expected there
 *    13  u64 found_ms: wall time
 *    21  u32 owners: checkpoints whose rows were in it
 *    25  u8 found by: 1 a read, 2 the scrub
 *    26  u8 cause length n, 1 to 120
 *    27  cause: printable ASCII, no token id and no name
 *    27 + n  u32 checksum of all before it
 *
 * Pure; any thread.
 */

#include "kvstore/base/status.h"

#include <stdint.h>

#define KV_QUARANTINE_CAUSE_MAX 120u
#define KV_RECORD_QUARANTINE_MAX 152u
#define KV_KEY_QUARANTINE_BYTES 5u

enum kv_found_by { KV_FOUND_BY_READ = 1, KV_FOUND_BY_SCRUB = 2 };

struct kv_record_quarantine {
    uint32_t ssd_page;
    uint64_t generation;
    uint64_t found_ms;
    uint32_t owners;
    uint8_t found_by;
    char cause[KV_QUARANTINE_CAUSE_MAX + 1];
};

/* "read", "scrub" */
const char *kv_found_by_name(uint8_t found_by);

/* Any text as a cause: cut to fit, what is not printable becomes '?', an empty one "damaged". */
void kv_quarantine_cause(const char *text, char ret_cause[KV_QUARANTINE_CAUSE_MAX + 1]);

/* Returns the length.  The cause must be one that kv_quarantine_cause() made. */
uint32_t kv_record_quarantine_encode(const struct kv_record_quarantine *record, uint8_t *buf);
/* KV_CORRUPT: length, version, checksum or a bound is wrong. */
kv_status kv_record_quarantine_decode(const uint8_t *value, uint32_t bytes,
                                      struct kv_record_quarantine *ret_record) KV_MUST_CHECK;
uint32_t kv_key_quarantine(uint32_t ssd_page, uint8_t key[KV_KEY_QUARANTINE_BYTES]);
