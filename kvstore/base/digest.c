/*
 * SHA-256 and the token digest chain.
 *
 * Uses OpenSSL's one-level SHA256_* calls and not EVP: a lookup hashes every page of a prompt, and
 * EVP fetches an algorithm and allocates a context each time (about 0.5 us, as much as the 544
 * bytes of one page take).  OpenSSL 3 marks them deprecated in favour of EVP's providers, which we
 * do not need: the chain is an identity and no secret rests on it.  The assembly below them is the
 * same.
 */

#define OPENSSL_API_COMPAT 0x10100000L

#include "kvstore/base/digest.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <assert.h>
#include <openssl/sha.h>

static void hash_ids(SHA256_CTX *hash, const uint32_t *ids, uint32_t count)
{
    if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__) {
        (void)SHA256_Update(hash, ids, (size_t)count * 4);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint8_t bytes[4];
        kv_store32(bytes, ids[i]);
        (void)SHA256_Update(hash, bytes, sizeof(bytes));
    }
}

void kv_sha256(const void *data, size_t count, struct kv_digest *ret_digest)
{
    SHA256_CTX hash;
    (void)SHA256_Init(&hash);
    if (count > 0) (void)SHA256_Update(&hash, data, count);
    (void)SHA256_Final(ret_digest->bytes, &hash);
}

_Static_assert(sizeof(struct kv_sha256_state) >= sizeof(SHA256_CTX), "room for the library's");
_Static_assert(_Alignof(struct kv_sha256_state) >= _Alignof(SHA256_CTX), "as aligned");

void kv_sha256_init(struct kv_sha256_state *state)
{
    (void)SHA256_Init((SHA256_CTX *)state);
}

void kv_sha256_update(struct kv_sha256_state *state, const void *data, size_t count)
{
    if (count > 0) (void)SHA256_Update((SHA256_CTX *)state, data, count);
}

void kv_sha256_final(struct kv_sha256_state *state, struct kv_digest *ret_digest)
{
    (void)SHA256_Final(ret_digest->bytes, (SHA256_CTX *)state);
}

struct kv_digest kv_digest_root(const struct kv_digest *model_fingerprint,
                                const uint8_t user_salt[32])
{
    struct kv_digest root;
    SHA256_CTX hash;
    (void)SHA256_Init(&hash);
    (void)SHA256_Update(&hash, model_fingerprint->bytes, sizeof(model_fingerprint->bytes));
    (void)SHA256_Update(&hash, user_salt, 32);
    (void)SHA256_Final(root.bytes, &hash);
    return root;
}

struct kv_digest kv_digest_next(const struct kv_digest *before, const uint32_t *ids)
{
    struct kv_digest next;
    SHA256_CTX hash;
    (void)SHA256_Init(&hash);
    (void)SHA256_Update(&hash, before->bytes, sizeof(before->bytes));
    hash_ids(&hash, ids, KV_PAGE_TOKENS);
    (void)SHA256_Final(next.bytes, &hash);
    return next;
}

struct kv_digest kv_digest_at(const struct kv_digest *chain, uint32_t t, const uint32_t *rest)
{
    const uint32_t rest_count = t % KV_PAGE_TOKENS;
    assert(rest != NULL || rest_count == 0);

    struct kv_digest at;
    uint8_t position[4];
    SHA256_CTX hash;
    kv_store32(position, t);
    (void)SHA256_Init(&hash);
    (void)SHA256_Update(&hash, chain->bytes, sizeof(chain->bytes));
    (void)SHA256_Update(&hash, position, sizeof(position));
    if (rest_count > 0) hash_ids(&hash, rest, rest_count);
    (void)SHA256_Final(at.bytes, &hash);
    return at;
}
