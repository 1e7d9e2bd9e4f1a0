/*
 * The master key's file.
 *
 * A key that others can read is refused, not warned about: what is encrypted with it already counts
 * as read.  systemd gives a credential to a service's user by an access list, which shows as bits
 * of the group; there the folder keeps others out, and only the bits of others are refused.
 */

#include "kvstore/base/key_file.h"

#include "kvstore/base/bytes.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEXT_BYTES (2 * KV_KEY_BYTES)
#define PATH_BYTES 512u

static int hex_digit(uint8_t c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static bool parse(const uint8_t *text, size_t bytes, uint8_t key[KV_KEY_BYTES])
{
    if (bytes == KV_KEY_BYTES) {
        memcpy(key, text, KV_KEY_BYTES);
        return true;
    }
    if (bytes == TEXT_BYTES + 1 && text[TEXT_BYTES] == '\n') bytes--;
    if (bytes != TEXT_BYTES) return false;
    for (uint32_t i = 0; i < KV_KEY_BYTES; i++) {
        const int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        key[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool is_zeros(const uint8_t key[KV_KEY_BYTES])
{
    uint8_t any = 0;
    for (uint32_t i = 0; i < KV_KEY_BYTES; i++)
        any |= key[i];
    return any == 0;
}

static kv_status read_open(int fd, const char *path, mode_t refused, uint8_t key[KV_KEY_BYTES],
                           struct kv_error *err)
{
    uint8_t text[TEXT_BYTES + 2], found[KV_KEY_BYTES];
    struct stat info;
    if (fstat(fd, &info) != 0)
        return KV_FAIL_ERRNO(err, KV_INVALID, "look at the master key file '%s'", path);
    if (!S_ISREG(info.st_mode))
        return KV_FAIL(err, KV_INVALID, "the master key file '%s' is no regular file", path);
    if ((info.st_mode & refused) != 0)
        return KV_FAIL(err, KV_INVALID,
                       "the master key file '%s' has mode %03o: others than its owner can use it "
                       "(chmod 600, and take another key if somebody did)",
                       path, (unsigned)(info.st_mode & 0777));
    const ssize_t got = read(fd, text, sizeof(text));
    kv_status status = KV_OK;
    if (got < 0)
        status = KV_FAIL_ERRNO(err, KV_INVALID, "read the master key file '%s'", path);
    else if (!parse(text, (size_t)got, found))
        status = KV_FAIL(err, KV_INVALID,
                         "the master key file '%s' has %lld bytes and is no key: want 32 bytes, or "
                         "64 hexadecimal digits",
                         path, (long long)info.st_size);
    else if (is_zeros(found))
        status = KV_FAIL(err, KV_INVALID,
                         "the master key file '%s' has nothing but zeros, as a file whose bytes a "
                         "power cut lost: that is no key",
                         path);
    if (status == KV_OK) memcpy(key, found, sizeof(found));
    explicit_bzero(text, sizeof(text));
    explicit_bzero(found, sizeof(found));
    return status;
}

static kv_status read_file(const char *path, mode_t refused, uint8_t key[KV_KEY_BYTES],
                           struct kv_error *err)
{
    /* Not to hang on a FIFO. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_INVALID, "open the master key file '%s'", path);
    const kv_status status = read_open(fd, path, refused, key, err);
    (void)close(fd);
    return status;
}

/* By their real names; false where either has none. */
static bool is_below(const char *path, const char *dir)
{
    char *const file = realpath(path, NULL), *const root = realpath(dir, NULL);
    const size_t bytes = root == NULL ? 0 : strlen(root);
    const bool below =
        file != NULL && bytes > 0 && strncmp(file, root, bytes) == 0 && file[bytes] == '/';
    free(file);
    free(root);
    return below;
}

kv_status kv_key_file_read(const char *path, const char *dir, uint8_t ret_key[KV_KEY_BYTES],
                           struct kv_error *err)
{
    if (dir != NULL && is_below(path, dir))
        return KV_FAIL(
            err, KV_INVALID,
            "the master key file '%s' lies in the state directory: whoever has a copy of "
            "it would have the key to it, keep it elsewhere",
            path);
    return read_file(path, S_IRWXG | S_IRWXO, ret_key, err);
}

kv_status kv_key_credential_read(const char *name, uint8_t ret_key[KV_KEY_BYTES],
                                 struct kv_error *err)
{
    char path[PATH_BYTES];
    const char *dir = getenv("CREDENTIALS_DIRECTORY");
    if (dir == NULL || dir[0] == '\0')
        return KV_FAIL(err, KV_INVALID,
                       "ssd.master_key_credential is '%s', and there is no CREDENTIALS_DIRECTORY: "
                       "start it by systemd with LoadCredential=%s:FILE",
                       name, name);
    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return KV_FAIL(err, KV_INVALID, "the path of the credential '%s' is too long", name);
    return read_file(path, S_IRWXO, ret_key, err);
}
