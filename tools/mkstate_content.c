/* Names and tokens of a directory of mkstate. */

#include "tools/mkstate_content.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#define SPECIAL_IDS 3u /* Begin, end and pad; the two highest may stand for images. */

const char *mkstate_user(uint32_t user, char name[MKSTATE_NAME_BYTES])
{
    (void)snprintf(name, MKSTATE_NAME_BYTES, "user-%06" PRIu32, user);
    return name;
}

const char *mkstate_session(uint32_t session, char name[MKSTATE_NAME_BYTES])
{
    (void)snprintf(name, MKSTATE_NAME_BYTES, "session-%04" PRIu32, session);
    return name;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void mkstate_tokens(uint64_t seed, uint32_t user, uint32_t session, uint32_t vocab, uint32_t *ids,
                    uint32_t count)
{
    const uint64_t key = mix(mix(seed) ^ ((uint64_t)user << 32 | session));
    assert(vocab > SPECIAL_IDS + 2);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = SPECIAL_IDS + (uint32_t)(mix(key + i) % (vocab - SPECIAL_IDS - 2));
}
