/*
 * Any bytes as a key's record and as the key it stands under: what is accepted is exactly what the
 * encoder writes for what it gives, and no master key opens bytes that were not wrapped.  Each
 * input is tried as it is and with its checksum made right.
 */

#include "tests/fuzz/fuzz_main.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/key_record.h"

static const uint8_t master[KV_KEY_BYTES] = {1, 2, 3};

static void check(const uint8_t *data, size_t bytes)
{
    static struct kv_aead *aead;
    struct kv_record_key record;
    uint8_t value[KV_RECORD_KEY_BYTES], key[KV_KEY_BYTES];
    const struct kv_key_owner owner = {.key_id = 1};
    if (kv_record_key_decode(data, (uint32_t)bytes, &record) != KV_OK) return;
    EXPECT_EQ_U64(bytes, KV_RECORD_KEY_BYTES);
    (void)kv_record_key_encode(&record, value);
    EXPECT_EQ_MEM(value, data, sizeof(value));
    if (aead == NULL) EXPECT(kv_aead_create(&aead, NULL) == KV_OK);
    EXPECT(!kv_key_unwrap(aead, master, &owner, &record, key));
}

static void check_name(const uint8_t *data, size_t bytes)
{
    struct kv_user_id user;
    uint32_t key_id;
    uint8_t name[KV_KEY_KEY_BYTES];
    if (!kv_key_key_parse(data, (uint32_t)bytes, &user, &key_id)) return;
    EXPECT_EQ_U32(kv_key_key(&user, key_id, name), (uint32_t)bytes);
    EXPECT_EQ_MEM(name, data, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t value[KV_RECORD_KEY_BYTES] = {0};
    check(data, bytes);
    check_name(data, bytes);
    memcpy(value, data, KV_MIN(bytes, sizeof(value)));
    kv_store32(value + 69, kv_checksum(value, 69));
    check(value, sizeof(value));
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    struct kv_record_key record;
    const struct kv_user_id user = {{(uint8_t)index}};
    EXPECT(bytes_max >= KV_RECORD_KEY_BYTES);
    if (index == 0) return kv_key_key(&user, 7, buf);
    if (index > 2) return 0;
    memset(&record, (int)index, sizeof(record));
    return kv_record_key_encode(&record, buf);
}
