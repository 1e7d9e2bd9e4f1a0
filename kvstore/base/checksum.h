#pragma once

/* The one checksum used on disk, in the pool and on the wire: CRC-32C (Castagnoli), initial value
 * and final xor 0xffffffff, as in iSCSI; crc("123456789") = 0xe3069283.  Hardware (SSE4.2) where
 * the CPU has it, a table otherwise; both give the same value (unit test).  Pure; any thread. */

#include <stddef.h>
#include <stdint.h>

uint32_t kv_checksum(const void *data, size_t count);

/* Continues: kv_checksum(ab) == kv_checksum_more(kv_checksum(a), b). */
uint32_t kv_checksum_more(uint32_t before, const void *data, size_t count);

/* The portable version by name, for the unit test that compares the two. */
uint32_t kv_checksum_portable(uint32_t before, const void *data, size_t count);
