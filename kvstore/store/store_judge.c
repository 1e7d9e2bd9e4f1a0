/*
 * Which master key a directory is under, before anything of it is changed.
 *
 * The superblock says so by a check that only this key can have made, and nothing else is opened to
 * compare it.  Only where that is not enough the manifest is read: after a rotation that was cut
 * off the superblock names two keys, and after one that was lost with the last batches it names the
 * wrong one.  Then the data keys say under which they are.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/store_internal.h"

#include <stdio.h>
#include <string.h>

const char *kv_keys_source(const struct kv_store_options *options)
{
    return options->encryption.source == NULL ? "the caller" : options->encryption.source;
}

kv_status kv_keys_check_of(const struct kv_store_options *options,
                           const struct kv_directory_id *directory, struct kv_key_check *ret_check,
                           struct kv_error *err)
{
    struct kv_aead *aead = NULL;
    if (options->encryption.master == NULL)
        return KV_FAIL(err, KV_INVALID, "encryption needs a master key");
    kv_status status = kv_aead_create(&aead, err);
    if (status == KV_OK)
        status = kv_key_check_make(aead, options->encryption.master, directory, ret_check, err);
    kv_aead_destroy(aead);
    return status;
}

static kv_status first_key(void *context, const struct kv_manifest_put *put)
{
    struct kv_record_key *record = context;
    if (kv_record_key_decode(put->value, put->value_bytes, record) != KV_OK) return KV_OK;
    return KV_SHUTDOWN; /* One is enough: they are all under the same. */
}

/* KV_MISS: there is none, or it cannot be read here; whoever opens the manifest will find out. */
static kv_status look(const struct kv_store_options *options, struct kv_master_id *ret_master)
{
    char path[512];
    struct kv_manifest *manifest = options->manifest, *opened = NULL;
    struct kv_record_key record;
    (void)snprintf(path, sizeof(path), "%s/manifest", options->dir);
    if (manifest == NULL && kv_manifest_open_read(path, &opened, NULL, NULL) != KV_OK)
        return KV_MISS;
    if (manifest == NULL) manifest = opened;
    const kv_status seen =
        kv_manifest_scan_now(manifest, (const uint8_t *)"K", 1, first_key, &record, NULL);
    kv_manifest_close(opened);
    if (seen != KV_SHUTDOWN) return KV_MISS;
    *ret_master = record.master;
    return KV_OK;
}

static bool is_same(const struct kv_master_id *a, const struct kv_master_id *b)
{
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

static kv_status refuse_half(const struct kv_store_options *options, bool took_place,
                             const char *is, const char *has, struct kv_error *err)
{
    return KV_FAIL(err, KV_INVALID,
                   "a key rotation of '%s' was cut off %s: its keys are under master key %s, %s "
                   "holds %s: start it with the %s key",
                   options->dir, took_place ? "when it was done" : "before it was done", is,
                   kv_keys_source(options), has, took_place ? "new" : "old");
}

/* The superblock names a key that is not the one given, or two. */
static kv_status judge_by_records(const struct kv_store_options *options,
                                  const struct kv_superblock *superblock, bool is_named,
                                  struct kv_error *err)
{
    char is[KV_MASTER_ID_TEXT_BYTES], has[KV_MASTER_ID_TEXT_BYTES];
    const struct kv_master_id given = kv_master_id_of(options->encryption.master);
    struct kv_master_id found = superblock->master.master;
    const kv_status looked = look(options, &found);
    if (looked == KV_OK ? is_same(&found, &given) : is_named) return KV_OK;
    kv_master_id_text(&found, is);
    kv_master_id_text(&given, has);
    if (is_named)
        return refuse_half(options, is_same(&found, &superblock->next_master.master), is, has, err);
    return KV_FAIL(err, KV_INVALID,
                   "state directory '%s' is encrypted with master key %s, and %s holds key %s: put "
                   "the right one there",
                   options->dir, is, kv_keys_source(options), has);
}

kv_status kv_keys_judge(const struct kv_store_options *options,
                        const struct kv_superblock *superblock, struct kv_error *err)
{
    const uint8_t *master = options->encryption.master;
    char want[KV_MASTER_ID_TEXT_BYTES];
    struct kv_aead *aead = NULL;
    if ((superblock->features & KV_FEATURE_ENCRYPTION) == 0) return KV_OK;
    kv_master_id_text(&superblock->master.master, want);
    if (master == NULL)
        return KV_FAIL(err, KV_INVALID,
                       "state directory '%s' is encrypted: set ssd.master_key_file or "
                       "ssd.master_key_credential to where its master key %s is",
                       options->dir, want);
    const kv_status status = kv_aead_create(&aead, err);
    if (status != KV_OK) return status;
    const bool is_now = kv_key_check_is(aead, master, &superblock->id, &superblock->master);
    const bool is_next = superblock->has_next_master &&
                         kv_key_check_is(aead, master, &superblock->id, &superblock->next_master);
    kv_aead_destroy(aead);
    if (is_now && !superblock->has_next_master) return KV_OK;
    return judge_by_records(options, superblock, is_now || is_next, err);
}
