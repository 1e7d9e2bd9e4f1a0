/*
 * Keys of users, and what they open.
 *
 * Without the master key nothing is opened: records of keys are compared with what they name, and
 * the checksums of pages and their headers say whether they are what was written.  With it
 * (--master-key) every key, salt and page is opened, and ids and rows are compared as if nothing
 * were encrypted.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/key_file.h"
#include "kvstore/base/secret.h"
#include "kvstore/format/page.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct dump_key {
    struct kv_user_id user;
    uint32_t key_id;
    bool is_used;  /* A user of that id has a record. */
    uint8_t *data; /* In memory for keys; NULL: not opened. */
};

struct dump_keys {
    struct kv_aead *aead;
    struct kv_secrets *secrets;
    uint8_t *master;       /* NULL: none is given. */
    struct dump_key *keys; /* By user and key id, as in the manifest. */
    uint32_t count, capacity;
};

static bool is_encrypted(const struct dump *dump)
{
    return (dump->superblock.features & KV_FEATURE_ENCRYPTION) != 0;
}

static kv_status take_master(struct dump *dump, struct kv_error *err)
{
    struct dump_keys *keys = dump->keys;
    const struct kv_superblock *superblock = &dump->superblock;
    char has[KV_MASTER_ID_TEXT_BYTES], want[KV_MASTER_ID_TEXT_BYTES];
    kv_status status = kv_secrets_create(KV_KEY_BYTES, &keys->secrets, err);
    if (status != KV_OK || dump->master_key_file == NULL) return status;
    keys->master = kv_secrets_alloc(keys->secrets);
    if (keys->master == NULL) return KV_FAIL(err, KV_NOMEM, "keep the master key");
    status = kv_key_file_read(dump->master_key_file, NULL, keys->master, err);
    if (status != KV_OK) return status;
    if (kv_key_check_is(keys->aead, keys->master, &superblock->id, &superblock->master) ||
        (superblock->has_next_master &&
         kv_key_check_is(keys->aead, keys->master, &superblock->id, &superblock->next_master)))
        return KV_OK;
    const struct kv_master_id given = kv_master_id_of(keys->master);
    kv_master_id_text(&given, has);
    kv_master_id_text(&superblock->master.master, want);
    return KV_FAIL(err, KV_INVALID, "the directory is encrypted with master key %s, '%s' holds %s",
                   want, dump->master_key_file, has);
}

static kv_status visit_key(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct dump_keys *keys = dump->keys;
    struct dump_key key = {.data = NULL};
    struct kv_record_key record;
    if (!kv_key_key_parse(put->key, put->key_bytes, &key.user, &key.key_id) ||
        kv_record_key_decode(put->value, put->value_bytes, &record) != KV_OK) {
        dump_damage(dump, "manifest: a key's record is damaged");
        return KV_OK;
    }
    if (keys->count == keys->capacity) {
        const uint32_t capacity = keys->capacity == 0 ? 16 : 2 * keys->capacity;
        struct dump_key *more = realloc(keys->keys, capacity * sizeof(*more));
        if (more == NULL) return KV_NOMEM;
        keys->keys = more;
        keys->capacity = capacity;
    }
    if (keys->master != NULL) {
        const struct kv_key_owner owner = {dump->superblock.id, key.user, key.key_id};
        key.data = kv_secrets_alloc(keys->secrets);
        if (key.data == NULL) return KV_NOMEM;
        if (!kv_key_unwrap(keys->aead, keys->master, &owner, &record, key.data)) {
            char under[KV_MASTER_ID_TEXT_BYTES];
            kv_master_id_text(&record.master, under);
            dump_damage(dump,
                        "manifest: key %" PRIu32 " of a user, under master key %s, does not "
                        "open with the one that is given",
                        key.key_id, under);
            kv_secrets_free(keys->secrets, key.data);
            key.data = NULL;
        }
    }
    keys->keys[keys->count++] = key;
    return KV_OK;
}

kv_status dump_keys_read(struct dump *dump, struct kv_error *err)
{
    if (!is_encrypted(dump)) return KV_OK;
    dump->keys = calloc(1, sizeof(*dump->keys));
    if (dump->keys == NULL) return KV_FAIL(err, KV_NOMEM, "read keys");
    kv_status status = kv_aead_create(&dump->keys->aead, err);
    if (status == KV_OK) status = take_master(dump, err);
    if (status == KV_OK)
        status =
            kv_manifest_scan_now(dump->manifest, (const uint8_t *)"K", 1, visit_key, dump, err);
    return status;
}

