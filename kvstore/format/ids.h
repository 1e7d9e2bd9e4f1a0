#pragma once

/* Identities as distinct types, so that one is never passed for another.  Those of names are
 * digests: two different names never share an id because names enter the hash with their length
 * first. */

#include <stdint.h>
#include <string.h>

struct kv_user_id {
    uint8_t bytes[16]; /* First 16 B of SHA-256("user" || u32 length || name). */
};

struct kv_session_id {
    uint8_t bytes[16]; /* First 16 B of SHA-256("session" || user id || u32 length || name). */
};

/* First 16 B of SHA-256(digest at t || positions of clipped replays, u32 LE each).  Where a
 * checkpoint of other kernels has that id already: ... || the kernel family at each of these
 * positions and at t, u64 LE each). */
struct kv_checkpoint_id {
    uint8_t bytes[16];
};

/* Random, drawn when a state directory is made: what belongs to it names it. */
struct kv_directory_id {
    uint8_t bytes[16];
};

struct kv_user_id kv_user_id_of(const char *name);
struct kv_session_id kv_session_id_of(const struct kv_user_id *user, const char *name);

static inline int kv_id_equal(const uint8_t a[16], const uint8_t b[16])
{
    return memcmp(a, b, 16) == 0;
}
