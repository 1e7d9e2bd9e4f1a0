#pragma once

/*
 * Who calls: bearer tokens against the token file.  Immutable after loading; any thread.
 *
 * The file has one token a line, `user role sha256-of-the-token-in-hex`; '#' starts a comment.  The
 * same user may have several tokens.  The daemon never sees a token it could leak: only digests are
 * stored, and a token given is compared as a digest, in constant time, with every line.
 */

#include "kvstore/base/digest.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"

#include <stddef.h>

enum auth_role {
    AUTH_ROLE_HARNESS = 1, /* Bits, so that a method names the roles it allows. */
    AUTH_ROLE_OPS = 2,
    AUTH_ROLE_STATS = 4,
};

struct auth_identity {
    char user_name[KV_USER_NAME_MAX + 1];
    struct kv_user_id user;
    unsigned roles; /* Bits of enum auth_role. */
    struct kv_digest token_digest;
};

struct auth;

/* KV_INVALID: its mode lets others than owner and group in, or "path:line: what is wrong"; KV_IO:
 * unreadable. */
kv_status auth_load(const char *path, struct auth **ret_auth, struct kv_error *err) KV_MUST_CHECK;

/* The same from text. */
kv_status auth_parse(const char *name, const char *text, size_t bytes, struct auth **ret_auth,
                     struct kv_error *err) KV_MUST_CHECK;
void auth_destroy(struct auth *auth);

/* `header`: the value of "authorization", with or without a token behind "Bearer ".
 * KV_OK: *ret_identity lives as long as auth.  KV_MISS: there is no bearer token in it;
 * KV_INVALID: nobody has that token. */
kv_status auth_check(const struct auth *auth, const void *header, size_t bytes,
                     const struct auth_identity **ret_identity) KV_MUST_CHECK;

const char *auth_role_name(enum auth_role role);

/* "harness,stats" */
#define AUTH_ROLES_TEXT_MAX 32u
void auth_roles_text(unsigned roles, char text[AUTH_ROLES_TEXT_MAX]);