void dump_keys_close(struct dump *dump)
{
    if (dump->keys == NULL) return;
    kv_secrets_destroy(dump->keys->secrets);
    kv_aead_destroy(dump->keys->aead);
    free(dump->keys->keys);
    free(dump->keys);
    dump->keys = NULL;
}

static struct dump_key *find_key(const struct dump *dump, const struct kv_user_id *user,
                                 uint32_t key_id)
{
    for (uint32_t i = 0; dump->keys != NULL && i < dump->keys->count; i++) {
        struct dump_key *key = &dump->keys->keys[i];
        if (key->key_id == key_id && kv_id_equal(key->user.bytes, user->bytes)) return key;
    }
    return NULL;
}

void dump_keys_user(struct dump *dump, struct dump_user *user)
{
    const struct kv_sealed_salt *sealed = &user->record.sealed;
    user->has_salt = sealed->key_id == 0;
    for (uint32_t i = 0; dump->keys != NULL && i < dump->keys->count; i++)
        dump->keys->keys[i].is_used |= kv_id_equal(dump->keys->keys[i].user.bytes, user->id.bytes);
    if (user->has_salt) return;
    const struct dump_key *key = find_key(dump, &user->id, sealed->key_id);
    if (key == NULL) {
        dump_damage(dump, "manifest: key %" PRIu32 " of user %s has no record", sealed->key_id,
                    user->record.name);
        return;
    }
    if (key->data == NULL) return;
    const struct kv_key_owner owner = {dump->superblock.id, user->id, key->key_id};
    user->has_salt = kv_salt_open(dump->keys->aead, key->data, &owner, sealed, user->record.salt);
    if (!user->has_salt)
        dump_damage(dump, "manifest: the salt of user %s does not open with its key",
                    user->record.name);
}

void dump_keys_check(struct dump *dump)
{
    for (uint32_t i = 0; dump->keys != NULL && i < dump->keys->count; i++)
        if (!dump->keys->keys[i].is_used)
            dump_damage(dump, "manifest: a key of a user without a record");
}

uint32_t dump_keys_count(const struct dump *dump)
{
    return dump->keys == NULL ? 0 : dump->keys->count;
}

bool dump_keys_are_open(const struct dump *dump)
{
    return dump->keys != NULL && dump->keys->master != NULL;
}

kv_status dump_decrypt(struct dump *dump, const struct kv_page_header *header, uint32_t ssd_page,
                       struct kv_error *err)
{
    const struct kv_layout layout = {.page_bytes = dump->superblock.page_bytes};
    const struct kv_page_cipher *cipher = &header->cipher;
    uint8_t *page_key;
    if (cipher->key_id == 0) {
        dump->counts.plain++;
        return KV_OK;
    }
    if (dump->keys == NULL)
        return KV_FAIL(err, KV_CORRUPT, "page: encrypted, in a directory that is not");
    dump->counts.encrypted++;
    if (cipher->ssd_page != ssd_page)
        return KV_FAIL(err, KV_CORRUPT, "page: encrypted for place %" PRIu32, cipher->ssd_page);
    const struct dump_key *key = find_key(dump, &header->user, cipher->key_id);
    if (key == NULL)
        return KV_FAIL(err, KV_CORRUPT, "page: its user has no key %" PRIu32, cipher->key_id);
    if (key->data == NULL) return KV_MISS;
    page_key = kv_secrets_alloc(dump->keys->secrets);
    if (page_key == NULL) return KV_FAIL(err, KV_CORRUPT, "page: no memory to open it");
    kv_page_key(key->data, cipher->run, page_key);
    const kv_status status = kv_page_decrypt(dump->keys->aead, &layout, page_key, dump->page, err);
    kv_secrets_free(dump->keys->secrets, page_key);
    return status;
}

kv_status dump_page_cipher(struct dump *dump, uint32_t ssd_page, struct kv_page_cipher *ret_cipher)
{
    const int fd = dump_segment_open(dump, ssd_page / dump->pages_per_segment);
    struct kv_page_header header;
    if (fd < 0) return KV_IO;
    const ssize_t got = pread(fd, dump->page, KV_IO_ALIGN, (off_t)dump_offset(dump, ssd_page));
    if (got != (ssize_t)KV_IO_ALIGN) return KV_IO;
    kv_page_peek(dump->page, &header);
    *ret_cipher = header.cipher;
    return KV_OK;
}
