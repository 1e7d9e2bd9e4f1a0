/*
 * Keys as they are stored.
 *
 * AES-256-GCM wraps keys and not AES-KW, because GCM also authenticates what a key belongs to: a
 * record that is put under another user's name, key id or into another directory does not open.
 * Its nonces are random, 96 bits, and each wrap draws one: far below the 2^32 of them that one
 * master key may see.
 */

#include "kvstore/format/key_record.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum { RECORD_VERSION = 1, AT_MASTER = 1, AT_NONCE = 9, AT_WRAPPED = 21, AT_TAG = 53, AT_CRC = 69 };

#define OWNER_BYTES 36u

static void owner_bytes(const struct kv_key_owner *owner, uint8_t bytes[OWNER_BYTES])
{
    memcpy(bytes, owner->directory.bytes, 16);
    memcpy(bytes + 16, owner->user.bytes, 16);
    kv_store32(bytes + 32, owner->key_id);
}

struct kv_master_id kv_master_id_of(const uint8_t master[KV_KEY_BYTES])
{
    struct kv_master_id id;
    uint8_t derived[KV_KEY_BYTES];
    kv_derive(master, "cached master key id", NULL, 0, derived);
    memcpy(id.bytes, derived, sizeof(id.bytes));
    explicit_bzero(derived, sizeof(derived));
    return id;
}

void kv_master_id_text(const struct kv_master_id *id, char text[KV_MASTER_ID_TEXT_BYTES])
{
    for (uint32_t i = 0; i < KV_MASTER_ID_BYTES; i++)
        (void)snprintf(text + (size_t)2 * i, 3, "%02x", id->bytes[i]);
}

/* ---- the superblock's ---- */

kv_status kv_key_check_make(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                            const struct kv_directory_id *directory, struct kv_key_check *ret_check,
                            struct kv_error *err)
{
    struct kv_key_check check = {.master = kv_master_id_of(master)};
    uint8_t key[KV_KEY_BYTES], nothing[1] = {0};
    const kv_status status = kv_random(check.nonce, sizeof(check.nonce), err);
    if (status != KV_OK) return status;
    kv_derive(master, "cached master key check", NULL, 0, key);
    kv_aead_seal(aead, &(struct kv_aead_with){key, check.nonce, directory->bytes, 16}, nothing, 0,
                 nothing, check.tag);
    explicit_bzero(key, sizeof(key));
    *ret_check = check;
    return KV_OK;
}

bool kv_key_check_is(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                     const struct kv_directory_id *directory, const struct kv_key_check *check)
{
    const struct kv_master_id id = kv_master_id_of(master);
    uint8_t key[KV_KEY_BYTES], nothing[1] = {0};
    if (memcmp(id.bytes, check->master.bytes, sizeof(id.bytes)) != 0) return false;
    kv_derive(master, "cached master key check", NULL, 0, key);
    const bool is =
        kv_aead_open(aead, &(struct kv_aead_with){key, check->nonce, directory->bytes, 16}, nothing,
                     0, nothing, check->tag);
    explicit_bzero(key, sizeof(key));
    return is;
}

/* ---- data keys ---- */

kv_status kv_key_wrap(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                      const struct kv_key_owner *owner, const uint8_t data_key[KV_KEY_BYTES],
                      struct kv_record_key *ret_record, struct kv_error *err)
{
    struct kv_record_key record = {.master = kv_master_id_of(master)};
    uint8_t key[KV_KEY_BYTES], about[OWNER_BYTES];
    const kv_status status = kv_random(record.nonce, sizeof(record.nonce), err);
    if (status != KV_OK) return status;
    owner_bytes(owner, about);
    kv_derive(master, "cached master key wrap", NULL, 0, key);
    kv_aead_seal(aead, &(struct kv_aead_with){key, record.nonce, about, sizeof(about)}, data_key,
                 KV_KEY_BYTES, record.wrapped, record.tag);
    explicit_bzero(key, sizeof(key));
    *ret_record = record;
    return KV_OK;
}

bool kv_key_unwrap(struct kv_aead *aead, const uint8_t master[KV_KEY_BYTES],
                   const struct kv_key_owner *owner, const struct kv_record_key *record,
                   uint8_t ret_data_key[KV_KEY_BYTES])
{
    uint8_t key[KV_KEY_BYTES], about[OWNER_BYTES];
    owner_bytes(owner, about);
    kv_derive(master, "cached master key wrap", NULL, 0, key);
    const bool is =
        kv_aead_open(aead, &(struct kv_aead_with){key, record->nonce, about, sizeof(about)},
                     record->wrapped, KV_KEY_BYTES, ret_data_key, record->tag);
    explicit_bzero(key, sizeof(key));
    if (!is) explicit_bzero(ret_data_key, KV_KEY_BYTES);
    return is;
}

