#pragma once

/* The real daemon as a child of the test: start, kill, start again on the same directory. */

#include "tests/exactness/random.h"
#include "tools/client/client.h"

#include <stddef.h>

enum { EX_USERS = 2, EX_LANES = 6 };

#define EX_POOL_TTL_MS 300000u
#define EX_ROWS_TTL_MS 259200000u

/* Drawn from the seed. */
struct ex_setup {
    uint32_t chunk_tokens, live_sessions, spare_tokens, pool_slots, hbm_pages;
    uint32_t pass_rows, threads; /* 0: the default. */
    const char *draft;           /* Of engine.draft. */
    bool io_pool;
};

struct ex_daemon_options {
    const char *dir; /* Its own, made by the caller: socket, tokens, log, state. */
    const char *program;
    const char *model_dir;
    const char *plant; /* NULL: none. */
    uint32_t page_bytes, image_bytes;
};

struct ex_daemon;

struct ex_daemon *ex_daemon_create(const struct ex_daemon_options *options);
/* Kills it if it runs. */
void ex_daemon_destroy(struct ex_daemon *daemon);

/* Draws what may change over a restart; spare_tokens stays.  crowd: room for many sessions at once,
 * and any size of pass. */
void ex_setup_draw(struct ex_setup *setup, struct ex_random *random, bool crowd);

/* Each returns false with a sentence in why (EX_WHY_BYTES). */
bool ex_daemon_start(struct ex_daemon *daemon, const struct ex_setup *setup, char *why);
bool ex_daemon_stop(struct ex_daemon *daemon, int signal_number, char *why);

/* One lane per turn at a time, so that each thread has a client of its own. */
struct client *ex_daemon_client(struct ex_daemon *daemon, uint32_t user, uint32_t lane);
struct client *ex_daemon_operator(struct ex_daemon *daemon);
