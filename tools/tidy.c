/*
 * tidy: the rules of STYLE.md as a program, run as a test.
 *
 * Reads the sources under ROOT and prints one line per violation, `path:line: [rule] what`.
 * It reads text, not C: comments and literals are blanked first (same length, so offsets and line
 * numbers stay right), then a brace counter finds functions and file-scope declarations.  That is
 * enough because clang-format fixes the layout, and it needs no compiler and no build.
 *
 * The rules that are lists (who may include whom, who may include a vendor's header, what is
 * banned) are data, in tidy_tables.h.  Each rule has a sample under tests/tidy/bad that must be
 * rejected.
 *
 * Exit code: 0 clean, 1 violations (or nothing to check), 2 usage.
 */

#include "tools/tidy_source.h"
#include "tools/tidy_tables.h"

#include <ctype.h>
#include <dirent.h>
#include <fnmatch.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FUNCTION_LINES_MAX = 70, FILE_LINES_AIM = 600, FILE_LINES_MAX = 1000, LINE_BYTES_MAX = 100 };
enum { PATH_BYTES_MAX = 4096 };

/* ---- Lines ---- */

static void check_lines(const struct source *src)
{
    uint32_t line = 0;
    size_t start = 0;

    while (start < src->bytes) {
        const size_t bytes = strcspn(src->raw + start, "\n");
        line++;
        if (bytes > LINE_BYTES_MAX) {
            complain(src, line, "line_length", "%zu bytes, at most %d", bytes, LINE_BYTES_MAX);
        }
        if (memchr(src->raw + start, '\t', bytes) != NULL) {
            complain(src, line, "whitespace", "a tab; indent with spaces");
        } else if (bytes > 0 && src->raw[start + bytes - 1] == ' ') {
            complain(src, line, "whitespace", "a space at the end of the line");
        }
        start += bytes + 1;
    }
    src->tidy->lines_count += line;
    if (line > FILE_LINES_MAX && !matches_any(src->path, long_files)) {
        complain(src, line, "file_length", "%u lines, at most %d", line, FILE_LINES_MAX);
    } else if (line > FILE_LINES_AIM && !matches_any(src->path, long_files)) {
        src->tidy->warnings_count++;
        (void)printf("%s:%u: warning: [file_length] %u lines; the aim is %d\n", src->path, line,
                     line, FILE_LINES_AIM);
    }
}

static void check_opening(const struct source *src)
{
    if (!src->is_header) {
        if (!starts_with(src->raw, "/*")) {
            complain(src, 1, "opening_comment",
                     "a .c file opens with what it decides or guarantees");
        }
        return;
    }
    const size_t first = strspn(src->code, " \n");
    if (!starts_with(src->code + first, "#pragma once\n")) {
        complain(src, line_of(src, first), "pragma_once", "a header starts with #pragma once");
    }
}

/* ---- Includes ---- */

static void check_layer(const struct source *src, uint32_t line, const char *target)
{
    if (ends_with(target, ".pb-c.h")) target = "proto/generated.h";
    if (!matches_any(target, rooted_includes)) {
        complain(src, line, "include_path", "\"%s\" is not named from the top of the repository",
                 target);
        return;
    }
    for (size_t i = 0; i < sizeof(layers) / sizeof(layers[0]); i++) {
        if (fnmatch(layers[i].from, src->path, 0) != 0) continue;
        if (!matches_any(target, layers[i].may)) {
            complain(src, line, "include", "%s may not include \"%s\"", layers[i].from, target);
        }
        return;
    }
    complain(src, line, "include", "no row of the include table covers this file");
}

static void check_vendor(const struct source *src, uint32_t line, const char *target)
{
    if (matches_any(target, system_headers)) return;
    for (size_t i = 0; i < sizeof(vendors) / sizeof(vendors[0]); i++) {
        if (fnmatch(vendors[i].header, target, 0) != 0) continue;
        if (!matches_any(src->path, vendors[i].may)) {
            complain(src, line, "vendor", "<%s> may not be included here", target);
        }
        return;
    }
    complain(src, line, "vendor", "<%s> is neither a system header nor a known vendor's", target);
}

static bool is_own_header(const struct source *src, const char *target)
{
    const size_t stem_bytes = strlen(src->path) - 1;
    return !src->is_header && strlen(target) == stem_bytes + 1 &&
           strncmp(src->path, target, stem_bytes) == 0 && target[stem_bytes] == 'h';
}

