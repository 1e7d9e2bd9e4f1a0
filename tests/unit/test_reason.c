/*
 * Reasons: a stable API.
 *
 * Goal: every reason has a name, a cause and a remedy, is found by its name, and failures have a
 * gRPC status while outcomes have none; texts are sentences an operator can act on.
 */

#include "kvstore/format/reason.h"
#include "tests/harness.h"

#include <string.h>

static void test_table_is_complete(void)
{
    for (int i = 0; i < KV_REASON_COUNT; i++) {
        const struct kv_reason_info *info = kv_reason_info((enum kv_reason)i);
        enum kv_reason found = KV_REASON_COUNT;
        EXPECT(info->name != NULL && info->name[0] != '\0');
        EXPECT(strspn(info->name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") == strlen(info->name));
        EXPECT(kv_reason_find(info->name, &found) && (int)found == i);
        EXPECT(info->cause != NULL && strlen(info->cause) > 10);
        EXPECT(info->remedy != NULL && strlen(info->remedy) > 5);
        EXPECT((info->grpc_code == 0) == (i <= KV_REASON_ONLY_APPROXIMATE));
        EXPECT(info->grpc_code >= 0 && info->grpc_code <= 16);
    }
}

static void test_names_are_exact(void)
{
    enum kv_reason found;
    EXPECT(!kv_reason_find("", &found));
    EXPECT(!kv_reason_find("expired", &found));
    EXPECT(!kv_reason_find("EXPIRED ", &found));
    EXPECT(kv_reason_find("EXPIRED", &found) && found == KV_REASON_EXPIRED);
}

static void test_code_names(void)
{
    EXPECT_EQ_STR(kv_reason_code_name(0), "OK");
    EXPECT_EQ_STR(kv_reason_code_name(4), "DEADLINE_EXCEEDED");
    EXPECT_EQ_STR(kv_reason_code_name(16), "UNAUTHENTICATED");
    EXPECT_EQ_STR(kv_reason_code_name(-1), "UNKNOWN");
    EXPECT_EQ_STR(kv_reason_code_name(17), "UNKNOWN");
}

int main(void)
{
    test_table_is_complete();
    test_names_are_exact();
    test_code_names();
    HARNESS_END();
}
