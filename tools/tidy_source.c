/*
 * tidy's view of a source file: the text, and the same text with comments and literals blanked.
 *
 * Blanking keeps every byte in its place, so an offset or a line number found in one text is right
 * in the other.  A word that is banned in code can then stand in a comment or in a message.
 */

#include "tools/tidy_source.h"

#include <ctype.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void complain(const struct source *src, uint32_t line, const char *rule, const char *fmt, ...)
{
    va_list args;

    src->tidy->violations_count++;
    (void)printf("%s:%u: [%s] ", src->path, line, rule);
    va_start(args, fmt);
    (void)vprintf(fmt, args);
    va_end(args);
    (void)putchar('\n');
}

bool starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

bool ends_with(const char *text, const char *suffix)
{
    const size_t text_bytes = strlen(text);
    const size_t suffix_bytes = strlen(suffix);
    return text_bytes >= suffix_bytes && strcmp(text + text_bytes - suffix_bytes, suffix) == 0;
}

bool matches_any(const char *path, const char *const *patterns)
{
    for (; *patterns != NULL; patterns++) {
        if (fnmatch(*patterns, path, 0) == 0) return true;
    }
    return false;
}

bool is_word(char c)
{
    return isalnum((unsigned char)c) != 0 || c == '_';
}

uint32_t line_of(const struct source *src, size_t offset)
{
    uint32_t line = 1;
    for (size_t i = 0; i < offset; i++) {
        if (src->raw[i] == '\n') line++;
    }
    return line;
}

bool has_word(const char *text, const char *word)
{
    const size_t bytes = strlen(word);
    for (const char *at = strstr(text, word); at != NULL; at = strstr(at + 1, word)) {
        if ((at == text || !is_word(at[-1])) && !is_word(at[bytes])) return true;
    }
    return false;
}

static void blank(char *text, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        if (text[i] != '\n') text[i] = ' ';
    }
}

/* The offset after a literal that opens at `i`, or the end of its line if it is not closed. */
static size_t literal_end(const char *text, size_t i)
{
    const char quote = text[i++];
    while (text[i] != '\0' && text[i] != quote && text[i] != '\n') {
        if (text[i] == '\\' && text[i + 1] != '\0') i++;
        i++;
    }
    return text[i] == quote ? i + 1 : i;
}

static size_t comment_end(const char *text, size_t i)
{
    if (text[i + 1] == '/') return i + strcspn(text + i, "\n");
    const char *close = strstr(text + i + 2, "*/");
    return close == NULL ? i + strlen(text + i) : (size_t)(close - text) + 2;
}

static void blank_comments_and_literals(char *text)
{
    size_t i = 0;
    while (text[i] != '\0') {
        if (text[i] == '/' && (text[i + 1] == '*' || text[i + 1] == '/')) {
            const size_t end = comment_end(text, i);
            blank(text, i, end);
            i = end;
        } else if (text[i] == '"' || text[i] == '\'') {
            const size_t end = literal_end(text, i);
            if (end > i + 2) blank(text, i + 1, end - 1);
            i = end;
        } else {
            i++;
        }
    }
}

static char *read_file(const char *path, size_t *ret_bytes)
{
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    struct stat info;

    if (file == NULL) return NULL;
    if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode)) goto fail;
    const size_t bytes = (size_t)info.st_size;
    text = malloc(bytes + 1);
    if (text == NULL) goto fail;
    if (fread(text, 1, bytes, file) != bytes) goto fail;
    text[bytes] = '\0';
    (void)fclose(file);
    *ret_bytes = bytes;
    return text;
fail:
    free(text);
    (void)fclose(file);
    return NULL;
}

bool source_open(struct source *src, const char *full_path)
{
    src->raw = read_file(full_path, &src->bytes);
    src->code = src->raw == NULL ? NULL : strdup(src->raw);
    if (src->code == NULL || strlen(src->raw) != src->bytes) return false;
    blank_comments_and_literals(src->code);
    return true;
}

void source_close(struct source *src)
{
    free(src->raw);
    free(src->code);
}
