/*
 * Global flags, help and messages of cachectl.
 *
 * Flags may stand anywhere after the command, `--name value` and `--name=value` alike, because
 * people add --json at the end of a line they have just run.  An unknown flag is refused with the
 * nearest known one; nothing is guessed.
 */

#include "tools/cachectl/ctl.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS_MAX 86400000u

static const char *const global_names[] = {
    "--endpoint", "--token-file", "--timeout", "--json", "--no-color", "--quiet", "--help",
};

void ctl_print_globals(void)
{
    (void)printf("Global flags:\n"
                 "  --endpoint E     unix:/path or host:port (CACHED_ENDPOINT; default\n"
                 "                   " CTL_ENDPOINT_DEFAULT ")\n"
                 "  --token-file F   file with the bearer token (CACHED_TOKEN_FILE)\n"
                 "  --timeout MS     how long one call may take (default 10000)\n"
                 "  --json           one JSON document on stdout\n"
                 "  --no-color       no colours (NO_COLOR is respected as well)\n"
                 "  --quiet          no progress on stderr\n"
                 "  --help           this text\n");
}

static void print_help(const struct command *command, const struct arg *args, size_t args_count)
{
    (void)printf("Usage: cachectl %s%s%s%s\n\n%s\n", command->name,
                 command->arguments[0] ? " " : "", command->arguments,
                 args_count > 0 ? " [flags]" : "", command->summary);
    if (command->details) (void)printf("\n%s\n", command->details);
    if (args_count > 0) (void)printf("\nFlags:\n");
    for (size_t i = 0; i < args_count; i++) {
        char left[48];
        (void)snprintf(left, sizeof(left), "%s %s", args[i].name,
                       args[i].placeholder ? args[i].placeholder : "");
        (void)printf("  %-22s %s\n", left, args[i].help);
    }
    (void)printf("\n");
    ctl_print_globals();
    (void)printf("\nExample:\n  %s\n\n", command->example);
    (void)printf("Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 unavailable or\n"
                 "retry, 6 quota, 7 corruption found, 128 + N ended by signal N\n");
}

void ctl_error(const char *fmt, ...)
{
    va_list list;

    (void)fflush(stdout);
    (void)fputs("cachectl: ", stderr);
    va_start(list, fmt);
    (void)vfprintf(stderr, fmt, list);
    va_end(list);
    (void)fputc('\n', stderr);
}

void ctl_say(const struct ctl *ctl, const char *fmt, ...)
{
    va_list list;

    if (ctl->quiet) return;
    va_start(list, fmt);
    (void)vfprintf(stderr, fmt, list);
    va_end(list);
    (void)fputc('\n', stderr);
}

int ctl_failure(const struct client_failure *failure)
{
    char text[640];

    client_failure_print(failure, text, sizeof(text));
    ctl_error("%s", text);
    if (strcmp(failure->reason, "TOKEN_MISSING") == 0) {
        ctl_error("give a token with --token-file FILE or CACHED_TOKEN_FILE");
    }
    return (int)client_exit_code(failure->code);
}

bool ctl_parse_count(const char *text, uint64_t min, uint64_t max, uint64_t *ret_value)
{
    char *end = NULL;

    if (text[0] < '0' || text[0] > '9') return false;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || value < min || value > max) return false;
    *ret_value = value;
    return true;
}

/* If argv[*index] is `name`, takes its value too.  NULL in *ret_value: the value is missing. */
static bool take_value(const char *name, int argc, char **argv, int *index, const char **ret_value)
{
    const char *text = argv[*index];
    const size_t name_count = strlen(name);

    if (strncmp(text, name, name_count) != 0) return false;
    if (text[name_count] == '=') {
        *ret_value = text + name_count + 1;
        return true;
    }
    if (text[name_count] != '\0') return false;
    *ret_value = NULL;
    if (*index + 1 < argc) *ret_value = argv[++*index];
    return true;
}

bool ctl_parse_global(struct ctl *ctl, int argc, char **argv, int *index, int *ret_exit)
{
    const char *value = NULL;
    uint64_t count = 0;

    const struct {
        const char *name;
        bool *value;
    } switches[] = {
        {"--json", &ctl->json}, {"--no-color", &ctl->no_color}, {"--quiet", &ctl->quiet}};
    for (size_t i = 0; i < KV_ARRAY_COUNT(switches); i++) {
        if (strcmp(argv[*index], switches[i].name) != 0) continue;
        *switches[i].value = true;
        ctl->color = ctl->color && !ctl->no_color;
        return true;
    }

    const char *name = argv[*index];
    if (take_value("--endpoint", argc, argv, index, &value)) {
        if (value && client_endpoint_valid(value)) {
            ctl->endpoint = value;
        } else {
            ctl_error("--endpoint takes unix:/path or host:port");
            *ret_exit = CLIENT_EXIT_USAGE;
        }
    } else if (take_value("--token-file", argc, argv, index, &value)) {
        ctl->token_file = value;
        if (!value) *ret_exit = CLIENT_EXIT_USAGE;
        if (!value) ctl_error("--token-file takes a file");
    } else if (take_value("--timeout", argc, argv, index, &value)) {
        if (value && ctl_parse_count(value, 1, TIMEOUT_MS_MAX, &count)) {
            ctl->timeout_ms = (uint32_t)count;
        } else {
            ctl_error("--timeout takes milliseconds, 1 to %u", TIMEOUT_MS_MAX);
            *ret_exit = CLIENT_EXIT_USAGE;
        }
    } else {
        assert(name == argv[*index]);
        return false;
    }
    return true;
}

