#pragma once

/* The master key, from a file or a credential of systemd's.  Blocking; any thread. */

#include "kvstore/base/aead.h"

/* 32 bytes, or 64 hexadecimal digits and perhaps a newline.  KV_INVALID, in one sentence: not
 * there, no regular file, open to others than its owner, of another length, nothing but zeros, or
 * below `dir`, what it opens (NULL: anywhere).  ret_key lies in memory for keys (secret.h). */
kv_status kv_key_file_read(const char *path, const char *dir, uint8_t ret_key[KV_KEY_BYTES],
                           struct kv_error *err) KV_MUST_CHECK;
/* The credential `name` in $CREDENTIALS_DIRECTORY. */
kv_status kv_key_credential_read(const char *name, uint8_t ret_key[KV_KEY_BYTES],
                                 struct kv_error *err) KV_MUST_CHECK;
