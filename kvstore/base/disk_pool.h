#pragma once

/* A disk of four threads that call pread, pwrite and fdatasync.  Owned by: as disk.h says; for
 * ring.c, which knows when it is needed. */

#include "kvstore/base/disk.h"

kv_status kv_disk_pool_create(struct kv_disk **ret_disk, struct kv_error *err) KV_MUST_CHECK;
