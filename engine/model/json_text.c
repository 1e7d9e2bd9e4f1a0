/*
 * Walks a JSON text by its quotes and brackets alone, so that it gets through any text.
 */

#include "engine/model/json_text.h"

#include "engine/model/printable.h"
#include "kvstore/base/bytes.h"

#include <jansson.h>

struct walk {
    uint32_t depth, deepest;
    bool in_string, escaped, in_key;
    bool wants_key;         /* Of the outermost object; so have key_at and key_end. */
    size_t key_at, key_end; /* key_at 0: there was none. */
};

static void step_in_string(struct walk *walk, size_t at, char byte)
{
    if (walk->escaped) {
        walk->escaped = false;
    } else if (byte == '\\') {
        walk->escaped = true;
    } else if (byte == '"') {
        if (walk->in_key) walk->key_end = at;
        walk->in_string = walk->in_key = false;
    }
}

static void step(struct walk *walk, size_t at, char byte)
{
    if (walk->in_string) {
        step_in_string(walk, at, byte);
        return;
    }
    if (byte == '"') {
        walk->in_string = true;
        walk->in_key = walk->wants_key;
        walk->wants_key = false;
        if (walk->in_key) walk->key_at = walk->key_end = at + 1;
    } else if (byte == '{' || byte == '[') {
        walk->depth++;
        walk->deepest = KV_MAX(walk->deepest, walk->depth);
        walk->wants_key = walk->depth == 1 && byte == '{';
    } else if ((byte == '}' || byte == ']') && walk->depth > 0) {
        walk->depth--;
    } else if (byte == ',' && walk->depth == 1) {
        walk->wants_key = true;
    }
}

uint32_t eng_json_depth(const char *text, size_t count)
{
    struct walk walk = {.depth = 0};
    for (size_t i = 0; i < count; i++)
        step(&walk, i, text[i]);
    return walk.deepest;
}

bool eng_json_no_memory(const char *text, size_t count, const struct json_error_t *fault)
{
    static const char *const wanted[] = {"invalid token", "string or '}' expected"};
    const size_t at = KV_MIN((size_t)KV_MAX(fault->position, 0), count);

    /* Where it cannot get memory for a value, the parser leaves its text empty. */
    if (json_error_code(fault) == json_error_out_of_memory || fault->text[0] == '\0') return true;
    /* And where it cannot for a string, it says that something else must stand there: of what is
     * really wrong with a string it says more, and any other token ends in another byte. */
    for (size_t i = 0; i < KV_ARRAY_COUNT(wanted) && at > 0 && text[at - 1] == '"'; i++)
        if (strncmp(fault->text, wanted[i], strlen(wanted[i])) == 0) return true;
    return false;
}

bool eng_json_member(const char *text, size_t at, char *name, size_t name_bytes, bool *ret_after)
{
    struct walk walk = {.depth = 0};
    for (size_t i = 0; i < at; i++)
        step(&walk, i, text[i]);
    if (walk.key_at == 0) return false;
    const size_t end = walk.in_key ? at : walk.key_end;
    const size_t count = KV_MIN(end - walk.key_at, name_bytes - 1);
    memcpy(name, text + walk.key_at, count);
    name[count] = '\0';
    /* A zero byte of the text would end the name early, which does no harm. */
    eng_printable(name);
    *ret_after = walk.wants_key;
    return true;
}
