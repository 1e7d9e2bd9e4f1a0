/* The master key's file: what is taken, and what is refused by which sentence. */

#include "kvstore/base/key_file.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "test_key_file.XXXXXX";
static char path[64];

static void put(const void *bytes, size_t count, mode_t mode)
{
    (void)unlink(path);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT(fd >= 0);
    EXPECT(write(fd, bytes, count) == (ssize_t)count);
    EXPECT(fchmod(fd, mode) == 0);
    EXPECT(close(fd) == 0);
}

static void expect_refused(const char *words)
{
    uint8_t key[KV_KEY_BYTES] = {0xee};
    struct kv_error err = {0};
    EXPECT(kv_key_file_read(path, NULL, key, &err) == KV_INVALID);
    if (strstr(err.text, words) == NULL) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(strstr(err.text, words) != NULL);
    EXPECT(strstr(err.text, path) != NULL);
    EXPECT_EQ_U32(key[0], 0xee);
}

static void test_taken(void)
{
    static const char text[] = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F\n";
    uint8_t want[KV_KEY_BYTES], got[KV_KEY_BYTES];
    for (uint8_t i = 0; i < KV_KEY_BYTES; i++)
        want[i] = i;
    put(want, sizeof(want), 0600);
    EXPECT(kv_key_file_read(path, NULL, got, NULL) == KV_OK);
    EXPECT_EQ_MEM(got, want, sizeof(want));
    for (uint32_t bytes = 64; bytes <= 65; bytes++) {
        memset(got, 0, sizeof(got));
        put(text, bytes, 0400);
        EXPECT(kv_key_file_read(path, NULL, got, NULL) == KV_OK);
        EXPECT_EQ_MEM(got, want, sizeof(want));
    }
}

static void test_refused(void)
{
    char text[80];
    memset(text, 'a', sizeof(text));
    (void)unlink(path);
    expect_refused("No such file");
    for (uint32_t bytes = 0; bytes < sizeof(text); bytes++) {
        if (bytes == 32 || bytes == 64) continue;
        put(text, bytes, 0600);
        expect_refused("want 32 bytes, or 64 hexadecimal digits");
    }
    text[63] = 'g';
    put(text, 64, 0600);
    expect_refused("is no key");
    text[63] = 'a';
    for (mode_t bit = 1; bit <= 040; bit <<= 1) {
        put(text, 64, 0600 | bit);
        expect_refused("others than its owner");
    }
    (void)unlink(path);
    EXPECT(mkfifo(path, 0600) == 0);
    expect_refused("no regular file");
}

static void test_credential(void)
{
    uint8_t key[KV_KEY_BYTES];
    char text[64];
    struct kv_error err = {0};
    memset(text, 'b', sizeof(text));
    EXPECT(unsetenv("CREDENTIALS_DIRECTORY") == 0);
    EXPECT(kv_key_credential_read("key", key, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "LoadCredential=key") != NULL);
    EXPECT(setenv("CREDENTIALS_DIRECTORY", dir, 1) == 0);
    put(text, sizeof(text), 0440); /* As an access list shows. */
    EXPECT(kv_key_credential_read("key", key, &err) == KV_OK);
    EXPECT_EQ_U32(key[31], 0xbb);
    put(text, sizeof(text), 0444);
    EXPECT(kv_key_credential_read("key", key, &err) == KV_INVALID);
}

int main(void)
{
    EXPECT(mkdtemp(dir) != NULL);
    (void)snprintf(path, sizeof(path), "%s/key", dir);
    test_taken();
    test_refused();
    test_credential();
    EXPECT(unlink(path) == 0 && rmdir(dir) == 0);
    HARNESS_END();
}
