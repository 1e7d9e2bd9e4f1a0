#pragma once

/* SHA-256 and the token digest chain.  Pure; any thread.
 *
 *   D_0 = SHA-256(model fingerprint (32 B) || user salt (32 B))
 *   D_k = SHA-256(D_k-1 || ids of the k-th 128 tokens, u32 little-endian)
 *   digest at t = SHA-256(D_floor(t/128) || t as u32 LE || the t % 128 remaining ids, u32 LE) */

#include <stddef.h>
#include <stdint.h>

struct kv_digest {
    uint8_t bytes[32];
};

void kv_sha256(const void *data, size_t count, struct kv_digest *ret_digest);

/* The same over pieces: init, update as often as needed, final. */
struct kv_sha256_state {
    uint32_t opaque[28];
};
void kv_sha256_init(struct kv_sha256_state *state);
void kv_sha256_update(struct kv_sha256_state *state, const void *data, size_t count);
void kv_sha256_final(struct kv_sha256_state *state, struct kv_digest *ret_digest);

struct kv_digest kv_digest_root(const struct kv_digest *model_fingerprint,
                                const uint8_t user_salt[32]);

/* ids: 128 tokens. */
struct kv_digest kv_digest_next(const struct kv_digest *before, const uint32_t *ids);

/* Digest at t given the chain value at the page start and the t % 128 remaining ids. */
struct kv_digest kv_digest_at(const struct kv_digest *chain, uint32_t t, const uint32_t *rest);
