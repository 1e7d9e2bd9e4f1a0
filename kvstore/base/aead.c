/*
 * AES-256-GCM by OpenSSL's EVP: the only file that encrypts.
 *
 * The algorithm is fetched and the context made once, because each costs an allocation and together
 * as much as a few KiB of a page.  After each message the context gets a key of zeros: its expanded
 * keys lie in OpenSSL's memory, which is neither locked nor left out of dumps, and so stay there no
 * longer than a message takes.  What EVP is asked for here cannot fail once the context stands, so
 * a failure is a bug and not a status.
 */

#include "kvstore/base/aead.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/digest.h"

#include <assert.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES 64u /* Of SHA-256. */

struct kv_aead {
    EVP_CIPHER *cipher;
    EVP_CIPHER_CTX *context;
};

static const uint8_t zeros[KV_KEY_BYTES];

static void must(int rc)
{
    assert(rc == 1);
    (void)rc;
}

static void forget_key(struct kv_aead *aead)
{
    must(EVP_EncryptInit_ex2(aead->context, NULL, zeros, zeros, NULL));
}

kv_status kv_aead_create(struct kv_aead **ret_aead, struct kv_error *err)
{
    struct kv_aead *aead = calloc(1, sizeof(*aead));
    if (aead == NULL) return KV_FAIL(err, KV_NOMEM, "prepare to encrypt");
    aead->cipher = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
    aead->context = EVP_CIPHER_CTX_new();
    if (aead->cipher == NULL || aead->context == NULL ||
        EVP_EncryptInit_ex2(aead->context, aead->cipher, zeros, zeros, NULL) != 1) {
        kv_aead_destroy(aead);
        return KV_FAIL(err, KV_INVALID, "the OpenSSL of this machine has no AES-256-GCM");
    }
    *ret_aead = aead;
    return KV_OK;
}

void kv_aead_destroy(struct kv_aead *aead)
{
    if (aead == NULL) return;
    EVP_CIPHER_CTX_free(aead->context);
    EVP_CIPHER_free(aead->cipher);
    free(aead);
}

void kv_aead_seal(struct kv_aead *aead, const struct kv_aead_with *with, const uint8_t *from,
                  uint32_t bytes, uint8_t *to, uint8_t ret_tag[KV_TAG_BYTES])
{
    EVP_CIPHER_CTX *context = aead->context;
    int done = 0;
    must(EVP_EncryptInit_ex2(context, NULL, with->key, with->nonce, NULL));
    must(EVP_EncryptUpdate(context, NULL, &done, with->about, (int)with->about_bytes));
    if (bytes > 0) must(EVP_EncryptUpdate(context, to, &done, from, (int)bytes));
    must(EVP_EncryptFinal_ex(context, to + bytes, &done));
    must(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, KV_TAG_BYTES, ret_tag));
    forget_key(aead);
}

bool kv_aead_open(struct kv_aead *aead, const struct kv_aead_with *with, const uint8_t *from,
                  uint32_t bytes, uint8_t *to, const uint8_t tag[KV_TAG_BYTES])
{
    EVP_CIPHER_CTX *context = aead->context;
    uint8_t want[KV_TAG_BYTES]; /* EVP takes it as something it may write to. */
    int done = 0;
    memcpy(want, tag, sizeof(want));
    must(EVP_DecryptInit_ex2(context, NULL, with->key, with->nonce, NULL));
    must(EVP_DecryptUpdate(context, NULL, &done, with->about, (int)with->about_bytes));
    if (bytes > 0) must(EVP_DecryptUpdate(context, to, &done, from, (int)bytes));
    must(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, KV_TAG_BYTES, want));
    const bool fits = EVP_DecryptFinal_ex(context, to + bytes, &done) == 1;
    forget_key(aead);
    return fits;
}

void kv_derive(const uint8_t key[KV_KEY_BYTES], const char *label, const void *data,
               uint32_t data_bytes, uint8_t ret_key[KV_KEY_BYTES])
{
    uint8_t inner[BLOCK_BYTES], outer[BLOCK_BYTES];
    struct kv_sha256_state state;
    struct kv_digest digest;
    for (uint32_t i = 0; i < BLOCK_BYTES; i++) {
        const uint8_t byte = i < KV_KEY_BYTES ? key[i] : 0;
        inner[i] = byte ^ 0x36;
        outer[i] = byte ^ 0x5c;
    }
    kv_sha256_init(&state);
    kv_sha256_update(&state, inner, sizeof(inner));
    kv_sha256_update(&state, label, strlen(label) + 1);
    kv_sha256_update(&state, data, data_bytes);
    kv_sha256_final(&state, &digest);
    kv_sha256_init(&state);
    kv_sha256_update(&state, outer, sizeof(outer));
    kv_sha256_update(&state, digest.bytes, sizeof(digest.bytes));
    kv_sha256_final(&state, &digest);
    memcpy(ret_key, digest.bytes, KV_KEY_BYTES);
    explicit_bzero(inner, sizeof(inner));
    explicit_bzero(outer, sizeof(outer));
    explicit_bzero(&digest, sizeof(digest));
    explicit_bzero(&state, sizeof(state));
}

kv_status kv_random(void *bytes, uint32_t count, struct kv_error *err)
{
    if (RAND_priv_bytes(bytes, (int)count) == 1) return KV_OK;
    return KV_FAIL(err, KV_IO, "OpenSSL gives no random bytes");
}