/* Reads `#include "x"` or `#include <x>` at the start of a line; *ret_quote is the opening mark. */
static bool parse_include(const char *line, char *target, size_t target_bytes, char *ret_quote)
{
    line += strspn(line, " ");
    if (*line++ != '#') return false;
    line += strspn(line, " ");
    if (!starts_with(line, "include")) return false;
    line += strlen("include");
    line += strspn(line, " ");
    if (*line != '"' && *line != '<') return false;
    *ret_quote = *line++;
    const size_t bytes = strcspn(line, *ret_quote == '"' ? "\"\n" : ">\n");
    if (bytes >= target_bytes) return false;
    memcpy(target, line, bytes);
    target[bytes] = '\0';
    return true;
}

static void check_includes(const struct source *src)
{
    uint32_t line = 0;
    uint32_t includes_count = 0;
    bool system_seen = false;
    char target[PATH_BYTES_MAX];
    char quote = '\0';

    for (size_t start = 0; start < src->bytes; start += strcspn(src->raw + start, "\n") + 1) {
        line++;
        /* In a comment the '#' is blank in `code`. */
        const size_t hash = start + strspn(src->raw + start, " ");
        if (src->code[hash] != '#') continue;
        if (!parse_include(src->raw + start, target, sizeof(target), &quote)) continue;
        includes_count++;
        if (quote == '<') {
            system_seen = true;
            check_vendor(src, line, target);
            continue;
        }
        if (is_own_header(src, target)) {
            if (includes_count > 1) {
                complain(src, line, "include_order", "a file includes its own header first");
            }
            continue;
        }
        /* A .inc is no header: it is text that a file takes in where it needs it. */
        if (system_seen && !ends_with(target, ".inc")) {
            complain(src, line, "include_order", "project headers come before <system> headers");
        }
        check_layer(src, line, target);
    }
}

/* ---- Banned words ---- */

static void check_word(const struct source *src, const char *text, const struct banned_row *ban)
{
    const size_t word_bytes = strlen(ban->word);

    if (!matches_any(src->path, ban->where) || matches_any(src->path, ban->but)) return;
    for (const char *at = strstr(text, ban->word); at != NULL; at = strstr(at + 1, ban->word)) {
        if (at > text && is_word(at[-1])) continue;
        if (!ban->is_prefix && is_word(at[word_bytes])) continue;
        complain(src, line_of(src, (size_t)(at - text)), "banned", "%s: %s", ban->word, ban->why);
    }
}

static void check_banned(const struct source *src)
{
    for (size_t i = 0; i < sizeof(banned_in_code) / sizeof(banned_in_code[0]); i++) {
        check_word(src, src->code, &banned_in_code[i]);
    }
    for (size_t i = 0; i < sizeof(banned_anywhere) / sizeof(banned_anywhere[0]); i++) {
        check_word(src, src->raw, &banned_anywhere[i]);
    }
    for (const char *at = strstr(src->code, "assert("); at != NULL;
         at = strstr(at + 1, "assert(")) {
        src->tidy->asserts_count++;
    }
}

/* ---- Variables ---- */

/* Copies a declaration without what stands in braces, brackets and attributes, in single spaces. */
static void simplify(const char *from, size_t bytes, char *to, size_t to_bytes)
{
    size_t used = 0;
    int depth = 0;

    for (size_t i = 0; i < bytes && used + 2 < to_bytes; i++) {
        static const char *const dropped[] = {"__attribute__", "_Alignas", "_Thread_local"};
        for (size_t d = 0; d < sizeof(dropped) / sizeof(dropped[0]); d++) {
            if (depth > 0 || !starts_with(from + i, dropped[d])) continue;
            i += strlen(dropped[d]);
            if (from[i] != '(') break;
            for (int parens = 0; i < bytes; i++) {
                if (from[i] == '(') parens++;
                if (from[i] == ')' && --parens == 0) break;
            }
            i++;
        }
        if (i >= bytes) break;
        if (from[i] == '}' || from[i] == ']') depth--;
        if (depth == 0) {
            const char c = isspace((unsigned char)from[i]) ? ' ' : from[i];
            if (c != ' ' || (used > 0 && to[used - 1] != ' ')) to[used++] = c;
        }
        if (from[i] == '{' || from[i] == '[') depth++;
    }
    while (used > 0 && to[used - 1] == ' ')
        used--;
    to[used] = '\0';
}

static uint32_t count_words(const char *text)
{
    uint32_t count = 0;
    for (size_t i = 0; text[i] != '\0'; i++) {
        if (is_word(text[i]) && (i == 0 || !is_word(text[i - 1]))) count++;
    }
    return count;
}

