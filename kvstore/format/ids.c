/*
 * Names become ids by hashing.
 *
 * The length stands before the name and a word for the kind before both, so that no two different
 * names (and no user and session) ever feed the same bytes to the hash.  Names are bounded, so the
 * input fits on the stack.
 */

#include "kvstore/format/ids.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/digest.h"
#include "kvstore/base/limits.h"

#include <assert.h>

#define ID_INPUT_BYTES 256u

_Static_assert(ID_INPUT_BYTES >= 7 + 16 + 4 + KV_SESSION_NAME_MAX, "longest session name fits");
_Static_assert(ID_INPUT_BYTES >= 4 + 4 + KV_USER_NAME_MAX, "longest user name fits");

static size_t append_name(uint8_t *input, size_t used, const char *name, size_t name_max)
{
    const size_t length = strlen(name);
    assert(length <= name_max);
    kv_store32(input + used, (uint32_t)length);
    memcpy(input + used + 4, name, length);
    return used + 4 + length;
}

struct kv_user_id kv_user_id_of(const char *name)
{
    assert(name != NULL);
    uint8_t input[ID_INPUT_BYTES];
    struct kv_digest digest;
    struct kv_user_id id;

    memcpy(input, "user", 4);
    kv_sha256(input, append_name(input, 4, name, KV_USER_NAME_MAX), &digest);
    memcpy(id.bytes, digest.bytes, sizeof(id.bytes));
    return id;
}

struct kv_session_id kv_session_id_of(const struct kv_user_id *user, const char *name)
{
    assert(user != NULL);
    assert(name != NULL);
    uint8_t input[ID_INPUT_BYTES];
    struct kv_digest digest;
    struct kv_session_id id;

    memcpy(input, "session", 7);
    memcpy(input + 7, user->bytes, sizeof(user->bytes));
    kv_sha256(input, append_name(input, 23, name, KV_SESSION_NAME_MAX), &digest);
    memcpy(id.bytes, digest.bytes, sizeof(id.bytes));
    return id;
}
