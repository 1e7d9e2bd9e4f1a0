#pragma once

/* The daemon's disk (disk.h): io_uring, or a small pool of pread/pwrite threads where the kernel
 * refuses io_uring (seccomp, sysctl); kv_disk_backend() names which one runs.  At most `depth` ops
 * are with the kernel; more are queued in order inside (owners bound their number).
 * Owned by: as disk.h says. */

#include "kvstore/base/disk.h"

enum kv_ring_choice { KV_RING_AUTO, KV_RING_URING, KV_RING_POOL };

kv_status kv_ring_create(uint32_t depth, enum kv_ring_choice choice, struct kv_disk **ret_disk,
                         struct kv_error *err) KV_MUST_CHECK;
