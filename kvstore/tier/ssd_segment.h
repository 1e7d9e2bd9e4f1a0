#pragma once

/* Segment files of the SSD tier: their names and headers, and opening them.  Blocking, at start;
 * new ones are made by ssd_make.h.  Owned by: shard. */

#include "kvstore/base/disk.h"
#include "kvstore/format/ids.h"

#include <stdint.h>

#define KV_SSD_SEGMENT_NUMBER_MAX 999999u /* Six digits in the name. */
#define KV_SSD_SEGMENT_NAME_BYTES 24u

struct kv_ssd_place {
    struct kv_disk *disk;
    int dir_fd;
    const char *dir; /* For messages. */
    uint64_t segment_bytes;
    uint32_t page_bytes;
    struct kv_directory_id directory;
};

/* Opens it, and completes one that a crash left without a header, that was cut, or whose header is
 * damaged: the header says nothing that the name and the settings do not, and each page is verified
 * by itself.  *ret_valid_bytes: how much of the file was there before; pages beyond are gone.
 * *ret_repaired: it was not whole.  KV_INVALID: made with another page or segment size, by
 * another layout version, for another directory, or under another name; such a file is left as it
 * is. */
kv_status kv_ssd_segment_open(const struct kv_ssd_place *place, uint32_t number, int *ret_fd,
                              uint64_t *ret_valid_bytes, bool *ret_repaired,
                              struct kv_error *err) KV_MUST_CHECK;

void kv_ssd_segment_name(uint32_t number, char name[KV_SSD_SEGMENT_NAME_BYTES]);
/* Its header; KV_SEGMENT_HEADER_BYTES. */
void kv_ssd_segment_header(const struct kv_ssd_place *place, uint32_t number, uint8_t *bytes);

/* False: not the name of a segment file. */
bool kv_ssd_segment_parse(const char *name, uint32_t *ret_number);
