/*
 * Reads the configuration: files by inih, flags, then the rules that concern several values.
 *
 * A setting that is misspelt must not silently keep its default, so an unknown key is an error, and
 * the nearest right key is part of it.  The same key twice in one file is an error too; in a later
 * source it replaces the earlier value.  The first error ends the reading: later ones are often its
 * consequence.
 *
 * inih calls back once a line, at the time it has read it, so the reader below counts lines; it
 * also drops leading white space, because inih would take an indented line as more of the value
 * above.
 */

#include "cached/config.h"

#include "cached/config_value.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <arpa/inet.h>
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEY_MAX 128u /* Longer ones are cut: none of ours is near. */
#define DROP_INS_MAX 256u

struct parse {
    struct cached_config *config;
    const char *name;
    const char *next;
    const char *end;
    unsigned line;
    unsigned seen[CONFIG_KEY_COUNT]; /* Line of this file that set it; 0: none. */
    kv_status status;
    struct kv_error *err;
};

/* Other case counts as the same letter: of names only, which are ASCII. */
static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static unsigned edit_distance(const char *a, const char *b)
{
    unsigned row[KEY_MAX + 1];
    const size_t a_count = strnlen(a, KEY_MAX);
    const size_t b_count = strnlen(b, KEY_MAX);

    for (unsigned j = 0; j <= b_count; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_count; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= b_count; j++) {
            const unsigned change = diagonal + (lower(a[i - 1]) != lower(b[j - 1]));
            diagonal = row[j];
            const unsigned step = KV_MIN(row[j], row[j - 1]) + 1;
            row[j] = KV_MIN(change, step);
        }
    }
    return row[b_count];
}

static bool find_key(const char *key, enum config_key *ret_key)
{
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        if (strcmp(config_item(i)->key, key) != 0) continue;
        *ret_key = i;
        return true;
    }
    return false;
}

static const char *after_section(const char *key)
{
    const char *dot = strchr(key, '.');
    return dot == NULL ? key : dot + 1;
}

/* The right name in a wrong section is two edits away, however the sections are called. */
static unsigned key_distance(const char *key, const char *right_key)
{
    const unsigned whole = edit_distance(key, right_key);
    const unsigned name = edit_distance(after_section(key), after_section(right_key)) + 2;
    return KV_MIN(whole, name);
}

static const char *nearest_key(const char *key)
{
    const char *best = NULL;
    unsigned best_distance = UINT32_MAX;
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        const unsigned distance = key_distance(key, config_item(i)->key);
        if (distance >= best_distance) continue;
        best_distance = distance;
        best = config_item(i)->key;
    }
    return best;
}

void config_defaults(struct cached_config *config)
{
    memset(config, 0, sizeof(*config));
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        const kv_status status = config_set(config, i, config_item(i)->fallback, NULL);
        assert(status == KV_OK); /* The table is wrong otherwise. */
        (void)snprintf(config->origins[i], sizeof(config->origins[i]), "default");
    }
}

/* As fgets: one line with its newline.  NULL: the end, or a line too long for inih's buffer. */
static char *read_line(char *buf, int room, void *stream)
{
    struct parse *parse = stream;
    if (parse->status != KV_OK || parse->next == parse->end) return NULL;
    parse->line++;

    const char *newline = memchr(parse->next, '\n', (size_t)(parse->end - parse->next));
    const char *line_end = newline == NULL ? parse->end : newline;
    const char *start = parse->next;
    while (start < line_end && (*start == ' ' || *start == '\t'))
        start++;
    const size_t count = (size_t)(line_end - start);
    parse->next = newline == NULL ? parse->end : newline + 1;

    if (memchr(start, '\0', count) != NULL) {
        parse->status = KV_FAIL(parse->err, KV_INVALID, "%s:%u: a zero byte is no text",
                                parse->name, parse->line);
        return NULL;
    }
    if (count + 2 > (size_t)room) {
        parse->status = KV_FAIL(parse->err, KV_INVALID,
                                "%s:%u: a line has at most %d bytes, "
                                "and a path at most %u",
                                parse->name, parse->line, room - 2, CONFIG_PATH_MAX);
        return NULL;
    }
    memcpy(buf, start, count);
    buf[count] = '\n';
    buf[count + 1] = '\0';
    return buf;
}

static kv_status set_from_file(struct parse *parse, const char *key_text, const char *value)
{
    enum config_key key;
    if (!find_key(key_text, &key))
        return KV_FAIL(parse->err, KV_INVALID, "%s:%u: unknown key \"%s\"; did you mean \"%s\"?",
                       parse->name, parse->line, key_text, nearest_key(key_text));
    if (parse->seen[key] != 0)
        return KV_FAIL(parse->err, KV_INVALID, "%s:%u: %s is set already in line %u", parse->name,
                       parse->line, key_text, parse->seen[key]);

    struct kv_error why = {0};
    if (config_set(parse->config, key, value, &why) != KV_OK)
        return KV_FAIL(parse->err, KV_INVALID, "%s:%u: %s", parse->name, parse->line, why.text);

    parse->seen[key] = parse->line;
    (void)snprintf(parse->config->origins[key], sizeof(parse->config->origins[key]), "%.*s:%u",
                   (int)CONFIG_TEXT_MAX, parse->name, parse->line);
    return KV_OK;
}

