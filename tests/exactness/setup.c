/*
 * What may differ between two starts of the daemon without changing a bit: sizes of chunks, passes
 * and tiers, threads, how disks are read.
 */

#include "tests/exactness/setup.h"

#include "tests/harness.h"

/* As many calls at once as there are lanes, and nobody pushes anybody out. */
static void draw_crowd(struct ex_setup *setup, struct ex_random *random)
{
    static const char *const drafts[] = {"auto", "on", "off"};
    /* Rarely the smallest, which cost most: passes of few rows come from the sizes of runs, too. */
    static const uint32_t chunks[] = {1, 5, 5, 16, 16, 33, 33, 64, 128, 128};
    const uint32_t chunk = chunks[ex_random_below(random, 10)];
    setup->chunk_tokens = chunk;
    setup->live_sessions = EX_CROWD + 1 + ex_random_below(random, 3);
    setup->pool_slots = 7 * EX_CROWD + ex_random_between(random, 8, 20);
    setup->hbm_pages = 240;
    setup->pass_rows = chunk + ex_random_below(random, 2 * chunk + 40);
    if (setup->pass_rows < 2 || ex_random_percent(random, 20)) setup->pass_rows = 0;
    setup->threads = ex_random_between(random, 1, 3);
    setup->draft = drafts[ex_random_below(random, 3)];
}

void ex_setup_draw(struct ex_setup *setup, struct ex_random *random, bool crowd)
{
    static const uint32_t chunks[] = {1, 3, 7, 16, 64, 128};
    static const uint32_t lives[] = {1, 2, 4};
    setup->chunk_tokens = chunks[ex_random_below(random, 6)];
    setup->live_sessions = lives[ex_random_below(random, 3)];
    /* A call pins one slot per stop and one for the image it reads: 7 at most, of two calls 14. */
    setup->pool_slots = ex_random_between(random, 8, 20) + (setup->live_sessions == 4 ? 8 : 0);
    setup->hbm_pages = setup->live_sessions == 4 ? 110 : ex_random_between(random, 52, 70);
    setup->io_pool = ex_random_percent(random, 30);
    setup->pass_rows = setup->threads = 0;
    setup->draft = "auto";
    if (crowd) draw_crowd(setup, random);
}

bool ex_setup_start(struct ex_daemon *daemon, const struct ex_setup *setup, char *why)
{
    const uint64_t slot_bytes = (setup->image_bytes + 4095u) / 4096u * 4096u;
    struct ex_flags *flags = calloc(1, sizeof(*flags));
    EXPECT(flags != NULL);
    ex_flag(flags, "--engine.model_dir=%s", setup->model_dir);
    ex_flag(flags, "--engine.chunk_tokens=%u", setup->chunk_tokens);
    ex_flag(flags, "--engine.live_sessions=%u", setup->live_sessions);
    ex_flag(flags, "--engine.pass_rows=%u", setup->pass_rows);
    ex_flag(flags, "--engine.threads=%u", setup->threads);
    ex_flag(flags, "--engine.draft=%s", setup->draft);
    ex_flag(flags, "--window.spare_tokens=%u", setup->spare_tokens);
    ex_flag(flags, "--hbm.bytes=%" PRIu64, (uint64_t)setup->page_bytes * setup->hbm_pages);
    ex_flag(flags, "--pool.bytes=%" PRIu64, slot_bytes * setup->pool_slots);
    ex_flag(flags, "--pool.ttl=%ums", EX_POOL_TTL_MS);
    ex_flag(flags, "--ssd.ttl=%ums", EX_ROWS_TTL_MS);
    ex_flag(flags, "--ssd.bytes=256MiB");
    ex_flag(flags, "--ssd.segment_bytes=4MiB");
    ex_flag(flags, "--index.ram=4MiB");
    ex_flag(flags, "--quota.default_sessions=0");
    ex_flag(flags, "--quota.default_turns=0");
    ex_flag(flags, "--io.backend=%s", setup->io_pool ? "pool" : "auto");
    ex_flag(flags, "--clock.mode=virtual");
    if (setup->plant != NULL) {
        ex_flag(flags, "--plant");
        ex_flag(flags, "%s", setup->plant);
    }
    const bool ok = ex_daemon_start(daemon, flags, why);
    free(flags);
    return ok;
}
