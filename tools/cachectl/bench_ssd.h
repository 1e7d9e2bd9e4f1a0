#pragma once

/*
 * The SSD tier inside this process, for benchmarks of its reads and its saves: a real store (index,
 * pages in memory, segments with O_DIRECT, RocksDB) in a directory of its own, pages of the size of
 * DeepSeek-V4.1-Flash's, and the loop that a shard runs for it.  One thread.
 */

#include "kvstore/store/store.h"
#include "tools/cachectl/bench_progress.h"

#define BENCH_SSD_DIR_BYTES 160u

struct bench_ssd_options {
    uint64_t hbm_pages, ssd_pages; /* The arena; the tier, which is one segment. */
    uint32_t sessions;
    bool timed;   /* Reads of pages are timed: see bench_ssd_latencies(). */
    bool encrypt; /* Pages are encrypted on their way to SSD. */
};

/* Owned by: the benchmark's stack; it stays where it is between open and close. */
struct bench_ssd {
    struct bench_progress *progress;
    char dir[BENCH_SSD_DIR_BYTES]; /* Removed by bench_ssd_close(); empty: never made. */
    struct kv_layout layout;
    struct kv_digest model;
    struct kv_disk *ring, *timer; /* timer: around the ring, or NULL. */
    struct kv_clock *clock;
    struct kv_mailbox *mailbox;
    struct kv_manifest *manifest;
    struct kv_store *store;
    struct kv_user *user;
    bool user_recorded;
};

/* Makes a directory in bench_tmp_dir() and opens a store in it.  Returns an exit code, with the
 * sentence printed; bench_ssd_close() follows in any case. */
int bench_ssd_open(struct bench_ssd *own, const struct bench_ssd_options *options,
                   struct bench_progress *progress);
void bench_ssd_close(struct bench_ssd *own);

/* One turn of the loop: waits until something happened. */
void bench_ssd_turn(struct bench_ssd *own);
/* Turns until nothing is in flight. */
void bench_ssd_settle(struct bench_ssd *own);

/* Nanoseconds from start to end of each read since the last call, sorted, for the caller to free;
 * NULL: there were none. */
uint64_t *bench_ssd_latencies(struct bench_ssd *own, uint32_t *ret_count);

/* One session, its tokens, and one save at a time.  Owned by: the benchmark. */
struct bench_history {
    struct bench_ssd *own;
    struct kv_session *session;
    uint32_t *ids;           /* token_max of them. */
    struct kv_digest *chain; /* Of these. */
    uint32_t token_max;
    uint32_t slots_max;
    uint32_t *slots; /* Pinned pages of rows, which a save writes its pages from. */
    struct kv_write *write;
    struct kv_node *node; /* Being saved. */
    bool busy, failed;    /* failed: the last save was. */
    void (*saved)(struct bench_history *history);
    void *context;
};

/* `pages_max`: of one save. */
bool bench_history_init(struct bench_history *history, struct bench_ssd *own, uint32_t number,
                        uint32_t token_max, uint32_t pages_max);
void bench_history_fini(struct bench_history *history);
/* Gives up the pinned pages: nothing is saved any more. */
void bench_history_seal(struct bench_history *history);

/* Saves everything up to `tokens` as one checkpoint, acknowledged at level SSD: history->saved()
 * runs then, inside a turn.  False: it cannot be started, the sentence is printed. */
bool bench_history_save(struct bench_history *history, uint32_t tokens);
uint32_t bench_history_tokens(const struct bench_history *history);
/* Forgets all checkpoints; after bench_ssd_settle() their places are free. */
void bench_history_drop(struct bench_history *history);
