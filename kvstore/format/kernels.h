#pragma once

/*
 * Kernel families by number.  A family is a set of kernels that give the same bits; rows and
 * windows of one family are approximations to another.  The number is the name's first 8 bytes, so
 * that a record names its family without a table.  0: not known, or more than one; equal to no
 * family. Pure; any thread.
 */

#include <stdint.h>
#include <string.h>

#define KV_KERNELS_UNKNOWN 0u
#define KV_KERNELS_NAME_BYTES 9u

static inline uint64_t kv_kernels_tag(const char *name)
{
    uint64_t tag = 0;
    for (uint32_t i = 0; i < 8 && name[i] != '\0'; i++)
        tag |= (uint64_t)(uint8_t)name[i] << (8 * i);
    return tag;
}

/* The name, "unknown" for 0; other bytes than printable ones become '?'. */
static inline const char *kv_kernels_name(uint64_t tag, char name[KV_KERNELS_NAME_BYTES])
{
    uint32_t count = 0;
    for (; count < 8 && (tag >> (8 * count) & 0xff) != 0; count++) {
        const uint8_t byte = (uint8_t)(tag >> (8 * count));
        name[count] = byte > 32 && byte < 127 && byte != '"' && byte != '\\' ? (char)byte : '?';
    }
    name[count] = '\0';
    if (count == 0) memcpy(name, "unknown", sizeof("unknown"));
    return name;
}