uint32_t kv_record_key_encode(const struct kv_record_key *record,
                              uint8_t value[KV_RECORD_KEY_BYTES])
{
    value[0] = RECORD_VERSION;
    memcpy(value + AT_MASTER, record->master.bytes, sizeof(record->master.bytes));
    memcpy(value + AT_NONCE, record->nonce, sizeof(record->nonce));
    memcpy(value + AT_WRAPPED, record->wrapped, sizeof(record->wrapped));
    memcpy(value + AT_TAG, record->tag, sizeof(record->tag));
    kv_store32(value + AT_CRC, kv_checksum(value, AT_CRC));
    return KV_RECORD_KEY_BYTES;
}

kv_status kv_record_key_decode(const uint8_t *value, uint32_t bytes,
                               struct kv_record_key *ret_record)
{
    if (bytes != KV_RECORD_KEY_BYTES) return KV_CORRUPT;
    if (kv_load32(value + AT_CRC) != kv_checksum(value, AT_CRC)) return KV_CORRUPT;
    if (value[0] != RECORD_VERSION) return KV_CORRUPT;
    memcpy(ret_record->master.bytes, value + AT_MASTER, sizeof(ret_record->master.bytes));
    memcpy(ret_record->nonce, value + AT_NONCE, sizeof(ret_record->nonce));
    memcpy(ret_record->wrapped, value + AT_WRAPPED, sizeof(ret_record->wrapped));
    memcpy(ret_record->tag, value + AT_TAG, sizeof(ret_record->tag));
    return KV_OK;
}

uint32_t kv_key_key(const struct kv_user_id *user, uint32_t key_id, uint8_t key[KV_KEY_KEY_BYTES])
{
    key[0] = 'K';
    memcpy(key + 1, user->bytes, 16);
    for (uint32_t i = 0; i < 4; i++)
        key[17 + i] = (uint8_t)(key_id >> (24 - 8 * i));
    return KV_KEY_KEY_BYTES;
}

bool kv_key_key_parse(const uint8_t *key, uint32_t key_bytes, struct kv_user_id *ret_user,
                      uint32_t *ret_key_id)
{
    uint32_t key_id = 0;
    if (key_bytes != KV_KEY_KEY_BYTES || key[0] != 'K') return false;
    for (uint32_t i = 0; i < 4; i++)
        key_id = key_id << 8 | key[17 + i];
    if (key_id == 0) return false;
    memcpy(ret_user->bytes, key + 1, 16);
    *ret_key_id = key_id;
    return true;
}

/* ---- what data keys are for ---- */

kv_status kv_salt_seal(struct kv_aead *aead, const uint8_t data_key[KV_KEY_BYTES],
                       const struct kv_key_owner *owner, const uint8_t salt[KV_SALT_BYTES],
                       struct kv_sealed_salt *ret_sealed, struct kv_error *err)
{
    struct kv_sealed_salt sealed = {.key_id = owner->key_id};
    uint8_t key[KV_KEY_BYTES], about[OWNER_BYTES];
    const kv_status status = kv_random(sealed.nonce, sizeof(sealed.nonce), err);
    assert(owner->key_id > 0);
    if (status != KV_OK) return status;
    owner_bytes(owner, about);
    kv_derive(data_key, "cached user salt", NULL, 0, key);
    kv_aead_seal(aead, &(struct kv_aead_with){key, sealed.nonce, about, sizeof(about)}, salt,
                 KV_SALT_BYTES, sealed.salt, sealed.tag);
    explicit_bzero(key, sizeof(key));
    *ret_sealed = sealed;
    return KV_OK;
}

bool kv_salt_open(struct kv_aead *aead, const uint8_t data_key[KV_KEY_BYTES],
                  const struct kv_key_owner *owner, const struct kv_sealed_salt *sealed,
                  uint8_t ret_salt[KV_SALT_BYTES])
{
    uint8_t key[KV_KEY_BYTES], about[OWNER_BYTES];
    if (owner->key_id != sealed->key_id) return false;
    owner_bytes(owner, about);
    kv_derive(data_key, "cached user salt", NULL, 0, key);
    const bool is =
        kv_aead_open(aead, &(struct kv_aead_with){key, sealed->nonce, about, sizeof(about)},
                     sealed->salt, KV_SALT_BYTES, ret_salt, sealed->tag);
    explicit_bzero(key, sizeof(key));
    return is;
}

void kv_page_key(const uint8_t data_key[KV_KEY_BYTES], const uint8_t run[KV_RUN_BYTES],
                 uint8_t ret_key[KV_KEY_BYTES])
{
    kv_derive(data_key, "cached pages", run, KV_RUN_BYTES, ret_key);
}
