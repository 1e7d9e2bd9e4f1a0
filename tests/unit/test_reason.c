/*
 * The table of reasons: complete, findable by name, and fit to be shown to a person.
 *
 * Method: a walk over the enum, compared with the names the enum itself was made from.
 */

#include "kvstore/format/reason.h"
#include "tests/harness.h"

static void test_table(void)
{
    static const char *const names[] = {
#define KV_REASON_NAME(name) #name,
        KV_REASONS(KV_REASON_NAME)
#undef KV_REASON_NAME
    };
    EXPECT_EQ_U32(sizeof(names) / sizeof(names[0]), KV_REASON_COUNT);
    for (unsigned i = 0; i < KV_REASON_COUNT; i++) {
        const struct kv_reason_info *info = kv_reason_info(i);
        enum kv_reason found;
        EXPECT_EQ_STR(info->name, names[i]);
        EXPECT(kv_reason_find(names[i], &found));
        EXPECT_EQ_U32(found, i);
        EXPECT(info->grpc_code >= 0 && info->grpc_code <= 16);
        EXPECT((info->grpc_code == 0) == (i <= KV_REASON_MODEL_CHANGED));
        EXPECT(info->cause[strlen(info->cause) - 1] == '.');
        EXPECT(info->remedy[strlen(info->remedy) - 1] == '.');
    }
}

static void test_unknown_names(void)
{
    const char *const unknown[] = {"", "NOTHING", "none", "SESSION_NOT_FOUND ", "SESSION"};
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        enum kv_reason found = KV_REASON_INTERNAL;
        EXPECT(!kv_reason_find(unknown[i], &found));
        EXPECT(found == KV_REASON_INTERNAL);
    }
}

int main(void)
{
    test_table();
    test_unknown_names();
    HARNESS_END();
}
