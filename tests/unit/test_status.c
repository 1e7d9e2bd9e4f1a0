/*
 * Statuses and errors.
 *
 * Goal: every status has a name of its own; an error keeps its text, place and errno; a text that
 * does not fit is cut and still ends with the errno's words.
 */

#include "kvstore/base/status.h"
#include "tests/harness.h"

static void test_names(void)
{
    for (int a = 0; a < KV_STATUS_COUNT; a++) {
        const char *name = kv_status_name((kv_status)a);
        EXPECT(strcmp(name, "unknown") != 0);
        for (int b = 0; b < a; b++)
            EXPECT(strcmp(name, kv_status_name((kv_status)b)) != 0);
    }
    EXPECT_EQ_STR(kv_status_name(KV_OK), "ok");
    EXPECT_EQ_STR(kv_status_name(KV_STATUS_COUNT), "unknown");
    EXPECT_EQ_STR(kv_status_name((kv_status)1000), "unknown");
}

static void test_error(void)
{
    struct kv_error err = {0};
    errno = ENOSPC;
    EXPECT(KV_FAIL(&err, KV_INVALID, "port %d is taken", 80) == KV_INVALID);
    EXPECT(err.status == KV_INVALID);
    EXPECT_EQ_I64(err.sys_errno, 0);
    EXPECT_EQ_STR(err.text, "port 80 is taken");
    EXPECT(strstr(err.file, "test_status.c") != NULL);
    EXPECT(err.line > 0);

    EXPECT(KV_FAIL_ERRNO(&err, KV_IO, "write '%s'", "x") == KV_IO);
    EXPECT_EQ_I64(err.sys_errno, ENOSPC);
    EXPECT_EQ_STR(err.text, "write 'x': No space left on device");
    EXPECT(KV_FAIL(NULL, KV_BUSY, "nobody reads this") == KV_BUSY);
}

static void test_long_text(void)
{
    static const char words[] = ": No space left on device";
    struct kv_error err = {0};
    char path[400];
    memset(path, 'p', sizeof(path) - 1);
    path[sizeof(path) - 1] = '\0';
    errno = ENOSPC;
    EXPECT(KV_FAIL_ERRNO(&err, KV_IO, "%s", path) == KV_IO);
    EXPECT_EQ_U64(strlen(err.text), sizeof(err.text) - 1);
    EXPECT_EQ_STR(err.text + strlen(err.text) - strlen(words), words);
    EXPECT(KV_FAIL(&err, KV_IO, "%s", path) == KV_IO);
    EXPECT_EQ_U64(strlen(err.text), sizeof(err.text) - 1);
    EXPECT(err.text[sizeof(err.text) - 2] == 'p');
}

int main(void)
{
    test_names();
    test_error();
    test_long_text();
    HARNESS_END();
}
