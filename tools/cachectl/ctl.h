#pragma once

/*
 * What every command of cachectl shares: the global flags, the description of a command, parsing,
 * talking to people on stderr, and connecting.
 *
 * stdout carries data and nothing else.  A command's run function returns the exit code, one of
 * enum client_exit.
 */

#include "tools/client/client.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CTL_ENDPOINT_DEFAULT "unix:/run/cached/cached.sock"
#define CTL_TIMEOUT_MS_DEFAULT 10000u
#define CTL_TOKEN_BYTES 257u

/* The global flags.  Owned by: main. */
struct ctl {
    const char *endpoint;
    const char *token_file; /* NULL: no token is sent. */
    uint32_t timeout_ms;
    bool json;
    bool no_color;
    bool quiet;
    bool terminal; /* stdout is one. */
    bool color;
};

struct command {
    const char *name;      /* "session show" */
    const char *arguments; /* "SESSION"; "" when there are none. */
    const char *summary;   /* One line. */
    const char *details;   /* Printed by --help below the summary. */
    const char *example;   /* A whole command line. */
    int arguments_min, arguments_max;
    int (*run)(struct ctl *ctl, const struct command *command, int argc, char **argv);
    bool own_flags; /* Parses flags and --help itself; argv[0] is the last word of the name. */
};

enum arg_kind { ARG_FLAG, ARG_TEXT, ARG_COUNT };

struct arg {
    const char *name; /* "--sessions" */
    enum arg_kind kind;
    const char *placeholder; /* "N"; NULL for flags. */
    const char *help;
    void *value; /* bool *, const char **, uint64_t * by kind; unchanged when absent. */
};

/* The commands, ending with NULL. */
extern const struct command *const commands[];

/* Parses flags anywhere in argv, global ones included, and moves the other arguments to its front.
 * Returns their count, or -1 when there is nothing left to do: help was printed or the usage is
 * wrong, and *ret_exit says with which code to leave. */
int ctl_parse(struct ctl *ctl, const struct command *command, const struct arg *args,
              size_t args_count, int argc, char **argv, int *ret_exit);

/* Takes one global flag at argv[*index], with its value.  false: it is none. *ret_exit is set when
 * its value is missing or wrong. */
bool ctl_parse_global(struct ctl *ctl, int argc, char **argv, int *index, int *ret_exit);

void ctl_print_globals(void);

/* "cachectl: sentence" on stderr. */
void ctl_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Progress; nothing with --quiet. */
void ctl_say(const struct ctl *ctl, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Prints the failure of a call and returns the exit code it stands for. */
int ctl_failure(const struct client_failure *failure);

/* 0 and a client, or the exit code, with the sentence printed. */
int ctl_connect(const struct ctl *ctl, struct client **ret_client);

/* The same for another token or endpoint.  token_file NULL: no token. */
int ctl_connect_as(const struct ctl *ctl, const char *endpoint, const char *token_file,
                   uint32_t timeout_ms, struct client **ret_client);

/* Whole decimal number within [min, max]. */
bool ctl_parse_count(const char *text, uint64_t min, uint64_t max, uint64_t *ret_value);

/* Terminal colours; "" when colours are off. */
const char *ctl_red(const struct ctl *ctl);
const char *ctl_yellow(const struct ctl *ctl);
const char *ctl_green(const struct ctl *ctl);
const char *ctl_bold(const struct ctl *ctl);
const char *ctl_plain(const struct ctl *ctl);

/* The name nearest to `text` among `count` names, at most 3 edits away; NULL: none is. */
const char *ctl_nearest(const char *text, const char *const *names, size_t count);
