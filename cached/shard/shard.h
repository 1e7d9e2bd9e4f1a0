#pragma once

/*
 * The shard thread: owns every user's sessions, the index, pool, HBM pages and the SSD tier.
 * Requests come in by shard_post and leave by request_reply.
 */

#include "cached/request.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/log.h"
#include "kvstore/base/disk.h"
#include "kvstore/format/layout.h"

struct shard;
struct worker;
struct kv_store;
struct kv_manifest;
struct eng_model;

struct shard_options {
    struct kv_clock *clock;
    struct kv_log *log;
    struct worker *worker;
    struct kv_store *store;
    struct kv_disk *disk;
    struct kv_mailbox *mailbox;
    const char *model_name, *engine_backend, *engine_isa, *engine_family;
    uint64_t rss_budget_bytes;
    uint32_t compact_below_thousandths; /* Part of a segment that lives; 0: no compaction. */
    uint64_t compact_rate;              /* Bytes a second; at least 1. */
    uint32_t eos;                       /* Token that ends an answer. */
    uint64_t scrub_rate_bytes;          /* A second, where `scrub start` names none. */
    uint64_t scrub_every_ms;            /* One begins by itself; 0: none does. */
    /* The master key as it is configured, read anew; NULL: none is.  On the shard. */
    kv_status (*read_master_key)(void *context, uint8_t key[32], struct kv_error *err);
    void *key_context;
    const char *key_setting;       /* That says where it is. */
    const struct eng_model *model; /* For its count of wrong bytes (SYNTHETIC); NULL in tests. */
};

kv_status shard_create(const struct shard_options *options, struct shard **ret_shard,
                       struct kv_error *err) KV_MUST_CHECK;
void shard_destroy(struct shard *shard); /* After join. */

/* The thread's body; returns after shard_stop(). */
void shard_run(void *shard);

/* Any thread.  KV_BUSY when KV_REQUESTS_INFLIGHT_MAX are in: nothing was posted, the caller answers
 * QUEUE_FULL; KV_SHUTDOWN after shard_stop. */
kv_status shard_post(struct shard *shard, struct request *req) KV_MUST_CHECK;

/* Any thread: tells the shard to look at cancelled flags soon. */
void shard_poke(struct shard *shard);

/* Any thread: a file that the next start needs is not in its place any more, so nothing more is
 * acknowledged and health says so.  is_page_file: a segment's; else records or the directory are
 * concerned.  `why` outlives the shard's run. */
void shard_files_gone(struct shard *shard, bool is_page_file, const char *why);

/* Any thread: refuse new requests (SHUTTING_DOWN), cancel running ones at the next chunk or step,
 * commit nothing new, return from shard_run when all are answered. */
void shard_stop(struct shard *shard);

/* Any thread: NULL while serving, else one sentence (read-only tier, ...). For the health service.
 */
const char *shard_health(struct shard *shard);
