/*
 * Bearer tokens.
 *
 * A call is checked against every line and every byte, whatever matched before, so the time it
 * takes tells nothing about how close a guess came or which user it belongs to.  Parsing is strict,
 * because a line that is silently skipped is a user who is locked out, or one who is not.
 */

#include "cached/auth.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEX_DIGITS 64u
#define LINE_MAX_BYTES 256u

struct auth {
    uint32_t count;
    uint32_t room;
    struct auth_identity *identities;
};

const char *auth_role_name(enum auth_role role)
{
    switch (role) {
    case AUTH_ROLE_HARNESS:
        return "harness";
    case AUTH_ROLE_OPS:
        return "ops";
    case AUTH_ROLE_STATS:
        break;
    }
    return "stats";
}

static const enum auth_role all_roles[] = {AUTH_ROLE_HARNESS, AUTH_ROLE_OPS, AUTH_ROLE_STATS};

void auth_roles_text(unsigned roles, char text[AUTH_ROLES_TEXT_MAX])
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < KV_ARRAY_COUNT(all_roles); i++) {
        if ((roles & all_roles[i]) == 0) continue;
        used += (size_t)snprintf(text + used, AUTH_ROLES_TEXT_MAX - used, "%s%s",
                                 used == 0 ? "" : ",", auth_role_name(all_roles[i]));
    }
}

static unsigned role_find(const char *text, size_t bytes)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(all_roles); i++) {
        const char *name = auth_role_name(all_roles[i]);
        if (strlen(name) == bytes && memcmp(text, name, bytes) == 0) return all_roles[i];
    }
    return 0;
}

/* One role or several, "harness,stats"; 0: one of them is none. */
static unsigned roles_parse(const char *text)
{
    unsigned roles = 0;
    for (;;) {
        const size_t bytes = strcspn(text, ",");
        const unsigned role = role_find(text, bytes);
        if (role == 0) return 0;
        roles |= role;
        if (text[bytes] == '\0') return roles;
        text += bytes + 1;
    }
}

