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

/* Writes `next`, durable when it returns KV_OK, and then *superblock is equal to it; after another
 * status the file may be as it was or as `next` says. */
kv_status kv_directory_replace(struct kv_disk *disk, const char *dir,
                               const struct kv_superblock *next, struct kv_superblock *superblock,
                               struct kv_error *err) KV_MUST_CHECK;

/* Adds a bit of `features` to the superblock, durable when it returns KV_OK; after another status
 * it may have the bit or not.  *superblock: as on disk, and is changed with it. */
kv_status kv_directory_add_feature(struct kv_disk *disk, const char *dir, uint64_t feature,
                                   struct kv_superblock *superblock,
                                   struct kv_error *err) KV_MUST_CHECK;
