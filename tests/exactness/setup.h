#pragma once

/* Settings of the daemon under test that must not change a bit, drawn from the seed. */

#include "tests/driver/daemon.h"
#include "tests/driver/random.h"

enum { EX_TALKERS = 2, EX_CROWD = 6 }; /* Users; sessions that call at once. */

#define EX_POOL_TTL_MS 300000u
#define EX_ROWS_TTL_MS 259200000u

struct ex_setup {
    const char *model_dir, *plant; /* plant NULL: none. */
    uint32_t page_bytes, image_bytes;
    /* Drawn from the seed. */
    uint32_t chunk_tokens, live_sessions, spare_tokens, pool_slots, hbm_pages;
    uint32_t pass_rows, threads; /* 0: the default. */
    const char *draft;           /* Of engine.draft. */
    bool io_pool;
};

/* Draws what may change over a restart; spare_tokens stays.  crowd: room for many sessions at once,
 * and any size of pass. */
void ex_setup_draw(struct ex_setup *setup, struct ex_random *random, bool crowd);

bool ex_setup_start(struct ex_daemon *daemon, const struct ex_setup *setup, char *why);