/* Whether argv[*index] is one of the command's flags. */
static bool parse_own(const struct arg *args, size_t args_count, int argc, char **argv, int *index,
                      int *ret_exit)
{
    const char *value = NULL;

    for (size_t i = 0; i < args_count; i++) {
        const struct arg *arg = &args[i];
        if (arg->kind == ARG_FLAG) {
            if (strcmp(argv[*index], arg->name) != 0) continue;
            *(bool *)arg->value = true;
            return true;
        }
        if (!take_value(arg->name, argc, argv, index, &value)) continue;
        const bool ok = arg->kind == ARG_TEXT
                            ? value != NULL
                            : value && ctl_parse_count(value, 0, INT64_MAX, arg->value);
        if (ok && arg->kind == ARG_TEXT) *(const char **)arg->value = value;
        if (!ok) ctl_error("%s takes %s", arg->name, arg->placeholder);
        if (!ok) *ret_exit = CLIENT_EXIT_USAGE;
        return true;
    }
    return false;
}

static void refuse_flag(const struct command *command, const struct arg *args, size_t args_count,
                        const char *flag)
{
    const char *names[32];
    size_t count = 0;

    for (size_t i = 0; i < KV_ARRAY_COUNT(global_names); i++)
        names[count++] = global_names[i];
    for (size_t i = 0; i < args_count && count < KV_ARRAY_COUNT(names); i++)
        names[count++] = args[i].name;
    const char *nearest = ctl_nearest(flag, names, count);
    ctl_error("unknown flag %s%s%s%s; `cachectl %s --help` lists them", flag,
              nearest ? " (did you mean " : "", nearest ? nearest : "", nearest ? "?)" : "",
              command->name);
}

int ctl_parse(struct ctl *ctl, const struct command *command, const struct arg *args,
              size_t args_count, int argc, char **argv, int *ret_exit)
{
    int kept = 0;
    bool flags_end = false;

    *ret_exit = CLIENT_EXIT_OK;
    for (int i = 0; i < argc && *ret_exit == CLIENT_EXIT_OK; i++) {
        if (flags_end || argv[i][0] != '-' || argv[i][1] == '\0') {
            argv[kept++] = argv[i];
        } else if (strcmp(argv[i], "--") == 0) {
            flags_end = true;
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(command, args, args_count);
            return -1;
        } else if (!ctl_parse_global(ctl, argc, argv, &i, ret_exit) &&
                   !parse_own(args, args_count, argc, argv, &i, ret_exit)) {
            refuse_flag(command, args, args_count, argv[i]);
            *ret_exit = CLIENT_EXIT_USAGE;
        }
    }
    if (*ret_exit != CLIENT_EXIT_OK) return -1;
    if (kept < command->arguments_min || kept > command->arguments_max) {
        ctl_error("usage: cachectl %s%s%s (--help says more)", command->name,
                  command->arguments[0] ? " " : "", command->arguments);
        *ret_exit = CLIENT_EXIT_USAGE;
        return -1;
    }
    return kept;
}

int ctl_connect_as(const struct ctl *ctl, const char *endpoint, const char *token_file,
                   uint32_t timeout_ms, struct client **ret_client)
{
    char token[CTL_TOKEN_BYTES];
    char why[320];

    if (token_file && !client_read_token(token_file, token, sizeof(token), why, sizeof(why))) {
        ctl_error("%s", why);
        return CLIENT_EXIT_DENIED;
    }
    const struct client_options options = {
        .endpoint = endpoint,
        .token = token_file ? token : NULL,
        .timeout_ms = timeout_ms,
    };
    *ret_client = client_create(&options);
    if (*ret_client) return CLIENT_EXIT_OK;
    ctl_error("cannot open a channel to %s", endpoint);
    (void)ctl;
    return CLIENT_EXIT_FAILED;
}

int ctl_connect(const struct ctl *ctl, struct client **ret_client)
{
    return ctl_connect_as(ctl, ctl->endpoint, ctl->token_file, ctl->timeout_ms, ret_client);
}

const char *ctl_red(const struct ctl *ctl)
{
    return ctl->color ? "\033[1;31m" : "";
}

const char *ctl_yellow(const struct ctl *ctl)
{
    return ctl->color ? "\033[33m" : "";
}

const char *ctl_green(const struct ctl *ctl)
{
    return ctl->color ? "\033[32m" : "";
}

const char *ctl_bold(const struct ctl *ctl)
{
    return ctl->color ? "\033[1m" : "";
}

const char *ctl_plain(const struct ctl *ctl)
{
    return ctl->color ? "\033[0m" : "";
}

/* Edits between two short texts: one row of the usual table. */
static size_t distance(const char *a, const char *b)
{
    enum { NAME_MAX_COUNT = 63 };
    size_t row[NAME_MAX_COUNT + 1];
    const size_t a_count = strlen(a);
    const size_t b_count = strlen(b);

    if (a_count > NAME_MAX_COUNT || b_count > NAME_MAX_COUNT) return SIZE_MAX;
    for (size_t j = 0; j <= b_count; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_count; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_count; j++) {
            const size_t above = row[j];
            const size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            row[j] = KV_MIN(KV_MIN(above + 1, row[j - 1] + 1), changed);
            diagonal = above;
        }
    }
    return row[b_count];
}

const char *ctl_nearest(const char *text, const char *const *names, size_t count)
{
    const char *nearest = NULL;
    size_t best = 4;

    for (size_t i = 0; i < count; i++) {
        const size_t edits = distance(text, names[i]);
        if (edits < best) nearest = names[i];
        if (edits < best) best = edits;
    }
    return nearest;
}