static int on_value(void *context, const char *section, const char *name, const char *value)
{
    struct parse *parse = context;
    char key[KEY_MAX];
    if (parse->status != KV_OK) return 0;
    (void)snprintf(key, sizeof(key), "%s%s%s", section, section[0] == '\0' ? "" : ".", name);
    parse->status = set_from_file(parse, key, value == NULL ? "" : value);
    return parse->status == KV_OK;
}

kv_status config_parse(struct cached_config *config, const char *name, const char *text,
                       size_t bytes, struct kv_error *err)
{
    struct parse parse = {
        .config = config,
        .name = name,
        .next = text,
        .end = text + bytes,
        .err = err,
    };
    const int rc = ini_parse_stream(read_line, &parse, on_value, &parse);
    const unsigned error_line = parse.line; /* Reading stops where our own error was. */
    if (parse.status != KV_OK && (rc <= 0 || (unsigned)rc >= error_line)) return parse.status;
    if (rc != 0)
        return KV_FAIL(err, KV_INVALID, "%s:%d: neither a [section] nor `name = value`", name, rc);
    return KV_OK;
}

static kv_status read_file(struct cached_config *config, const char *path, struct kv_error *err)
{
    kv_status status;
    char *text = NULL;
    struct stat info;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_INVALID, "open the configuration %s", path);
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        status = KV_FAIL(err, KV_INVALID, "the configuration %s is no regular file", path);
        goto fail;
    }
    if (info.st_size > CONFIG_FILE_BYTES_MAX) {
        status = KV_FAIL(err, KV_INVALID, "the configuration %s has more than %u bytes", path,
                         CONFIG_FILE_BYTES_MAX);
        goto fail;
    }
    text = malloc((size_t)info.st_size + 1);
    if (text == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "read the configuration %s", path);
        goto fail;
    }
    const ssize_t got = read(fd, text, (size_t)info.st_size);
    if (got < 0) {
        status = KV_FAIL_ERRNO(err, KV_INVALID, "read the configuration %s", path);
        goto fail;
    }
    status = config_parse(config, path, text, (size_t)got, err);

fail:
    free(text);
    (void)close(fd);
    return status;
}

static int is_drop_in(const struct dirent *entry)
{
    const size_t count = strlen(entry->d_name);
    return entry->d_name[0] != '.' && count > 5 && strcmp(entry->d_name + count - 5, ".conf") == 0;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name); /* Bytes: the order must not depend on a locale. */
}

kv_status config_read(struct cached_config *config, const char *path, struct kv_error *err)
{
    kv_status status = read_file(config, path, err);
    if (status != KV_OK) return status;

    char dir[CONFIG_TEXT_MAX * 2];
    char file[CONFIG_TEXT_MAX * 4];
    struct dirent **entries = NULL;
    (void)snprintf(dir, sizeof(dir), "%s.d", path);
    const int count = scandir(dir, &entries, is_drop_in, by_name);
    if (count < 0 && errno == ENOENT) return KV_OK;
    if (count < 0) return KV_FAIL_ERRNO(err, KV_INVALID, "read the drop-in directory %s", dir);
    if (count > (int)DROP_INS_MAX)
        status = KV_FAIL(err, KV_INVALID, "%s has more than %u files", dir, DROP_INS_MAX);
    for (int i = 0; i < count; i++) {
        (void)snprintf(file, sizeof(file), "%s/%s", dir, entries[i]->d_name);
        if (status == KV_OK) status = read_file(config, file, err);
        free(entries[i]);
    }
    free(entries);
    return status;
}

kv_status config_flag(struct cached_config *config, const char *flag, struct kv_error *err)
{
    char key_text[KEY_MAX];
    const char *equals = strchr(flag, '=');
    const size_t count = equals == NULL ? strlen(flag) : (size_t)(equals - flag);
    enum config_key key;

    (void)snprintf(key_text, sizeof(key_text), "%.*s", (int)KV_MIN(count, KEY_MAX - 1), flag);
    if (!find_key(key_text, &key))
        return KV_FAIL(err, KV_INVALID, "unknown flag --%s; did you mean --%s=...?", key_text,
                       nearest_key(key_text));
    if (equals == NULL)
        return KV_FAIL(err, KV_INVALID, "--%s needs a value: --%s=...", key_text, key_text);

    struct kv_error why = {0};
    if (config_set(config, key, equals + 1, &why) != KV_OK)
        return KV_FAIL(err, KV_INVALID, "--%s: %s", key_text, why.text);
    (void)snprintf(config->origins[key], sizeof(config->origins[key]), "flag");
    return KV_OK;
}

static bool is_port(const char *text)
{
    if (text[0] == '\0' || strspn(text, "0123456789") != strlen(text) || strlen(text) > 5)
        return false;
    return strtoul(text, NULL, 10) <= 65535;
}

