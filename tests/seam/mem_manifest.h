#pragma once

/* A manifest in memory, for tests: no thread, and nothing is durable.  A batch takes effect in
 * one message of the reply mailbox and is answered in another; batches in the order posted.
 * Owned by: the thread of that mailbox. */

#include "kvstore/index/manifest.h"

/* kv_manifest_close() frees it. */
struct kv_manifest *mem_manifest_create(void);
