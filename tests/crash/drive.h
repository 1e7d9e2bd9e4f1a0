#pragma once

/* Rounds of faults on the real daemon: writers, a fault at a random moment, a restart, a
 * comparison.  Cases of a round share a state directory, and a case is repeated by running its
 * round up to it. */

#include "tests/crash/expect.h"

enum { CR_EXIT_LOSS = 1, CR_EXIT_USAGE = 2 };

struct cr_options {
    const char *program; /* "crash" */
    const char *unit;    /* "kills" */
    uint64_t seed;
    uint32_t first, count;
    const char *plant; /* NULL: none; else the daemon is cached-test. */
    const char *dir;   /* Where state goes; NULL: /tmp. */
    bool idle;         /* Nobody writes, no bit is turned over: such a run must fail. */
    bool encrypt;      /* Every round, where it would be one in four or none. */
    bool expect_loss, verbose, keep;
};

/* How a fault comes.  NULL functions: kill -9, on a directory of the scratch. */
struct cr_medium {
    void *context;
    /* An empty file system for a round; ret_state: where its state directory goes. */
    bool (*make)(void *context, const char *scratch, char *ret_state, uint32_t bytes, char *why);
    bool (*cut)(void *context, char *why);     /* Power is gone; the daemon still runs. */
    bool (*restore)(void *context, char *why); /* It came back; the daemon is dead. */
    void (*drop)(void *context);
};

/* Reads arguments; ends the program for --help or wrong ones.  unit: "kills" for --kills. */
void cr_parse(int argc, char **argv, const char *help, struct cr_options *options);

/* Writes the master key of daemons that encrypt: bytes 0 to 31. */
#define CR_KEY_NAME "master.key"
void cr_make_key(const char *dir);

/* Turns the exit code of a run around that was asked to be idle. */
int cr_idle_code(const struct cr_options *options, int code);

/* The exit code. */
int cr_drive(const struct cr_options *options, const struct cr_medium *medium);
