#pragma once

/*
 * Keys as they are stored (docs/format.md): the record `K` with a user's data key under the master
 * key, the salt of a user under that data key, and what the superblock says of the master key.
 *
 * Key "K" user(16) key id u32 BE, 21 bytes.  Value, 73 bytes, by offset:
 *
 *     0  version 1
 *     1  master key id, 8 B
 *     9  nonce, 12 B: random
 *    21  data key, 32 B, by AES-256-GCM
 *    53  tag, 16 B
 *    69  checksum
 *
 * Every use has a key of its own, derived from the master key or the data key; what a sealed thing
 * belongs to is authenticated with it.  No key is in plain in any of these.  Functions with a
 * struct kv_aead: its thread; others are pure.
 */

#include "kvstore/base/aead.h"
#include "kvstore/format/ids.h"

#define KV_MASTER_ID_BYTES 8u
#define KV_RUN_BYTES 16u
#define KV_SALT_BYTES 32u

/* Tells master keys apart, and nothing of them. */
struct kv_master_id {
    uint8_t bytes[KV_MASTER_ID_BYTES];
};
#define KV_MASTER_ID_TEXT_BYTES (2 * KV_MASTER_ID_BYTES + 1)

/* Only who has the master key can make it.  In the superblock: id, nonce, tag, 36 B. */
struct kv_key_check {
    struct kv_master_id master;
    uint8_t nonce[KV_NONCE_BYTES];
    uint8_t tag[KV_TAG_BYTES];
};
#define KV_KEY_CHECK_BYTES 36u

struct kv_record_key {
    struct kv_master_id master; /* Which one opens it. */
    uint8_t nonce[KV_NONCE_BYTES];
    uint8_t wrapped[KV_KEY_BYTES];
    uint8_t tag[KV_TAG_BYTES];
};
#define KV_RECORD_KEY_BYTES 73u
#define KV_KEY_KEY_BYTES 21u

/* Whose a data key is. */
struct kv_key_owner {
    struct kv_directory_id directory;
    struct kv_user_id user;
    uint32_t key_id; /* From 1. */
};

struct kv_master_id kv_master_id_of(const uint8_t master[KV_KEY_BYTES]);
void kv_master_id_text(const struct kv_master_id *id, char text[KV_MASTER_ID_TEXT_BYTES]);

kv_status kv_key_check_make(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                            const struct kv_directory_id *directory, struct kv_key_check *ret_check,
                            struct kv_error *err) KV_MUST_CHECK;
bool kv_key_check_is(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                     const struct kv_directory_id *directory,
                     const struct kv_key_check *check) KV_MUST_CHECK;

/* KV_IO: no random nonce. */
kv_status kv_key_wrap(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                      const struct kv_key_owner *owner, const uint8_t data_key[KV_KEY_BYTES],
                      struct kv_record_key *ret_record, struct kv_error *err) KV_MUST_CHECK;
/* False: not under this master key, or another owner's, or damaged. */
bool kv_key_unwrap(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                   const struct kv_key_owner *owner, const struct kv_record_key *record,
                   uint8_t ret_data_key[KV_KEY_BYTES]) KV_MUST_CHECK;

/* Returns KV_RECORD_KEY_BYTES. */
uint32_t kv_record_key_encode(const struct kv_record_key *record,
                              uint8_t value[KV_RECORD_KEY_BYTES]);
/* KV_CORRUPT: length, version or checksum is wrong. */
kv_status kv_record_key_decode(const uint8_t *value, uint32_t bytes,
                               struct kv_record_key *ret_record) KV_MUST_CHECK;
/* Returns KV_KEY_KEY_BYTES. */
uint32_t kv_key_key(const struct kv_user_id *user, uint32_t key_id, uint8_t key[KV_KEY_KEY_BYTES]);
/* False: the key of another kind of record. */
bool kv_key_key_parse(const uint8_t *key, uint32_t key_bytes, struct kv_user_id *ret_user,
                      uint32_t *ret_key_id) KV_MUST_CHECK;

/* A user's salt under the data key, with a nonce that is random. */
struct kv_sealed_salt {
    uint32_t key_id; /* 0: it stands in plain. */
    uint8_t nonce[KV_NONCE_BYTES];
    uint8_t salt[KV_SALT_BYTES];
    uint8_t tag[KV_TAG_BYTES];
};
kv_status kv_salt_seal(struct kv_aead *aead, const uint8_t data_key[KV_KEY_BYTES],
                       const struct kv_key_owner *owner, const uint8_t salt[KV_SALT_BYTES],
                       struct kv_sealed_salt *ret_sealed, struct kv_error *err) KV_MUST_CHECK;
bool kv_salt_open(struct kv_aead *aead, const uint8_t data_key[KV_KEY_BYTES],
                  const struct kv_key_owner *owner, const struct kv_sealed_salt *sealed,
                  uint8_t ret_salt[KV_SALT_BYTES]) KV_MUST_CHECK;

/* The key of pages that were written under `data_key` in one run of a daemon. */
void kv_page_key(const uint8_t data_key[KV_KEY_BYTES], const uint8_t run[KV_RUN_BYTES],
                 uint8_t ret_key[KV_KEY_BYTES]);
