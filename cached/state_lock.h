#pragma once

/* One daemon per state directory.  Owned by: main. */

#include "kvstore/base/status.h"

struct state_lock;

/* Makes the directory if it is missing, locks DIR/lock and writes the process id there and, unless
 * empty, to pid_file.  KV_INVALID: another daemon has it (the text names its pid), or pid_file is
 * a file of something else, which stays as it is; KV_IO: the directory, or pid_file, cannot be
 * written. */
kv_status state_lock_take(const char *dir, const char *pid_file, struct state_lock **ret_lock,
                          struct kv_error *err) KV_MUST_CHECK;

/* Removes pid_file if it still holds this process's id.  NULL is fine. */
void state_lock_release(struct state_lock *lock);
