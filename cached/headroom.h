#pragma once

/* What must be there before libraries begin that abort without it.  Owned by: main. */

#include "kvstore/base/status.h"

#include <stdint.h>

/* Threads of libraries, beside the daemon's own: so many, and two more for each core. */
#define HEADROOM_THREADS 24u

/* Address space of libraries, stacks and the heap of each thread, beside the memory that is
 * configured; 1.2 GiB were seen. */
#define HEADROOM_BYTES (3ull << 29)

/* Tries whether this process may have `threads` more threads and `bytes` of memory in all; nothing
 * stays of the try.  KV_INVALID: a limit is too low; the text names it and what is wanted. */
kv_status headroom_check(uint32_t threads, uint64_t bytes, struct kv_error *err) KV_MUST_CHECK;

/* Before a state directory is filled for the first time: has its file system room for a segment?
 * KV_INVALID: it has not.  A directory with segments is not looked at. */
kv_status headroom_segment(const char *state_dir, uint64_t segment_bytes,
                           struct kv_error *err) KV_MUST_CHECK;
