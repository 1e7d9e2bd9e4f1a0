#pragma once

/* Owns every object of the process: builds them bottom-up, takes them down in reverse.  Owned by:
 * main. */

#include "cached/config.h"

struct daemon;

struct daemon_options {
    const struct cached_config *config; /* Checked; outlives the daemon. */
    const char *plant;                  /* Test builds: name of a planted bug; NULL. */
};

/* All signals a daemon handles must be blocked (daemon_block_signals) before.  When it returns
 * KV_OK, calls are served.  Otherwise err says in one sentence what stands in the way. */
kv_status daemon_start(const struct daemon_options *options, struct daemon **ret_daemon,
                       struct kv_error *err) KV_MUST_CHECK;

/* Before any thread exists. */
void daemon_block_signals(void);

/* Waits for SIGTERM or SIGINT, then stops: what runs is answered or refused, at most 10 s. */
void daemon_wait(struct daemon *daemon);

void daemon_destroy(struct daemon *daemon);