/* Does this declaration (without its initialiser) define an object that may change? */
static bool is_mutable(const char *declaration, size_t bytes)
{
    char text[1024];

    simplify(declaration, bytes, text, sizeof(text));
    if (has_word(text, "typedef") || has_word(text, "extern")) return false;
    const char *paren = strchr(text, '(');
    if (paren != NULL) {
        /* `(*name)(...)` is a pointer to a function; anything else a prototype or a macro. */
        paren += 1 + strspn(paren + 1, " ");
        return *paren == '*' && !starts_with(paren + 1 + strspn(paren + 1, " "), "const");
    }
    /* `struct tag` and `enum tag {}` declare a type and nothing else. */
    const bool tagged =
        has_word(text, "struct") || has_word(text, "union") || has_word(text, "enum");
    const bool anonymous = strstr(text, "struct {") != NULL || strstr(text, "enum {") != NULL ||
                           strstr(text, "union {") != NULL;
    uint32_t words_min = tagged && !anonymous ? 3 : 2;
    if (has_word(text, "static")) words_min++;
    if (count_words(text) < words_min) return false;
    /* What a pointer points to does not matter: the pointer itself must be const. */
    const char *star = strrchr(text, '*');
    return !has_word(star == NULL ? text : star, "const");
}

static void check_variable(const struct source *src, size_t start, size_t end)
{
    if (matches_any(src->path, mutable_allowed)) return;
    if (!is_mutable(src->code + start, end - start)) return;
    complain(src, line_of(src, start), "global",
             "a variable that outlives its function and may change; pass state, or make it const");
}

/* ---- Functions and declarations ---- */

/* Where the brace counter stands. */
struct scan {
    size_t start; /* First byte of the statement. */
    size_t function_start;
    int braces;
    int parens;
    bool in_function;
    bool started; /* Something of this statement has been seen. */
    bool judged;  /* Its declarator has been looked at. */
};

static void end_statement(struct scan *scan)
{
    scan->started = false;
    scan->judged = false;
}

static void judge(const struct source *src, struct scan *scan, size_t end)
{
    const bool local = scan->braces > 0;

    if (scan->judged || !scan->started) return;
    scan->judged = true;
    if (local && (!scan->in_function || !starts_with(src->code + scan->start, "static "))) return;
    check_variable(src, scan->start, end);
}

static void open_brace(const struct source *src, struct scan *scan, size_t at)
{
    if (scan->braces == 0 && !scan->judged && scan->started) {
        size_t last = at;
        while (last > scan->start && isspace((unsigned char)src->code[last - 1]))
            last--;
        scan->in_function = src->code[last - 1] == ')';
        scan->function_start = scan->start;
    }
    scan->braces++;
    if (scan->in_function) end_statement(scan);
}

static void close_brace(const struct source *src, struct scan *scan, size_t at)
{
    scan->braces--;
    if (!scan->in_function) return;
    end_statement(scan);
    if (scan->braces > 0) return;
    scan->in_function = false;
    src->tidy->functions_count++;
    const uint32_t first = line_of(src, scan->function_start);
    const uint32_t lines = line_of(src, at) - first + 1;
    if (lines > FUNCTION_LINES_MAX) {
        complain(src, first, "function_length", "%u lines, at most %d", lines, FUNCTION_LINES_MAX);
    }
}

static void scan_byte(const struct source *src, struct scan *scan, size_t at)
{
    const char c = src->code[at];

    if (isspace((unsigned char)c)) return;
    if (c == '{' && scan->parens == 0) {
        open_brace(src, scan, at);
        return;
    }
    if (c == '}' && scan->parens == 0) {
        close_brace(src, scan, at);
        return;
    }
    if (!scan->started) {
        scan->started = true;
        scan->start = at;
    }
    if (c == '(') scan->parens++;
    if (c == ')') scan->parens--;
    if (scan->parens > 0 || (scan->braces > 0 && !scan->in_function)) return;
    if (c == '=' || c == ';') judge(src, scan, at);
    if (c == ';') end_statement(scan);
}

/* The offset after a preprocessor line and the lines it continues on. */
static size_t directive_end(const char *text, size_t at)
{
    while (text[at] != '\0' && text[at] != '\n') {
        if (text[at] == '\\' && text[at + 1] == '\n') at++;
        at++;
    }
    return at;
}

