#pragma once

/*
 * A JSON text that is not parsed yet, or cannot be: what the parser does not say of it.  Pure; any
 * thread.  Nothing is expected of the text.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct json_error_t;

/* The deepest nesting of objects and lists: 0 for a plain value. */
uint32_t eng_json_depth(const char *text, size_t count);

/* Whether json_loadb(text, count) failed for want of memory and for nothing in the text. */
bool eng_json_no_memory(const char *text, size_t count, const struct json_error_t *fault);

/* The member of the outermost object that the bytes before `at` (at most the text's length) end in,
 * printable and cut to `name_bytes` with its zero; *ret_after: it has ended, and the name of the
 * next one has not begun.  false: none has begun. */
bool eng_json_member(const char *text, size_t at, char *name, size_t name_bytes, bool *ret_after);
