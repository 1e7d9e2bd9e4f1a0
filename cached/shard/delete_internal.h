#pragma once

/* What delete.c and delete_records.c share: sessions on their way out.  Shard thread. */

#include "cached/shard/shard_internal.h"

#define REMOVAL_SCAN_BYTES (128u << 10) /* Holds the largest record. */

struct removal {
    struct shard *shard;
    struct flow *flow; /* Who asked; NULL: it was answered (planted bug). */
    struct removal *next;
    bool waiting; /* For its session to be at rest. */
    bool dry_run;
#ifdef CACHED_TEST_HOOKS
    uint64_t held_ns; /* A planted bug: not posted before this. */
#endif
    struct kv_loss loss; /* Cause QUOTA: for room; the flow goes on. */
    /* EraseUser. */
    struct kv_user *user; /* NULL: DeleteSession. */
    struct kv_session_id *ids;
    uint32_t id_count, id_next;
    /* The session that goes now. */
    struct kv_session *session;
    struct kv_batch *batch;
    struct kv_manifest_scan scan;
    uint8_t key[KV_RECORD_KEY_MAX], start[KV_RECORD_KEY_MAX + 1];
    uint8_t *buf;
    uint64_t nodes, pages; /* Of this session, that go. */
    bool leaves;           /* Others have heads in its tree. */
    struct request_receipt receipt;
};

/* ---- delete.c ---- */

/* What is left stays as it was; whoever asked hears why. */
void removal_fail(struct removal *removal, kv_status status);
/* Its batch was not written, or may have been. */
void removal_unrecorded(struct removal *removal, kv_status status);
/* Its session is as any other again. */
void removal_let_go(struct removal *removal);
/* Its session is gone, or counted: the next one, or the end. */
void removal_next(struct removal *removal);

/* ---- delete_records.c ---- */

/* Reads the records of its session, and removes them unless it is a dry run. */
void removal_read(struct removal *removal);
/* Into the receipt. */
void removal_count(struct removal *removal);
/* What is remembered of its session. */
struct kv_record_deleted removal_record(const struct removal *removal);
/* The batch that removes its session is durable, or failed. */
void removal_session_gone(void *context, kv_status status);
#ifdef CACHED_TEST_HOOKS
/* The planted bug: what was answered long ago is posted when its time has come. */
void removal_post_held(struct removal *removal);
#endif
