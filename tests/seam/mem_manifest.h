#pragma once

/* A manifest in memory, for tests: no thread, and nothing is durable.  A batch takes effect when
 * the reply mailbox next runs, and is answered the time after; batches in the order posted.
 * Owned by: the thread of that mailbox. */

#include "kvstore/index/manifest.h"

/* kv_manifest_close() frees it. */
struct kv_manifest *mem_manifest_create(void);