bool config_is_loopback(const char *listen)
{
    char host[CONFIG_TEXT_MAX];
    struct in_addr v4;
    const char *colon = strrchr(listen, ':');
    if (colon == NULL || !is_port(colon + 1)) return false;
    (void)snprintf(host, sizeof(host), "%.*s", (int)(colon - listen), listen);
    if (strcmp(host, "localhost") == 0 || strcmp(host, "[::1]") == 0) return true;
    return inet_pton(AF_INET, host, &v4) == 1 && (ntohl(v4.s_addr) >> 24) == 127;
}

uint32_t config_pass_rows(const struct cached_config *config)
{
    enum { SMALLEST = 256 };
    if (config->engine_pass_rows > 0) return (uint32_t)config->engine_pass_rows;
    /* A chunk, and as much again for decoding sessions, their drafts and other users. */
    const uint64_t rows = KV_MAX(2 * config->engine_chunk_tokens, (uint64_t)SMALLEST);
    return (uint32_t)KV_MIN(rows, (uint64_t)KV_PASS_ROWS_MAX);
}

/* One place for the key, and one there must be for whoever encrypts. */
static kv_status check_key(const struct cached_config *config, struct kv_error *err)
{
    const bool has_file = config->ssd_master_key_file[0] != '\0';
    const bool has_credential = config->ssd_master_key_credential[0] != '\0';
    if (has_file && has_credential)
        return KV_FAIL(err, KV_INVALID,
                       "set one of ssd.master_key_file and ssd.master_key_credential, not both");
    if (strchr(config->ssd_master_key_credential, '/') != NULL)
        return KV_FAIL(err, KV_INVALID,
                       "ssd.master_key_credential is a name without '/', not \"%.64s\"",
                       config->ssd_master_key_credential);
    if (config->ssd_encryption == CONFIG_ENCRYPTION_ON && !has_file && !has_credential)
        return KV_FAIL(err, KV_INVALID,
                       "ssd.encryption = on needs ssd.master_key_file or "
                       "ssd.master_key_credential");
    return KV_OK;
}

kv_status config_check(const struct cached_config *config, struct kv_error *err)
{
    if (config->server_socket[0] == '\0' && config->server_listen[0] == '\0')
        return KV_FAIL(err, KV_INVALID, "set server.socket or server.listen: nobody could call");
    if (config->server_listen[0] != '\0' && !config_is_loopback(config->server_listen))
        return KV_FAIL(err, KV_INVALID,
                       "server.listen must be host:port on loopback (127.0.0.1, [::1], localhost) "
                       "because connections are not encrypted, not \"%.64s\"",
                       config->server_listen);
    if (config->server_token_file[0] == '\0')
        return KV_FAIL(err, KV_INVALID, "set server.token_file: every call needs a token");
    if (config->state_dir[0] == '\0')
        return KV_FAIL(err, KV_INVALID, "set state.dir: stored sessions need a directory");
    if (config->engine_backend == CONFIG_BACKEND_CPU && config->engine_model_dir[0] == '\0')
        return KV_FAIL(err, KV_INVALID, "set engine.model_dir, or engine.backend = synthetic");
    const uint64_t rows = config->engine_pass_rows;
    const uint64_t least = KV_MAX(config->engine_chunk_tokens, (uint64_t)2);
    if (rows > 0 && rows < least)
        return KV_FAIL(err, KV_INVALID,
                       "engine.pass_rows must be 0, or %llu to %u (at least 2 and "
                       "engine.chunk_tokens = %llu), found %llu",
                       (unsigned long long)least, KV_PASS_ROWS_MAX,
                       (unsigned long long)config->engine_chunk_tokens, (unsigned long long)rows);
    if (config->ssd_segment_bytes % 4096 != 0)
        return KV_FAIL(err, KV_INVALID, "ssd.segment_bytes must be a multiple of 4KiB");
    if (config->ssd_bytes < config->ssd_segment_bytes)
        return KV_FAIL(err, KV_INVALID, "ssd.bytes must be at least ssd.segment_bytes");
    return check_key(config, err);
}

void config_print(const struct cached_config *config, FILE *out)
{
    char value[CONFIG_TEXT_MAX];
    char range[CONFIG_TEXT_MAX];
    char section[KEY_MAX] = "";

    (void)fputs("# Settings of cached, printed by `cached --print-config`.\n"
                "# Order: defaults < this file < FILE.d/NAME.conf by name < "
                "flags (--section.key=value).\n"
                "# Check a file with `cached --check-config FILE`.\n",
                out);
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_item *item = config_item(i);
        const int span = (int)strcspn(item->key, ".");
        if (strncmp(section, item->key, (size_t)span) != 0 || section[span] != '\0') {
            (void)snprintf(section, sizeof(section), "%.*s", span, item->key);
            (void)fprintf(out, "\n[%s]\n", section);
        }
        config_range(item, range, sizeof(range));
        config_format(config, i, value, sizeof(value));
        (void)fprintf(out, "# %s\n# %s; default %s\n%s =%s%s\n", item->doc, range,
                      item->fallback[0] == '\0' ? "empty" : item->fallback, item->key + span + 1,
                      value[0] == '\0' ? "" : " ", value);
    }
}
