/* Ids of names: stable, and different for names that look alike to a careless hash. */

#include "kvstore/base/bytes.h"
#include "kvstore/base/digest.h"
#include "kvstore/format/ids.h"
#include "tests/harness.h"

static void test_documented_input(void)
{
    uint8_t input[4 + 4 + 3] = {'u', 's', 'e', 'r', 3, 0, 0, 0, 'b', 'o', 'b'};
    struct kv_digest digest;
    kv_sha256(input, sizeof(input), &digest);
    const struct kv_user_id user = kv_user_id_of("bob");
    EXPECT_EQ_MEM(user.bytes, digest.bytes, 16);

    uint8_t longer[7 + 16 + 4 + 2] = {'s', 'e', 's', 's', 'i', 'o', 'n'};
    memcpy(longer + 7, user.bytes, 16);
    longer[23] = 2;
    longer[27] = 'm';
    longer[28] = '1';
    kv_sha256(longer, sizeof(longer), &digest);
    EXPECT_EQ_MEM(kv_session_id_of(&user, "m1").bytes, digest.bytes, 16);
}

static void test_all_differ(void)
{
    static const char *const names[] = {"a", "b", "ab", "a:b", "a/b", "A", "aa"};
    struct kv_user_id users[KV_ARRAY_COUNT(names)];
    for (size_t i = 0; i < KV_ARRAY_COUNT(names); i++) {
        users[i] = kv_user_id_of(names[i]);
        EXPECT(kv_id_equal(users[i].bytes, kv_user_id_of(names[i]).bytes));
        for (size_t j = 0; j < i; j++)
            EXPECT(!kv_id_equal(users[i].bytes, users[j].bytes));
        EXPECT(!kv_id_equal(users[i].bytes, kv_session_id_of(&users[i], names[i]).bytes));
    }
    EXPECT(!kv_id_equal(kv_session_id_of(&users[0], "b").bytes,
                        kv_session_id_of(&users[1], "b").bytes));
}

int main(void)
{
    test_documented_input();
    test_all_differ();
    HARNESS_END();
}
