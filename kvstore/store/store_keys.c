/*
 * Who can read what: the master key, and the data keys of users.
 *
 * A data key lies in the manifest under the master key, and here in plain.  The superblock knows
 * the master key by a check, so that a daemon with the wrong one is refused before anything else
 * of the directory is opened.
 *
 * A rotation has to change superblock and manifest, which no batch does together.  First the
 * superblock gets the new key's check beside the old one's, then one batch moves all data keys,
 * then the old check goes.  Whatever is cut off, data keys are all under one of the two, each
 * record says under which, and the superblock knows that one: a start with the other is refused by
 * a sentence that says so, and a start with the right one puts the superblock in order.
 *
 * Pages have a key of their own for each run of a daemon, derived from data key and a random run:
 * generations never repeat by themselves, but do in a directory that was put back from a copy, or
 * that lost its last batches to damage, and a nonce must not.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/secret.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/page.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In memory for keys, like the key of a run. */
struct page_key {
    uint8_t run[KV_RUN_BYTES];
    uint8_t key[KV_KEY_BYTES];
    bool is_known;
};

struct user_key {
    uint8_t data[KV_KEY_BYTES];
    struct page_key ours, other; /* Of this run, and of the one that was read last. */
    uint32_t key_id;
    struct user_key *next; /* Older. */
};

/* While users are read. */
struct found_key {
    struct kv_user_id user;
    struct user_key *key;
};

struct kv_keys {
    struct kv_aead *aead;
    struct kv_secrets *secrets;
    struct user_key *masters; /* Its data is the master key; while one is rotated, next: the new. */
    uint8_t run[KV_RUN_BYTES];
    uint32_t count;
    struct found_key *found; /* By user, the newest of each last. */
    uint32_t found_count, found_capacity;
    /* A rotation. */
    bool is_rotating;
    struct kv_key_check new_check;
    kv_rotated_fn *rotated;
    void *context;
};

static struct kv_key_owner owner_of(const struct kv_store *store, const struct kv_user_id *user,
                                    uint32_t key_id)
{
    return (struct kv_key_owner){
        .directory = store->options.superblock.id, .user = *user, .key_id = key_id};
}

const uint8_t *kv_keys_master(const struct kv_store *store)
{
    return store->keys->masters->data;
}

/* ---- start-up ---- */

static kv_status keep_found(struct kv_keys *keys, const struct kv_user_id *user,
                            struct user_key *key)
{
    if (keys->found_count == keys->found_capacity) {
        const uint32_t capacity = keys->found_capacity == 0 ? 16 : 2 * keys->found_capacity;
        struct found_key *found = realloc(keys->found, capacity * sizeof(*found));
        if (found == NULL) return KV_NOMEM;
        keys->found = found;
        keys->found_capacity = capacity;
    }
    keys->found[keys->found_count++] = (struct found_key){*user, key};
    return KV_OK;
}

struct visit {
    struct kv_store *store;
    struct kv_error *err;
};

static kv_status visit_key(void *context, const struct kv_manifest_put *put)
{
    const struct visit *visit = context;
    struct kv_store *store = visit->store;
    struct kv_keys *keys = store->keys;
    struct kv_record_key record;
    struct kv_user_id user;
    uint32_t key_id;
    if (!kv_key_key_parse(put->key, put->key_bytes, &user, &key_id) ||
        kv_record_key_decode(put->value, put->value_bytes, &record) != KV_OK)
        return KV_FAIL(visit->err, KV_CORRUPT, "state directory '%s': a key record is damaged",
                       store->options.dir);
    struct user_key *key = kv_secrets_alloc(keys->secrets);
    if (key == NULL) return KV_FAIL(visit->err, KV_NOMEM, "load keys");
    key->key_id = key_id;
    const struct kv_key_owner owner = owner_of(store, &user, key_id);
    if (!kv_key_unwrap(keys->aead, keys->masters->data, &owner, &record, key->data)) {
        char under[KV_MASTER_ID_TEXT_BYTES];
        kv_secrets_free(keys->secrets, key);
        kv_master_id_text(&record.master, under);
        return KV_FAIL(visit->err, KV_CORRUPT,
                       "the keys in '%s' are under master key %s and do not open with that of "
                       "%s: a rotation was lost, start it with the key before",
                       store->options.dir, under, kv_keys_source(&store->options));
    }
    if (keep_found(keys, &user, key) == KV_OK) return KV_OK;
    kv_secrets_free(keys->secrets, key);
    return KV_FAIL(visit->err, KV_NOMEM, "load keys");
}

