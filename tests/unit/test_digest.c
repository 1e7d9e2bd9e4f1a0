/*
 * SHA-256 and the token digest chain.
 *
 * Goal: published SHA-256 values; every step of the chain equals the one-shot hash of the bytes the
 * header's formula names; a changed token, position or salt changes the digest.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/digest.h"
#include "kvstore/base/limits.h"
#include "tests/harness.h"

static uint32_t ids[4 * KV_PAGE_TOKENS];

static void expect_hex(const struct kv_digest *digest, const char *want)
{
    char hex[65];
    for (int i = 0; i < 32; i++)
        (void)snprintf(hex + (size_t)i * 2, 3, "%02x", digest->bytes[i]);
    EXPECT_EQ_STR(hex, want);
}

static void test_known_values(void)
{
    struct kv_digest digest;
    kv_sha256("abc", 3, &digest);
    expect_hex(&digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    kv_sha256(NULL, 0, &digest);
    expect_hex(&digest, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

static uint32_t put_ids(uint8_t *out, const uint32_t *from, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kv_store32(out + (size_t)i * 4, from[i]);
    return 4 * count;
}

static void test_chain_equals_one_shot(void)
{
    uint8_t text[32 + 4 + 4 * KV_PAGE_TOKENS];
    struct kv_digest model;
    struct kv_digest want;
    uint8_t salt[32];
    kv_sha256("model", 5, &model);
    memset(salt, 0x5a, sizeof(salt));

    struct kv_digest chain = kv_digest_root(&model, salt);
    memcpy(text, model.bytes, 32);
    memcpy(text + 32, salt, 32);
    kv_sha256(text, 64, &want);
    EXPECT_EQ_MEM(chain.bytes, want.bytes, 32);

    for (uint32_t page = 0; page < 4; page++) {
        for (uint32_t rest = 0; rest < KV_PAGE_TOKENS; rest++) {
            const uint32_t t = page * KV_PAGE_TOKENS + rest;
            const struct kv_digest at = kv_digest_at(&chain, t, ids + page * KV_PAGE_TOKENS);
            memcpy(text, chain.bytes, 32);
            kv_store32(text + 32, t);
            const uint32_t tail = put_ids(text + 36, ids + page * KV_PAGE_TOKENS, rest);
            kv_sha256(text, 36 + tail, &want);
            EXPECT_EQ_MEM(at.bytes, want.bytes, 32);
        }
        memcpy(text, chain.bytes, 32);
        const uint32_t tail = put_ids(text + 32, ids + page * KV_PAGE_TOKENS, KV_PAGE_TOKENS);
        kv_sha256(text, 32 + tail, &want);
        chain = kv_digest_next(&chain, ids + page * KV_PAGE_TOKENS);
        EXPECT_EQ_MEM(chain.bytes, want.bytes, 32);
    }
    const struct kv_digest at_page = kv_digest_at(&chain, 4 * KV_PAGE_TOKENS, NULL);
    EXPECT(memcmp(at_page.bytes, chain.bytes, 32) != 0);
}

static void test_everything_counts(void)
{
    struct kv_digest model = {{1}};
    uint8_t salt[32] = {2};
    const struct kv_digest root = kv_digest_root(&model, salt);
    salt[31] = 1;
    const struct kv_digest other = kv_digest_root(&model, salt);
    EXPECT(memcmp(root.bytes, other.bytes, 32) != 0);

    const struct kv_digest next = kv_digest_next(&root, ids);
    const struct kv_digest at = kv_digest_at(&root, 100, ids);
    for (uint32_t i = 0; i < KV_PAGE_TOKENS; i++) {
        ids[i] ^= 1u << i % 32;
        const struct kv_digest changed = kv_digest_next(&root, ids);
        EXPECT(memcmp(changed.bytes, next.bytes, 32) != 0);
        const struct kv_digest changed_at = kv_digest_at(&root, 100, ids);
        EXPECT((memcmp(changed_at.bytes, at.bytes, 32) != 0) == (i < 100));
        ids[i] ^= 1u << i % 32;
    }
    const struct kv_digest later = kv_digest_at(&root, 100 + KV_PAGE_TOKENS, ids);
    EXPECT(memcmp(later.bytes, at.bytes, 32) != 0);
}

static void print_rate(void)
{
    struct kv_digest chain = {{0}};
    uint64_t best_ns = UINT64_MAX;
    for (int i = 0; i < 20; i++) {
        const uint64_t start_ns = kv_clock_stopwatch_ns();
        for (int page = 0; page < 200; page++)
            chain = kv_digest_next(&chain, ids);
        best_ns = KV_MIN(best_ns, kv_clock_stopwatch_ns() - start_ns);
    }
    (void)printf("  %.2f ns/token (best of 20, 200 pages; value %02x)\n",
                 (double)best_ns / (200.0 * KV_PAGE_TOKENS), chain.bytes[0]);
}

static void test_pieces(void)
{
    uint8_t data[1000];
    struct kv_digest whole, pieces;
    struct kv_sha256_state state;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * 7);
    kv_sha256(data, sizeof(data), &whole);
    kv_sha256_init(&state);
    kv_sha256_update(&state, data, 1);
    kv_sha256_update(&state, data, 0);
    kv_sha256_update(&state, data + 1, 700);
    kv_sha256_update(&state, data + 701, sizeof(data) - 701);
    kv_sha256_final(&state, &pieces);
    EXPECT_EQ_MEM(whole.bytes, pieces.bytes, 32);
}

int main(void)
{
    test_pieces();
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(ids); i++)
        ids[i] = i * 2654435761u;
    test_known_values();
    test_chain_equals_one_shot();
    test_everything_counts();
    print_rate();
    HARNESS_END();
}
