#pragma once

/* The real daemon as a child of the test: start, kill, start again on the same directory. */

#include "kvstore/base/status.h"
#include "tools/client/client.h"

#include <stddef.h>
#include <sys/types.h>

enum { EX_USERS = 3, EX_LANES = 8, EX_FLAGS_MAX = 28, EX_FLAG_BYTES = 544 };

struct ex_daemon_options {
    const char *dir;       /* Its own, made by the caller: socket, tokens, log, state. */
    const char *state_dir; /* NULL: dir/state. */
    const char *program;
};

/* Settings of a start, besides those that name files: "--section.key=value". */
struct ex_flags {
    char text[EX_FLAGS_MAX][EX_FLAG_BYTES];
    uint32_t count;
};

void ex_flag(struct ex_flags *flags, const char *fmt, ...) KV_PRINTF(2, 3);

struct ex_daemon;

struct ex_daemon *ex_daemon_create(const struct ex_daemon_options *options);
/* Kills it if it runs. */
void ex_daemon_destroy(struct ex_daemon *daemon);

/* Each returns false with a sentence in why (EX_WHY_BYTES). */
bool ex_daemon_start(struct ex_daemon *daemon, const struct ex_flags *flags, char *why);
bool ex_daemon_stop(struct ex_daemon *daemon, int signal_number, char *why);

/* The two halves of a start. */
void ex_daemon_spawn(struct ex_daemon *daemon, const struct ex_flags *flags);
bool ex_daemon_wait(struct ex_daemon *daemon, char *why);
/* Sends a signal and returns: calls may be under way. */
void ex_daemon_signal(struct ex_daemon *daemon, int signal_number);
/* What it wrote since its last start. */
void ex_daemon_log(const struct ex_daemon *daemon, char *text, size_t bytes);

/* One lane per turn at a time, so that each thread has a client of its own. */
struct client *ex_daemon_client(struct ex_daemon *daemon, uint32_t user, uint32_t lane);
struct client *ex_daemon_operator(struct ex_daemon *daemon);