static kv_status take_master(struct kv_keys *keys, const uint8_t master[KV_KEY_BYTES],
                             struct kv_error *err)
{
    struct user_key *key = kv_secrets_alloc(keys->secrets);
    if (key == NULL) return KV_FAIL(err, KV_NOMEM, "keep the master key");
    memcpy(key->data, master, KV_KEY_BYTES);
    key->next = keys->masters;
    keys->masters = key;
    return KV_OK;
}

kv_status kv_keys_open(struct kv_store *store, struct kv_error *err)
{
    struct visit visit = {store, err};
    if ((store->options.superblock.features & KV_FEATURE_ENCRYPTION) == 0) return KV_OK;
    assert(store->options.encryption.master != NULL); /* kv_keys_judge() */
    struct kv_keys *keys = calloc(1, sizeof(*keys));
    if (keys == NULL) return KV_FAIL(err, KV_NOMEM, "load keys");
    store->keys = keys; /* Closed with the store, whatever comes. */
    kv_status status = kv_aead_create(&keys->aead, err);
    if (status == KV_OK) status = kv_secrets_create(sizeof(struct user_key), &keys->secrets, err);
    if (status == KV_OK) status = take_master(keys, store->options.encryption.master, err);
    store->options.encryption.master = NULL; /* The caller's. */
    if (status == KV_OK) status = kv_random(keys->run, sizeof(keys->run), err);
    if (status == KV_OK)
        status =
            kv_manifest_scan_now(store->manifest, (const uint8_t *)"K", 1, visit_key, &visit, err);
    if (status == KV_OK && store->options.encryption.on) status = kv_encrypter_open(store, err);
    return status;
}

