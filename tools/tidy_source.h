#pragma once

/* One source file as tidy sees it, and the line that reports a violation.  Private to tidy. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tidy {
    const char *root;
    uint32_t files_count;
    uint32_t functions_count;
    uint32_t lines_count;
    uint32_t asserts_count;
    uint32_t violations_count;
    uint32_t warnings_count;
};

/* One file.  `code` is `raw` with comments and literals blanked. */
struct source {
    struct tidy *tidy;
    const char *path; /* Below the root. */
    char *raw;
    char *code;
    size_t bytes;
    bool is_header;
};

/* Reads and blanks the file.  False: it is not readable, or not text. */
bool source_open(struct source *src, const char *full_path);
void source_close(struct source *src);

/* Prints `path:line: [rule] text` and counts it. */
void complain(const struct source *src, uint32_t line, const char *rule, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

uint32_t line_of(const struct source *src, size_t offset);

/* Patterns are shell patterns; '*' also matches '/'.  The list ends with NULL. */
bool matches_any(const char *path, const char *const *patterns);
bool starts_with(const char *text, const char *prefix);
bool ends_with(const char *text, const char *suffix);
bool is_word(char c);
bool has_word(const char *text, const char *word);
