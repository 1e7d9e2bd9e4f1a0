#pragma once

/* What a directory of mkstate holds: names and tokens follow from the seed and the numbers of user
 * and session, so that a benchmark can ask for any of it again.  Pure; any thread. */

#include <stdint.h>

#define MKSTATE_SEED_DEFAULT 1u
#define MKSTATE_NAME_BYTES 24u

/* Return `name`. */
const char *mkstate_user(uint32_t user, char name[MKSTATE_NAME_BYTES]);
const char *mkstate_session(uint32_t session, char name[MKSTATE_NAME_BYTES]);

/* Tokens [0, count) of a session's history, which goes on as far as one asks; ordinary ids of a
 * model with `vocab` tokens. */
void mkstate_tokens(uint64_t seed, uint32_t user, uint32_t session, uint32_t vocab, uint32_t *ids,
                    uint32_t count);
