#pragma once

/*
 * Encryption: AES-256-GCM, keys that follow from keys, and random bytes.
 *
 * A context belongs to one thread.  While it is not at work it holds no key.
 */

#include "kvstore/base/status.h"

#include <stdint.h>

#define KV_KEY_BYTES 32u
#define KV_NONCE_BYTES 12u
#define KV_TAG_BYTES 16u

struct kv_aead;

/* KV_NOMEM; KV_INVALID: this OpenSSL has no AES-256-GCM. */
kv_status kv_aead_create(struct kv_aead **ret_aead, struct kv_error *err) KV_MUST_CHECK;
void kv_aead_destroy(struct kv_aead *aead);

/* What a message is sealed with.  A nonce is used once with a key; `about` is authenticated and not
 * encrypted. */
struct kv_aead_with {
    const uint8_t *key;   /* KV_KEY_BYTES */
    const uint8_t *nonce; /* KV_NONCE_BYTES */
    const uint8_t *about;
    uint32_t about_bytes;
};

/* `to` has as many bytes as `from`, and may be the same. */
void kv_aead_seal(struct kv_aead *aead, const struct kv_aead_with *with, const uint8_t *from,
                  uint32_t bytes, uint8_t *to, uint8_t ret_tag[KV_TAG_BYTES]);
/* False: not what was sealed with these; what is in `to` means nothing then. */
bool kv_aead_open(struct kv_aead *aead, const struct kv_aead_with *with, const uint8_t *from,
                  uint32_t bytes, uint8_t *to, const uint8_t tag[KV_TAG_BYTES]) KV_MUST_CHECK;

/* HMAC-SHA-256 of label (with its zero) and data, under `key`: a key for one use.  Pure; any
 * thread. */
void kv_derive(const uint8_t key[KV_KEY_BYTES], const char *label, const void *data,
               uint32_t data_bytes, uint8_t ret_key[KV_KEY_BYTES]);

/* Fit for keys and nonces; KV_IO. */
kv_status kv_random(void *bytes, uint32_t count, struct kv_error *err) KV_MUST_CHECK;
