#pragma once

/* A daemon of one's own: for replays and benchmarks that must not touch anybody's data.
 *
 * It lives in a fresh private directory under TMPDIR or /tmp with wide limits, a virtual clock and
 * a unix socket; stopping it removes the directory.  With a state directory given, that one stays,
 * and limits and clock are a daemon's defaults. */

#include "tools/cachectl/ctl.h"

#include <sys/types.h>

#define SPAWN_PATH_BYTES 192u

struct spawn_options {
    const char *daemon;    /* NULL: ../cached/cached beside this program. */
    const char *backend;   /* "cpu" or "synthetic" */
    const char *model_dir; /* NULL: the synthetic backend's own layout. */
    const char *draft;     /* engine.draft; NULL: its default. */
    const char *state_dir; /* NULL: one of its own. */
    const char *user;      /* Whose token user_token is; NULL: "user". */
};

/* Owned by: the caller's stack. */
struct spawn {
    pid_t pid; /* 0: not running. */
    char dir[SPAWN_PATH_BYTES - 32];
    char endpoint[SPAWN_PATH_BYTES];
    char user_token[SPAWN_PATH_BYTES]; /* Files. */
    char ops_token[SPAWN_PATH_BYTES];
    char log[SPAWN_PATH_BYTES];
    char program[1024];
    uint64_t ready_ns; /* From its start until it served, the last time. */
};

/* Starts it and waits until it serves.  Returns an exit code; after 0 spawn_stop() must follow.
 * From here on SIGINT, SIGTERM and SIGHUP are held, as with spawn_hold_signals(). */
int spawn_start(const struct ctl *ctl, const struct spawn_options *options, struct spawn *ret);

/* Stops it and removes its directory; keeps the directory and says where when the daemon did not
 * end well.  Returns false then. */
bool spawn_stop(struct spawn *spawn);

/* Stops it, or kills it, and waits for its end; its directory stays, for spawn_again() or
 * spawn_stop().  false: it did not end well. */
bool spawn_halt(struct spawn *spawn);
bool spawn_kill(struct spawn *spawn);
/* Starts it again and waits until it serves.  Returns an exit code. */
int spawn_again(const struct ctl *ctl, struct spawn *spawn);
/* Removes a directory of files and of directories of files, at most `depth` deep. */
void spawn_remove_tree(const char *path, int depth);

/* From here on SIGINT, SIGTERM and SIGHUP wait until spawn_interrupted() is asked.  For commands
 * that have something to remove; before they start threads, which inherit it. */
void spawn_hold_signals(void);

/* Whether the user, or the system, wants this program to end. */
bool spawn_interrupted(void);
int spawn_signal(void); /* Which signal that is; 0: none. */

/* A descriptor that poll() finds readable from then on, for the caller to close.  -1: none. */
int spawn_signal_fd(void);

/* Runs argv with stdin from /dev/null and stdout and stderr appended to log_path (NULL: inherited).
 * 0: it could not be started. */
pid_t spawn_process(char *const argv[], const char *log_path);

/* Waits for its end, and asks it to end once go_on(context), asked again and again, is false.
 * false: there is nothing to wait for. */
bool spawn_wait(pid_t pid, bool (*go_on)(void *context), void *context, int *ret_status);

/* The same, but stdout goes nowhere and stderr is inherited: only what goes wrong is seen. */
pid_t spawn_tool(char *const argv[]);

/* This program's own path, and `relative` to its directory.  false: it does not fit. */
bool spawn_self_path(const char *relative, char *path, size_t path_bytes);

/* Polls until the daemon serves; false after timeout_ms, or when pid (if not 0) has ended. */
bool spawn_wait_ready(const char *endpoint, pid_t pid, uint32_t timeout_ms);