static void check_functions(const struct source *src)
{
    struct scan scan = {0};
    bool at_line_start = true;

    for (size_t i = 0; i < src->bytes; i++) {
        if (at_line_start && src->code[i] == '#') i = directive_end(src->code, i);
        if (i >= src->bytes) break;
        if (src->code[i] == '\n') {
            at_line_start = true;
        } else if (src->code[i] != ' ') {
            at_line_start = false;
        }
        scan_byte(src, &scan, i);
    }
    if (scan.braces != 0 || scan.parens != 0) {
        complain(src, line_of(src, src->bytes), "braces",
                 "braces or parentheses do not pair up, so functions cannot be counted");
    }
}

/* ---- Tests ---- */

static void need_file(const struct source *src, const char *folder, const char *prefix)
{
    const char *slash = strrchr(src->path, '/');
    const char *name = slash == NULL ? src->path : slash + 1;
    char path[PATH_BYTES_MAX];
    struct stat info;

    (void)snprintf(path, sizeof(path), "%s/tests/%s/%s%s", src->tidy->root, folder, prefix, name);
    if (stat(path, &info) == 0) return;
    complain(src, 1, "has_test", "tests/%s/%s%s does not exist", folder, prefix, name);
}

static void check_tests(const struct source *src)
{
    if (!src->is_header && matches_any(src->path, needs_unit_test)) {
        need_file(src, "unit", "test_");
    }
    if (!src->is_header && matches_any(src->path, needs_fuzzer) &&
        strstr(src->code, "_decode(") != NULL) {
        need_file(src, "fuzz", "fuzz_");
    }
    const char *harness = strstr(src->raw, "#include \"tests/harness.h\"");
    if (src->is_header || harness == NULL || strstr(src->code, "int main(") == NULL) return;
    if (strstr(src->code, "HARNESS_END()") == NULL && strstr(src->code, "harness_end()") == NULL) {
        complain(src, line_of(src, (size_t)(harness - src->raw)), "harness_end",
                 "main() must end with HARNESS_END(), which fails when no check ran");
    }
}

/* ---- Walking ---- */

static void check_file(struct tidy *tidy, const char *full_path, const char *path)
{
    struct source src = {.tidy = tidy, .path = path, .is_header = ends_with(path, ".h")};

    if (!source_open(&src, full_path)) {
        complain(&src, 1, "unreadable", "cannot be read as text");
    } else {
        tidy->files_count++;
        check_lines(&src);
        check_opening(&src);
        check_includes(&src);
        check_banned(&src);
        check_functions(&src);
        check_tests(&src);
    }
    source_close(&src);
}

static int no_dots(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static void walk(struct tidy *tidy, const char *path)
{
    char full_path[PATH_BYTES_MAX];
    struct dirent **entries = NULL;
    struct stat info;

    (void)snprintf(full_path, sizeof(full_path), "%s/%s", tidy->root, path);
    if (lstat(full_path, &info) != 0) return;
    if (S_ISREG(info.st_mode)) {
        if (ends_with(path, ".c") || ends_with(path, ".h") || ends_with(path, ".inc")) {
            check_file(tidy, full_path, path);
        }
        return;
    }
    if (!S_ISDIR(info.st_mode) || matches_any(path, skipped_folders)) return;
    const int count = scandir(full_path, &entries, no_dots, alphasort);
    for (int i = 0; i < count; i++) {
        char child[PATH_BYTES_MAX];
        (void)snprintf(child, sizeof(child), "%.2047s/%.255s", path, entries[i]->d_name);
        walk(tidy, child);
        free(entries[i]);
    }
    free(entries);
}

int main(int argc, char **argv)
{
    struct tidy tidy = {0};

    if (argc == 2 && strcmp(argv[1], "--rules") == 0) {
        for (size_t i = 0; rules[i] != NULL; i++)
            (void)puts(rules[i]);
        return 0;
    }
    if (argc != 2 || argv[1][0] == '-') {
        (void)fprintf(stderr, "usage: tidy ROOT | tidy --rules\n");
        return 2;
    }
    tidy.root = argv[1];
    for (size_t i = 0; walked_folders[i] != NULL; i++)
        walk(&tidy, walked_folders[i]);
    if (tidy.files_count == 0 || tidy.functions_count == 0) {
        tidy.violations_count++;
        (void)printf("%s:1: [nothing_checked] no file or no function found\n", tidy.root);
    }
    (void)printf(
        "%u files, %u functions, %u lines, %u asserts checked: %u violations, %u warnings\n",
        tidy.files_count, tidy.functions_count, tidy.lines_count, tidy.asserts_count,
        tidy.violations_count, tidy.warnings_count);
    return tidy.violations_count == 0 ? 0 : 1;
}
