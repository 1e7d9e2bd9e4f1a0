/* AES-256-GCM and HMAC-SHA-256 against known answers, and memory for keys. */

#include "kvstore/base/aead.h"
#include "kvstore/base/secret.h"
#include "tests/harness.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

static uint32_t hex(const char *text, uint8_t *bytes)
{
    uint32_t count = 0;
    for (; text[0] != '\0'; text += 2, count++) {
        const char digits[3] = {text[0], text[1], '\0'};
        bytes[count] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return count;
}

/* Test case 16 of the GCM specification (McGrew and Viega). */
static void test_known_answer(struct kv_aead *aead)
{
    uint8_t key[32], nonce[12], about[20], text[64], want[64], tag[16], got[64], got_tag[16];
    (void)hex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", key);
    (void)hex("cafebabefacedbaddecaf888", nonce);
    (void)hex("feedfacedeadbeeffeedfacedeadbeefabaddad2", about);
    const uint32_t bytes =
        hex("d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf"
            "0e2449a6b525b16aedf5aa0de657ba637b39",
            text);
    (void)hex("522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7"
              "b08b1056828838c5f61e6393ba7a0abcc9f662",
              want);
    (void)hex("76fc6ece0f4e1768cddf8853bb2d551b", tag);
    const struct kv_aead_with with = {key, nonce, about, sizeof(about)};
    for (int again = 0; again < 2; again++) { /* The context is as before. */
        kv_aead_seal(aead, &with, text, bytes, got, got_tag);
        EXPECT_EQ_MEM(got, want, bytes);
        EXPECT_EQ_MEM(got_tag, tag, sizeof(tag));
        EXPECT(kv_aead_open(aead, &with, got, bytes, got, got_tag)); /* In place. */
        EXPECT_EQ_MEM(got, text, bytes);
    }
    for (uint32_t bit = 0; bit < 8 * sizeof(tag); bit++) {
        memcpy(got_tag, tag, sizeof(tag));
        got_tag[bit / 8] ^= (uint8_t)(1u << bit % 8);
        EXPECT(!kv_aead_open(aead, &with, want, bytes, got, got_tag));
    }
    about[0] ^= 1;
    EXPECT(!kv_aead_open(aead, &with, want, bytes, got, tag));
    about[0] ^= 1;
    nonce[11] ^= 1;
    EXPECT(!kv_aead_open(aead, &with, want, bytes, got, tag));
    nonce[11] ^= 1;
    key[31] ^= 1;
    EXPECT(!kv_aead_open(aead, &with, want, bytes, got, tag));
    key[31] ^= 1;
    EXPECT(kv_aead_open(aead, &with, want, bytes, got, tag));
}

/* Against OpenSSL's own. */
static void test_derive(void)
{
    uint8_t key[KV_KEY_BYTES], got[KV_KEY_BYTES], want[32], input[64] = "label";
    unsigned want_bytes = 0;
    for (uint32_t i = 0; i < sizeof(key); i++)
        key[i] = (uint8_t)(i * 7 + 3);
    memcpy(input + 6, "data", 4); /* Behind the label's zero. */
    kv_derive(key, "label", "data", 4, got);
    EXPECT(HMAC(EVP_sha256(), key, sizeof(key), input, 10, want, &want_bytes) != NULL);
    EXPECT_EQ_U32(want_bytes, 32);
    EXPECT_EQ_MEM(got, want, 32);
    kv_derive(key, "label", NULL, 0, got);
    EXPECT(HMAC(EVP_sha256(), key, sizeof(key), input, 6, want, &want_bytes) != NULL);
    EXPECT_EQ_MEM(got, want, 32);
}

static void test_random(void)
{
    uint8_t a[32] = {0}, b[32] = {0};
    EXPECT(kv_random(a, sizeof(a), NULL) == KV_OK);
    EXPECT(kv_random(b, sizeof(b), NULL) == KV_OK);
    EXPECT(memcmp(a, b, sizeof(a)) != 0);
}

/* Items are zeros whenever they are given out, none twice, and stay where they are. */
static void test_secrets(void)
{
    static uint8_t *items[5000];
    static const uint8_t zeros[40];
    struct kv_secrets *secrets;
    EXPECT(kv_secrets_create(sizeof(zeros), &secrets, NULL) == KV_OK);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 5000; i++) {
            items[i] = kv_secrets_alloc(secrets);
            EXPECT(items[i] != NULL);
            EXPECT_EQ_MEM(items[i], zeros, sizeof(zeros));
            memset(items[i], (int)(i % 255 + 1), sizeof(zeros));
        }
        for (uint32_t i = 0; i < 5000; i++)
            EXPECT_EQ_U32(items[i][39], i % 255 + 1);
        for (uint32_t i = 0; i < 5000; i += 1 + (uint32_t)round)
            kv_secrets_free(secrets, items[i]);
    }
    kv_secrets_free(secrets, NULL);
    (void)printf("  locked: errno %d\n", kv_secrets_unlocked_errno(secrets));
    kv_secrets_destroy(secrets);
    kv_secrets_destroy(NULL);
}

int main(void)
{
    struct kv_aead *aead;
    EXPECT(kv_aead_create(&aead, NULL) == KV_OK);
    test_known_answer(aead);
    test_derive();
    test_random();
    test_secrets();
    kv_aead_destroy(aead);
    HARNESS_END();
}