/* The first one of the user's, in the order of keys in the manifest; found_count: none. */
static uint32_t find_first(const struct kv_keys *keys, const struct kv_user_id *user)
{
    uint32_t low = 0, high = keys->found_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (memcmp(keys->found[middle].user.bytes, user->bytes, sizeof(user->bytes)) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_users(const struct kv_keys *keys, uint32_t i, const struct kv_user_id *user)
{
    return i < keys->found_count && kv_id_equal(keys->found[i].user.bytes, user->bytes);
}

kv_status kv_keys_user_salt(struct kv_store *store, const struct kv_record_user *record,
                            uint8_t ret_salt[KV_SALT_BYTES], struct kv_error *err)
{
    const struct kv_user_id user = kv_user_id_of(record->name);
    struct kv_keys *keys = store->keys;
    if (record->sealed.key_id == 0) {
        memcpy(ret_salt, record->salt, KV_SALT_BYTES);
        return KV_OK;
    }
    for (uint32_t i = keys == NULL ? 0 : find_first(keys, &user);
         keys != NULL && is_users(keys, i, &user); i++) {
        const struct kv_key_owner owner = owner_of(store, &user, keys->found[i].key->key_id);
        if (kv_salt_open(keys->aead, keys->found[i].key->data, &owner, &record->sealed, ret_salt))
            return KV_OK;
    }
    return KV_FAIL(
        err, KV_CORRUPT,
        "state directory '%s': key %u of a user is not there or does not open its record",
        store->options.dir, record->sealed.key_id);
}

static void add_key(struct kv_keys *keys, struct kv_user *user, struct user_key *key)
{
    key->next = user->keys;
    user->keys = key;
    keys->count++;
}

/* Whose salt is in plain has no keys: kv_keys_settle() sees to both. */
void kv_keys_user_found(struct kv_store *store, struct kv_user *user)
{
    struct kv_keys *keys = store->keys;
    if (keys == NULL) return;
    for (uint32_t i = find_first(keys, &user->id); is_users(keys, i, &user->id); i++) {
        if (keys->found[i].key == NULL) continue;
        add_key(keys, user, keys->found[i].key);
        keys->found[i].key = NULL;
    }
}

static kv_status put_deleted(struct kv_batch *batch, const struct kv_user_id *user, uint32_t key_id)
{
    uint8_t name[KV_KEY_KEY_BYTES];
    const struct kv_manifest_put put = {.key = name, .key_bytes = kv_key_key(user, key_id, name)};
    return kv_batch_put(batch, &put);
}

/* A rotation writes keys of users whose own record is on its way; a crash between leaves a key of
 * nobody.  It must not stay: the next rotation would not know of it, and all keys of a directory
 * are under one master key. */
static kv_status drop_ownerless(struct kv_store *store, struct kv_batch **batch)
{
    const struct kv_keys *keys = store->keys;
    kv_status status = KV_OK;
    for (uint32_t i = 0; status == KV_OK && i < keys->found_count; i++) {
        const struct found_key *found = &keys->found[i];
        if (found->key == NULL) continue;
        if (*batch == NULL) *batch = kv_batch_create(store);
        status = *batch == NULL ? KV_NOMEM : put_deleted(*batch, &found->user, found->key->key_id);
    }
    return status;
}

static kv_status make_missing(struct kv_store *store, struct kv_batch **batch)
{
    kv_status status = KV_OK;
    struct kv_user *user = NULL;
    uint32_t bucket = 0;
    while (status == KV_OK && (user = kv_index_user_next(store->index, &bucket, user)) != NULL) {
        if (user->keys != NULL) continue;
        if (*batch == NULL) *batch = kv_batch_create(store);
        status = *batch == NULL ? KV_NOMEM : kv_batch_user(*batch, user, user->name);
    }
    return status;
}

/* Each user has a key, and each key a user, in one batch. */
static kv_status settle_records(struct kv_store *store, struct kv_error *err)
{
    struct kv_batch *batch = NULL;
    kv_status status = drop_ownerless(store, &batch);
    if (status == KV_OK && store->options.encryption.on) status = make_missing(store, &batch);
    if (status != KV_OK) {
        kv_batch_discard(batch);
        return KV_FAIL(err, status, "make keys for the users of '%s'", store->options.dir);
    }
    return batch == NULL ? KV_OK : kv_batch_commit_now(batch, err);
}

/* The superblock with `master` as the only one. */
static kv_status one_master(struct kv_store *store, const struct kv_key_check *master,
                            struct kv_error *err)
{
    struct kv_superblock next = store->options.superblock;
    next.master = *master;
    next.has_next_master = false;
    return kv_directory_replace(store->options.disk, store->options.dir, &next,
                                &store->options.superblock, err);
}

/* It says what records say: a rotation may have been cut off, or lost with the last batches. */
static kv_status judge_superblock(struct kv_store *store, struct kv_error *err)
{
    const struct kv_superblock *superblock = &store->options.superblock;
    const uint8_t *master = kv_keys_master(store);
    const struct kv_master_id id = kv_master_id_of(master);
    const bool is_now = memcmp(id.bytes, superblock->master.master.bytes, sizeof(id.bytes)) == 0;
    struct kv_key_check check;
    if (is_now && !superblock->has_next_master) return KV_OK;
    kv_log(store->options.log, KV_LOG_WARN, "key_rotation_ended",
           "text=\"a rotation of the master key was cut off or lost: the %s key stays\"",
           is_now ? "old" : "given");
    const kv_status status =
        kv_key_check_make(store->keys->aead, master, &superblock->id, &check, err);
    return status == KV_OK ? one_master(store, &check, err) : status;
}

kv_status kv_keys_settle(struct kv_store *store, struct kv_error *err)
{
    struct kv_keys *keys = store->keys;
    if (keys == NULL) return KV_OK;
    kv_status status = settle_records(store, err);
    for (uint32_t i = 0; i < keys->found_count; i++)
        kv_secrets_free(keys->secrets, keys->found[i].key); /* Of nobody. */
    free(keys->found);
    keys->found = NULL;
    keys->found_count = keys->found_capacity = 0;
    if (status == KV_OK) status = judge_superblock(store, err);
    store->options.encryption.source = NULL; /* The caller's. */
    if (status != KV_OK) return status;
    const struct kv_encryption_facts facts = kv_store_encryption(store);
    kv_log(store->options.log, KV_LOG_INFO, "encryption", "on=%d master_key=%s keys=%u", facts.on,
           facts.master, facts.keys);
    if (facts.unlocked_errno != 0)
        kv_log(store->options.log, KV_LOG_WARN, "keys_not_locked",
               "text=\"the kernel does not lock the memory of keys (errno %d, RLIMIT_MEMLOCK?): "
               "they may be swapped out\"",
               facts.unlocked_errno);
    return KV_OK;
}

void kv_keys_close(struct kv_store *store)
{
    struct kv_keys *keys = store->keys;
    if (keys == NULL) return;
    kv_secrets_destroy(keys->secrets);
    kv_aead_destroy(keys->aead);
    free(keys->found);
    free(keys);
    store->keys = NULL;
}

/* ---- keys of a user ---- */

kv_status kv_keys_make(struct kv_store *store, struct kv_user *user)
{
    struct kv_keys *keys = store->keys;
    if (keys == NULL || !store->options.encryption.on || user->keys != NULL) return KV_OK;
    struct user_key *key = kv_secrets_alloc(keys->secrets);
    if (key == NULL) return KV_NOMEM;
    const kv_status status = kv_random(key->data, sizeof(key->data), NULL);
    if (status != KV_OK) {
        kv_secrets_free(keys->secrets, key);
        return status;
    }
    key->key_id = 1;
    add_key(keys, user, key);
    return KV_OK;
}

kv_status kv_keys_seal_user(struct kv_store *store, const struct kv_user *user,
                            struct kv_record_user *record)
{
    const struct user_key *key = user->keys;
    if (key == NULL) {
        memcpy(record->salt, user->salt, sizeof(record->salt));
        return KV_OK;
    }
    const struct kv_key_owner owner = owner_of(store, &user->id, key->key_id);
    return kv_salt_seal(store->keys->aead, key->data, &owner, user->salt, &record->sealed, NULL);
}

kv_status kv_keys_put(struct kv_batch *batch, const struct kv_user *user,
                      const uint8_t master[KV_KEY_BYTES])
{
    struct kv_store *store = kv_batch_store(batch);
    kv_status status = KV_OK;
    for (const struct user_key *key = user->keys; status == KV_OK && key != NULL; key = key->next) {
        const struct kv_key_owner owner = owner_of(store, &user->id, key->key_id);
        uint8_t name[KV_KEY_KEY_BYTES], value[KV_RECORD_KEY_BYTES];
        struct kv_record_key record;
        status = kv_key_wrap(store->keys->aead, master, &owner, key->data, &record, NULL);
        if (status != KV_OK) break;
        const struct kv_manifest_put put = {
            .key = name,
            .key_bytes = kv_key_key(&user->id, key->key_id, name),
            .value = value,
            .value_bytes = kv_record_key_encode(&record, value),
        };
        status = kv_batch_put(batch, &put);
    }
    return status;
}

kv_status kv_keys_delete(struct kv_batch *batch, struct kv_user *user)
{
    kv_status status = KV_OK;
    for (const struct user_key *key = user->keys; status == KV_OK && key != NULL; key = key->next)
        status = put_deleted(batch, &user->id, key->key_id);
    user->keys_gone = true;
    return status;
}

void kv_store_forget_user(struct kv_store *store, struct kv_user *user)
{
    while (user->keys != NULL) {
        struct user_key *key = user->keys;
        user->keys = key->next;
        kv_secrets_free(store->keys->secrets, key);
        store->keys->count--;
    }
    kv_index_user_remove(store->index, user);
}

/* ---- pages ---- */

/* In memory for keys. */
static const uint8_t *page_key(const struct kv_keys *keys, struct user_key *key,
                               const uint8_t run[KV_RUN_BYTES])
{
    struct page_key *page = memcmp(run, keys->run, KV_RUN_BYTES) == 0 ? &key->ours : &key->other;
    if (page->is_known && memcmp(page->run, run, KV_RUN_BYTES) == 0) return page->key;
    kv_page_key(key->data, run, page->key);
    memcpy(page->run, run, KV_RUN_BYTES);
    page->is_known = true;
    return page->key;
}

void kv_keys_encrypt(struct kv_store *store, const struct kv_user *user, uint32_t ssd_page,
                     const uint8_t *from, uint8_t *to)
{
    struct kv_keys *keys = store->keys;
    struct user_key *key = user->keys;
    assert(key != NULL);
    struct kv_page_cipher cipher = {.key_id = key->key_id, .ssd_page = ssd_page};
    memcpy(cipher.run, keys->run, sizeof(cipher.run));
    kv_page_encrypt(keys->aead, &store->layout, page_key(keys, key, keys->run), &cipher, from, to);
    store->counters.pages_encrypted++;
}

kv_status kv_keys_decrypt(struct kv_store *store, const struct kv_user *user, uint32_t ssd_page,
                          uint8_t *bytes, struct kv_error *err)
{
    struct kv_keys *keys = store->keys;
    struct kv_page_header header;
    kv_page_peek(bytes, &header);
    const struct kv_page_cipher *cipher = &header.cipher;
    if (cipher->key_id == 0) {
        store->counters.pages_plain += keys != NULL;
        return KV_OK;
    }
    if (keys == NULL)
        return KV_FAIL(err, KV_CORRUPT, "page: encrypted, in a directory that is not");
    if (cipher->ssd_page != ssd_page)
        return KV_FAIL(err, KV_CORRUPT, "page: encrypted for place %u, found at %u",
                       cipher->ssd_page, ssd_page);
    struct user_key *key = user->keys;
    while (key != NULL && key->key_id != cipher->key_id)
        key = key->next;
    if (key == NULL)
        return KV_FAIL(err, KV_CORRUPT, "page: its user has no key %u", cipher->key_id);
    store->counters.pages_decrypted++;
    return kv_page_decrypt(keys->aead, &store->layout, page_key(keys, key, cipher->run), bytes,
                           err);
}

/* ---- rotation ---- */

struct kv_encryption_facts kv_store_encryption(const struct kv_store *store)
{
    const struct kv_keys *keys = store->keys;
    struct kv_encryption_facts facts = {.on = store->encrypter != NULL};
    if (keys == NULL) return facts;
    const struct kv_master_id id = kv_master_id_of(keys->masters->data);
    facts.is_encrypted = true;
    facts.keys = keys->count;
    facts.unlocked_errno = kv_secrets_unlocked_errno(keys->secrets);
    facts.is_being_rotated = keys->is_rotating;
    kv_master_id_text(&id, facts.master);
    return facts;
}

/* The newer of the two master keys, or the older, stays. */
static void keep_master(struct kv_keys *keys, bool newer)
{
    struct user_key *first = keys->masters, *second = first->next;
    keys->masters = newer ? first : second;
    keys->masters->next = NULL;
    kv_secrets_free(keys->secrets, newer ? second : first);
}

/* Test builds: a kill between two steps. */
static void cut(bool is_planted)
{
#ifdef CACHED_TEST_HOOKS
    if (is_planted) (void)raise(SIGKILL);
#else
    (void)is_planted;
#endif
}

static void moved(void *context, kv_status status)
{
    struct kv_store *store = context;
    struct kv_keys *keys = store->keys;
    struct kv_error err = {0};
    cut(KV_PLANTED(store, ROTATE_CUT_AFTER));
    const struct kv_key_check old = store->options.superblock.master;
    const bool is_known = status == KV_OK || status == KV_BUSY;
    keep_master(keys, status == KV_OK);
    keys->is_rotating = false;
    if (status == KV_OK) store->counters.key_rotations++;
    /* Where nobody knows whether the batch is there, the next start has to find both. */
    if (is_known && one_master(store, status == KV_OK ? &keys->new_check : &old, &err) != KV_OK)
        kv_log(store->options.log, KV_LOG_WARN, "superblock_not_written",
               "cause=\"%s\" text=\"it names both master keys until the next start or rotation\"",
               err.text);
    const struct kv_encryption_facts facts = kv_store_encryption(store);
    kv_log(store->options.log, status == KV_OK ? KV_LOG_INFO : KV_LOG_ERROR, "key_rotated",
           "master_key=%s keys=%u status=%s", facts.master, facts.keys, kv_status_name(status));
    keys->rotated(keys->context, status);
}

/* Every data key, under the new master key; those that are on their way out are not put back. */
static kv_status move_keys(struct kv_store *store, struct kv_batch *batch)
{
    kv_status status = KV_OK;
    struct kv_user *user = NULL;
    uint32_t bucket = 0;
    while (status == KV_OK && (user = kv_index_user_next(store->index, &bucket, user)) != NULL)
        if (!user->keys_gone) status = kv_keys_put(batch, user, store->keys->masters->data);
    return status;
}

kv_status kv_store_rotate_start(struct kv_store *store, const uint8_t master[KV_KEY_BYTES],
                                kv_rotated_fn *done, void *context, struct kv_error *err)
{
    struct kv_keys *keys = store->keys;
    if (keys == NULL) return KV_FAIL(err, KV_INVALID, "the state directory is not encrypted");
    if (keys->is_rotating) return KV_FAIL(err, KV_BUSY, "the key is being rotated");
    if (memcmp(master, keys->masters->data, KV_KEY_BYTES) == 0)
        return KV_FAIL(err, KV_MISS, "it is the key in use");
    struct kv_superblock both = store->options.superblock;
    const struct kv_superblock before = both;
    kv_status status =
        kv_key_check_make(keys->aead, keys->masters->data, &both.id, &both.master, err);
    if (status == KV_OK)
        status = kv_key_check_make(keys->aead, master, &both.id, &both.next_master, err);
    both.has_next_master = true;
    if (status == KV_OK) status = take_master(keys, master, err);
    if (status != KV_OK) return status;
    struct kv_batch *batch = kv_batch_create(store);
    if (batch == NULL || move_keys(store, batch) != KV_OK)
        status = KV_FAIL(err, KV_NOMEM, "rotate the master key");
    if (status == KV_OK)
        status = kv_directory_replace(store->options.disk, store->options.dir, &both,
                                      &store->options.superblock, err);
    if (status != KV_OK) {
        kv_batch_discard(batch);
        keep_master(keys, false);
        store->options.superblock = before;
        return status;
    }
    cut(KV_PLANTED(store, ROTATE_CUT_BEFORE));
    /* Written behind what was posted before it and before what comes, also where only what makes
     * room should be: a user made meanwhile has his key under the new one, and if this batch fails,
     * so does that. */
    kv_batch_barrier(batch);
    keys->is_rotating = true;
    keys->new_check = both.next_master;
    keys->rotated = done;
    keys->context = context;
    kv_batch_post(batch, moved, store);
    return KV_OK;
}
