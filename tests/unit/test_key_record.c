/* Keys as they are stored: what is wrapped opens again, for nobody else and nowhere else. */

#include "kvstore/format/key_record.h"
#include "kvstore/base/bytes.h"
#include "tests/harness.h"

static struct kv_aead *aead;
static const uint8_t master[KV_KEY_BYTES] = {1, 2, 3}, other_master[KV_KEY_BYTES] = {1, 2, 4};
static const uint8_t data_key[KV_KEY_BYTES] = {9, 8, 7};
static const struct kv_key_owner owner = {{{0xd0, 1}}, {{0xa0, 2}}, 3};

static void test_master_id(void)
{
    char text[KV_MASTER_ID_TEXT_BYTES];
    const struct kv_master_id id = kv_master_id_of(master), other = kv_master_id_of(other_master);
    EXPECT(memcmp(id.bytes, other.bytes, sizeof(id.bytes)) != 0);
    EXPECT(memcmp(id.bytes, master, 3) != 0);
    kv_master_id_text(&id, text);
    EXPECT_EQ_U64(strlen(text), 16);
}

static void test_check(void)
{
    struct kv_directory_id other = owner.directory;
    struct kv_key_check check, bad;
    EXPECT(kv_key_check_make(aead, master, &owner.directory, &check, NULL) == KV_OK);
    EXPECT(kv_key_check_is(aead, master, &owner.directory, &check));
    EXPECT(!kv_key_check_is(aead, other_master, &owner.directory, &check));
    other.bytes[15] ^= 1;
    EXPECT(!kv_key_check_is(aead, master, &other, &check));
    _Static_assert(sizeof(check) == KV_KEY_CHECK_BYTES, "as in the superblock");
    for (uint32_t bit = 0; bit < 8 * sizeof(check); bit++) {
        memcpy(&bad, &check, sizeof(bad));
        ((uint8_t *)&bad)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        EXPECT(!kv_key_check_is(aead, master, &owner.directory, &bad));
    }
}

static void test_wrap(void)
{
    struct kv_record_key record, again;
    uint8_t value[KV_RECORD_KEY_BYTES], got[KV_KEY_BYTES];
    EXPECT(kv_key_wrap(aead, master, &owner, data_key, &record, NULL) == KV_OK);
    EXPECT(kv_key_wrap(aead, master, &owner, data_key, &again, NULL) == KV_OK);
    EXPECT(memcmp(record.nonce, again.nonce, sizeof(record.nonce)) != 0);
    EXPECT_EQ_U32(kv_record_key_encode(&record, value), KV_RECORD_KEY_BYTES);
    EXPECT_EQ_U32(value[0], 1);
    EXPECT_EQ_MEM(value + 1, record.master.bytes, 8);
    EXPECT_EQ_MEM(value + 9, record.nonce, 12);
    EXPECT_EQ_MEM(value + 21, record.wrapped, 32);
    EXPECT_EQ_MEM(value + 53, record.tag, 16);
    EXPECT(kv_record_key_decode(value, sizeof(value), &again) == KV_OK);
    EXPECT(kv_key_unwrap(aead, master, &owner, &again, got));
    EXPECT_EQ_MEM(got, data_key, sizeof(got));
    EXPECT(!kv_key_unwrap(aead, other_master, &owner, &again, got));
    for (uint32_t i = 0; i < 3; i++) {
        struct kv_key_owner wrong = owner;
        if (i == 0) wrong.directory.bytes[0] ^= 1;
        if (i == 1) wrong.user.bytes[15] ^= 1;
        if (i == 2) wrong.key_id++;
        EXPECT(!kv_key_unwrap(aead, master, &wrong, &again, got));
    }
    EXPECT(kv_record_key_decode(value, sizeof(value) - 1, &again) == KV_CORRUPT);
    for (uint32_t bit = 0; bit < 8 * sizeof(value); bit++) {
        value[bit / 8] ^= (uint8_t)(1u << bit % 8);
        EXPECT(kv_record_key_decode(value, sizeof(value), &again) == KV_CORRUPT);
        value[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void test_keys_of_records(void)
{
    uint8_t key[KV_KEY_KEY_BYTES];
    struct kv_user_id user;
    uint32_t key_id;
    EXPECT_EQ_U32(kv_key_key(&owner.user, 0x01020304, key), 21);
    EXPECT_EQ_MEM(key, "K", 1);
    EXPECT_EQ_MEM(key + 1, owner.user.bytes, 16);
    EXPECT_EQ_MEM(key + 17, "\1\2\3\4", 4);
    EXPECT(kv_key_key_parse(key, sizeof(key), &user, &key_id));
    EXPECT_EQ_U32(key_id, 0x01020304);
    EXPECT_EQ_MEM(user.bytes, owner.user.bytes, 16);
    EXPECT(!kv_key_key_parse(key, sizeof(key) - 1, &user, &key_id));
    (void)kv_key_key(&owner.user, 0, key);
    EXPECT(!kv_key_key_parse(key, sizeof(key), &user, &key_id));
}

static void test_salt(void)
{
    static const uint8_t salt[KV_SALT_BYTES] = {5, 5, 5};
    struct kv_key_owner wrong = owner;
    struct kv_sealed_salt sealed;
    uint8_t got[KV_SALT_BYTES];
    EXPECT(kv_salt_seal(aead, data_key, &owner, salt, &sealed, NULL) == KV_OK);
    EXPECT_EQ_U32(sealed.key_id, 3);
    EXPECT(memcmp(sealed.salt, salt, sizeof(salt)) != 0);
    EXPECT(kv_salt_open(aead, data_key, &owner, &sealed, got));
    EXPECT_EQ_MEM(got, salt, sizeof(salt));
    EXPECT(!kv_salt_open(aead, master, &owner, &sealed, got));
    wrong.user.bytes[0] ^= 1;
    EXPECT(!kv_salt_open(aead, data_key, &wrong, &sealed, got));
    wrong = owner;
    wrong.key_id = 4;
    EXPECT(!kv_salt_open(aead, data_key, &wrong, &sealed, got));
}

/* Another run, another key: a nonce that comes again is not one that was used. */
static void test_page_keys(void)
{
    uint8_t a[KV_KEY_BYTES], b[KV_KEY_BYTES], c[KV_KEY_BYTES];
    const uint8_t run[KV_RUN_BYTES] = {1}, other_run[KV_RUN_BYTES] = {2};
    kv_page_key(data_key, run, a);
    kv_page_key(data_key, other_run, b);
    kv_page_key(master, run, c);
    EXPECT(memcmp(a, b, sizeof(a)) != 0 && memcmp(a, c, sizeof(a)) != 0);
    EXPECT(memcmp(a, data_key, sizeof(a)) != 0);
    kv_page_key(data_key, run, b);
    EXPECT_EQ_MEM(a, b, sizeof(a));
}

int main(void)
{
    EXPECT(kv_aead_create(&aead, NULL) == KV_OK);
    test_master_id();
    test_check();
    test_wrap();
    test_keys_of_records();
    test_salt();
    test_page_keys();
    kv_aead_destroy(aead);
    HARNESS_END();
}
