/*
 * Tokens: who is let in, and which files are refused.
 *
 * Goal: a token is accepted exactly if its digest is in the file, for the user and role of that
 * line; a file that is not entirely right, or readable by others, is refused with its line.
 * Method: the known digest of "abc", then tables of headers and of files.
 */

#include "cached/auth.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* SHA-256 of "abc", "b" and "c". */
#define ABC "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
#define B "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"
#define C "2e7d2c03a9507ae265ecf5b5356885a53393a2029d241394997265a1a25aefc6"

static struct auth *load(const char *text)
{
    struct auth *auth = NULL;
    struct kv_error err = {0};
    EXPECT_EQ_U64(auth_parse("t", text, strlen(text), &auth, &err), KV_OK);
    return auth;
}

static kv_status check(const struct auth *auth, const char *header,
                       const struct auth_identity **ret)
{
    *ret = NULL;
    return auth_check(auth, header, strlen(header), ret);
}

#define NO_ROLES "roles are harness, ops and stats, joined by commas, not "

static void test_identity(void)
{
    const struct auth_identity *who;
    struct auth *auth = load("# who\n\nann harness " ABC "\nann ops,stats " B " # two roles\n"
                             "\tc-d_e.F9   stats\t" C "\r\n");
    EXPECT_EQ_U64(check(auth, "Bearer abc", &who), KV_OK);
    EXPECT_EQ_STR(who->user_name, "ann");
    EXPECT(who->roles == AUTH_ROLE_HARNESS);
    const struct kv_user_id id = kv_user_id_of("ann");
    EXPECT_EQ_MEM(who->user.bytes, id.bytes, sizeof(id.bytes));
    EXPECT_EQ_U64(check(auth, "bearer b", &who), KV_OK);
    EXPECT(who->roles == (AUTH_ROLE_OPS | AUTH_ROLE_STATS));
    EXPECT_EQ_U64(check(auth, "Bearer   c", &who), KV_OK);
    EXPECT_EQ_STR(who->user_name, "c-d_e.F9");
    EXPECT(who->roles == AUTH_ROLE_STATS);

    EXPECT_EQ_U64(check(auth, "Bearer abcd", &who), KV_INVALID);
    EXPECT_EQ_U64(check(auth, "Bearer ab", &who), KV_INVALID);
    EXPECT_EQ_U64(check(auth, "Bearer abc ", &who), KV_INVALID);
    EXPECT_EQ_U64(check(auth, "Bearer " ABC, &who), KV_INVALID);
    EXPECT_EQ_U64(check(auth, "Bearer ", &who), KV_MISS);
    EXPECT_EQ_U64(check(auth, "Bearer", &who), KV_MISS);
    EXPECT_EQ_U64(check(auth, "Basic abc", &who), KV_MISS);
    EXPECT_EQ_U64(check(auth, "abc", &who), KV_MISS);
    EXPECT_EQ_U64(check(auth, "", &who), KV_MISS);

    char longest[2048];
    memset(longest, 'x', sizeof(longest));
    memcpy(longest, "Bearer ", 7);
    EXPECT_EQ_U64(auth_check(auth, longest, sizeof(longest), &who), KV_INVALID);
    auth_destroy(auth);
    auth_destroy(NULL);
}

static void test_bad_lines(void)
{
    const struct {
        const char *text;
        const char *want;
    } cases[] = {
        {"", "t: there is no token in it"},
        {"# only a comment\n", "t: there is no token in it"},
        {"ann harness\n", "t:1: a line is `user roles sha256`"},
        {"ann harness " ABC " more\n", "t:1: a line is `user roles sha256`"},
        {"\nann admin " ABC "\n", "t:2: " NO_ROLES "\"admin\""},
        {"ann harness, " ABC "\n", "t:1: " NO_ROLES "\"harness,\""},
        {"ann ops,,stats " ABC "\n", "t:1: " NO_ROLES "\"ops,,stats\""},
        {"ann Harness " ABC "\n", "t:1: " NO_ROLES "\"Harness\""},
        {"a/b harness " ABC "\n", "t:1: a user is 1 to 64 of letters, digits and . _ -"},
        {"ann harness ba78\n", "t:1: a SHA-256 is 64 hex digits"},
        {"ann harness g" ABC "\n", "t:1: a SHA-256 is 64 hex digits"},
        {"ann harness " ABC "\nbob ops " ABC "\n", "t:2: the token is in the file already"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct auth *auth = NULL;
        struct kv_error err = {0};
        EXPECT_EQ_U64(auth_parse("t", cases[i].text, strlen(cases[i].text), &auth, &err),
                      KV_INVALID);
        EXPECT_EQ_STR(err.text, cases[i].want);
        EXPECT(auth == NULL);
    }
}

static void test_limits(void)
{
    char text[512];
    struct auth *auth = NULL;
    struct kv_error err = {0};

    (void)snprintf(text, sizeof(text), "%064d harness " ABC, 0);
    auth_destroy(load(text));
    (void)snprintf(text, sizeof(text), "%065d harness " ABC, 0);
    EXPECT_EQ_U64(auth_parse("t", text, strlen(text), &auth, &err), KV_INVALID);
    (void)snprintf(text, sizeof(text), "ann harness " ABC "%0250d", 0);
    EXPECT_EQ_U64(auth_parse("t", text, strlen(text), &auth, &err), KV_INVALID);
    EXPECT_EQ_STR(err.text, "t:1: a line has at most 255 bytes");
    EXPECT_EQ_U64(auth_parse("t", "ann\0harness", 11, &auth, &err), KV_INVALID);
    EXPECT_EQ_STR(err.text, "t:1: a zero byte is no text");
}

static void write_file(const char *path, const char *text, mode_t mode)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT(fd >= 0);
    EXPECT(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    EXPECT(fchmod(fd, mode) == 0);
    EXPECT(close(fd) == 0);
}

static void test_file_modes(void)
{
    char path[] = "/tmp/cached-test-auth-XXXXXX";
    const struct {
        mode_t mode;
        kv_status want;
    } cases[] = {{0600, KV_OK},      {0400, KV_OK},      {0640, KV_OK},      {0660, KV_OK},
                 {0604, KV_INVALID}, {0644, KV_INVALID}, {0602, KV_INVALID}, {0601, KV_INVALID}};
    const int fd = mkstemp(path);
    EXPECT(fd >= 0);
    EXPECT(close(fd) == 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct auth *auth = NULL;
        struct kv_error err = {0};
        write_file(path, "ann harness " ABC "\n", cases[i].mode);
        EXPECT_EQ_U64(auth_load(path, &auth, &err), cases[i].want);
        if (cases[i].want != KV_OK) EXPECT(strstr(err.text, "chmod 600") != NULL);
        auth_destroy(auth);
        EXPECT(unlink(path) == 0);
    }
    struct auth *auth = NULL;
    struct kv_error err = {0};
    EXPECT_EQ_U64(auth_load(path, &auth, &err), KV_IO);
    EXPECT(strstr(err.text, path) != NULL);
    EXPECT_EQ_U64(auth_load("/tmp", &auth, &err), KV_INVALID);
}

int main(void)
{
    test_identity();
    test_bad_lines();
    test_limits();
    test_file_modes();
    HARNESS_END();
}