static bool name_valid(const char *name)
{
    const size_t count = strlen(name);
    return count >= 1 && count <= KV_USER_NAME_MAX &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") ==
               count;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static bool digest_parse(const char *text, struct kv_digest *ret_digest)
{
    if (strlen(text) != HEX_DIGITS) return false;
    for (unsigned i = 0; i < HEX_DIGITS / 2; i++) {
        const int high = hex_digit(text[2 * i]);
        const int low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        ret_digest->bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static kv_status add(struct auth *auth, const struct auth_identity *identity, const char *name,
                     unsigned line, struct kv_error *err)
{
    for (uint32_t i = 0; i < auth->count; i++) {
        if (memcmp(&auth->identities[i].token_digest, &identity->token_digest,
                   sizeof(identity->token_digest)) == 0)
            return KV_FAIL(err, KV_INVALID, "%s:%u: the token is in the file already", name, line);
    }
    if (auth->count == KV_AUTH_TOKENS_MAX)
        return KV_FAIL(err, KV_INVALID, "%s:%u: more than %u tokens", name, line,
                       KV_AUTH_TOKENS_MAX);
    if (auth->count == auth->room) {
        const uint32_t room = auth->room == 0 ? 16 : auth->room * 2;
        struct auth_identity *more = realloc(auth->identities, room * sizeof(*more));
        if (more == NULL) return KV_FAIL(err, KV_NOMEM, "read the token file");
        auth->identities = more;
        auth->room = room;
    }
    auth->identities[auth->count++] = *identity;
    return KV_OK;
}

static kv_status parse_line(struct auth *auth, const char *name, unsigned line, char *text,
                            struct kv_error *err)
{
    struct auth_identity identity = {0};
    char *rest = NULL;
    text[strcspn(text, "#")] = '\0';
    const char *user = strtok_r(text, " \t\r", &rest);
    const char *role = strtok_r(NULL, " \t\r", &rest);
    const char *digest = strtok_r(NULL, " \t\r", &rest);

    if (user == NULL) return KV_OK;
    if (digest == NULL || strtok_r(NULL, " \t\r", &rest) != NULL)
        return KV_FAIL(err, KV_INVALID, "%s:%u: a line is `user roles sha256`", name, line);
    if (!name_valid(user))
        return KV_FAIL(err, KV_INVALID, "%s:%u: a user is 1 to %u of letters, digits and . _ -",
                       name, line, KV_USER_NAME_MAX);
    identity.roles = roles_parse(role);
    if (identity.roles == 0)
        return KV_FAIL(err, KV_INVALID,
                       "%s:%u: roles are harness, ops and stats, joined by commas, not \"%.32s\"",
                       name, line, role);
    if (!digest_parse(digest, &identity.token_digest))
        return KV_FAIL(err, KV_INVALID, "%s:%u: a SHA-256 is %u hex digits", name, line,
                       HEX_DIGITS);
    memcpy(identity.user_name, user, strlen(user) + 1);
    identity.user = kv_user_id_of(user);
    return add(auth, &identity, name, line, err);
}

static kv_status parse_lines(struct auth *auth, const char *name, const char *text, size_t bytes,
                             struct kv_error *err)
{
    const char *end = text + bytes;
    unsigned line = 0;
    while (text < end) {
        char buf[LINE_MAX_BYTES];
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        const char *line_end = newline == NULL ? end : newline;
        const size_t count = (size_t)(line_end - text);
        line++;
        if (count >= sizeof(buf))
            return KV_FAIL(err, KV_INVALID, "%s:%u: a line has at most %u bytes", name, line,
                           LINE_MAX_BYTES - 1);
        if (memchr(text, '\0', count) != NULL)
            return KV_FAIL(err, KV_INVALID, "%s:%u: a zero byte is no text", name, line);
        memcpy(buf, text, count);
        buf[count] = '\0';
        const kv_status status = parse_line(auth, name, line, buf, err);
        if (status != KV_OK) return status;
        text = newline == NULL ? end : newline + 1;
    }
    if (auth->count == 0) return KV_FAIL(err, KV_INVALID, "%s: there is no token in it", name);
    return KV_OK;
}

kv_status auth_parse(const char *name, const char *text, size_t bytes, struct auth **ret_auth,
                     struct kv_error *err)
{
    struct auth *auth = calloc(1, sizeof(*auth));
    if (auth == NULL) return KV_FAIL(err, KV_NOMEM, "read the token file");
    const kv_status status = parse_lines(auth, name, text, bytes, err);
    if (status != KV_OK) {
        auth_destroy(auth);
        return status;
    }
    *ret_auth = auth;
    return KV_OK;
}

void auth_destroy(struct auth *auth)
{
    if (auth == NULL) return;
    free(auth->identities);
    free(auth);
}

static kv_status check_file(int fd, const char *path, size_t *ret_bytes, struct kv_error *err)
{
    struct stat info;
    if (fstat(fd, &info) != 0) return KV_FAIL_ERRNO(err, KV_IO, "read the token file %s", path);
    if (!S_ISREG(info.st_mode))
        return KV_FAIL(err, KV_INVALID, "the token file %s is no regular file", path);
    if ((info.st_mode & S_IRWXO) != 0)
        return KV_FAIL(err, KV_INVALID,
                       "the token file %s may be used by everyone (mode %03o); do: chmod 600 %s",
                       path, info.st_mode & 0777u, path);
    if (info.st_size > KV_AUTH_FILE_BYTES_MAX)
        return KV_FAIL(err, KV_INVALID, "the token file %s has more than %u bytes", path,
                       KV_AUTH_FILE_BYTES_MAX);
    *ret_bytes = (size_t)info.st_size;
    return KV_OK;
}

kv_status auth_load(const char *path, struct auth **ret_auth, struct kv_error *err)
{
    char *text = NULL;
    size_t bytes = 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open the token file %s", path);

    kv_status status = check_file(fd, path, &bytes, err);
    if (status != KV_OK) goto out;
    text = malloc(bytes + 1);
    if (text == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "read the token file %s", path);
        goto out;
    }
    const ssize_t got = read(fd, text, bytes);
    if (got < 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "read the token file %s", path);
        goto out;
    }
    status = auth_parse(path, text, (size_t)got, ret_auth, err);

out:
    free(text);
    (void)close(fd);
    return status;
}

/* All bytes, whatever differs. */
static unsigned difference(const struct kv_digest *a, const struct kv_digest *b)
{
    unsigned bits = 0;
    for (size_t i = 0; i < sizeof(a->bytes); i++)
        bits |= (unsigned)(a->bytes[i] ^ b->bytes[i]);
    return bits;
}

kv_status auth_check(const struct auth *auth, const void *header, size_t bytes,
                     const struct auth_identity **ret_identity)
{
    static const char scheme[] = "Bearer ";
    const size_t scheme_bytes = sizeof(scheme) - 1;
    if (bytes <= scheme_bytes || strncasecmp(header, scheme, scheme_bytes) != 0) return KV_MISS;

    const char *token = (const char *)header + scheme_bytes;
    size_t token_bytes = bytes - scheme_bytes;
    while (token_bytes > 0 && *token == ' ') {
        token++;
        token_bytes--;
    }
    if (token_bytes == 0) return KV_MISS;
    if (token_bytes > KV_AUTH_TOKEN_BYTES_MAX) return KV_INVALID;

    struct kv_digest digest;
    kv_sha256(token, token_bytes, &digest);
    const struct auth_identity *found = NULL;
    for (uint32_t i = 0; i < auth->count; i++) {
        if (difference(&auth->identities[i].token_digest, &digest) == 0)
            found = &auth->identities[i];
    }
    if (found == NULL) return KV_INVALID;
    *ret_identity = found;
    return KV_OK;
}
