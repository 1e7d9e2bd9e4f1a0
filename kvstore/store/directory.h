#pragma once

/* The superblock of a state directory on disk: made once, checked before anything else is opened.
 * Blocking; at start and in tools. */

#include "kvstore/base/disk.h"
#include "kvstore/format/superblock.h"

/* KV_OK; KV_MISS: there is none, and nothing else of a store either; KV_INVALID, in one sentence:
 * another layout version (one without a superblock is version 0) or unknown features; KV_CORRUPT:
 * both copies are damaged; KV_IO.  *ret_damaged: how many copies are. */
kv_status kv_directory_read(struct kv_disk *disk, const char *dir,
                            struct kv_superblock *ret_superblock, uint32_t *ret_damaged,
                            struct kv_error *err) KV_MUST_CHECK;

/* For the daemon.  A new directory gets a superblock with a fresh id (`want`'s, if it has one) and
 * what `want` says of shapes and time; an old one with segments is compared with it (KV_INVALID
 * names field, found and wanted), and a damaged copy is replaced.  Nothing is changed in a
 * directory that is refused. */
kv_status kv_directory_open(struct kv_disk *disk, const char *dir, const struct kv_superblock *want,
                            struct kv_superblock *ret_superblock,
                            struct kv_error *err) KV_MUST_CHECK;

/* Sets bits of `features` in the superblock of `dir`, durably; *superblock is the one that stands
 * there and then has them.  Blocking, a few milliseconds; once in the life of a directory, by
 * whoever writes the first byte of an addition.  KV_IO: as it was. */
kv_status kv_directory_add_features(struct kv_disk *disk, const char *dir, uint64_t features,
                                    struct kv_superblock *superblock,
                                    struct kv_error *err) KV_MUST_CHECK;
