#pragma once

/*
 * What was removed from a session, and why: a bounded history that survives a restart, so that a
 * miss can name its cause (docs/format.md).  No token id and no name stands in it.
 *
 * One value a session, under "T" session(16) "H"; integers little-endian:
 *
 *     0  version
 *     1  u8 removals n, at most KV_REMOVALS_MAX
 *     2  u8 ids m, at most KV_REMOVED_IDS_MAX
 *     3  u8 1: older ones were left out
 *     4  n removals, oldest first, 40 B each:
 *            0 u8 cause   1 u8 part   2 u8 limit_of   3 zero
 *            4 u32 from   8 u32 to   12 u32 checkpoints
 *           16 u64 removed_ms   24 u64 limit   32 u64 value
 *        m ids of checkpoints that went, oldest first, 9 B each:
 *            0 first 8 B of the id   8 u8 index of its removal
 *        u32 checksum of all before it
 *
 * A session that was deleted leaves one value under "D" session(16), 59 B:
 *
 *     0  version   1  user(16)   17 u8 cause   18 u8 limit_of
 *    19 u64 removed_ms   27 u64 limit   35 u64 value   43 u32 checkpoints   47 u64 bytes
 *    55 u32 checksum
 *
 * Pure; any thread.
 */

#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/reason.h"

#include <stdbool.h>
#include <stdint.h>

#define KV_REMOVALS_MAX 24u
#define KV_REMOVED_IDS_MAX 48u
#define KV_RECORD_HISTORY_MAX (8u + 40u * KV_REMOVALS_MAX + 9u * KV_REMOVED_IDS_MAX)
#define KV_RECORD_DELETED_BYTES 59u
#define KV_KEY_HISTORY_BYTES 18u
#define KV_KEY_DELETED_BYTES 17u

enum kv_removal_part {
    KV_REMOVED_ROWS = 1,   /* Rows and all that stood on them. */
    KV_REMOVED_CHECKPOINT, /* Its id and window; the rows became part of the next one. */
};

/* Which limit a removal obeyed. */
enum kv_limit {
    KV_LIMIT_NONE,
    KV_LIMIT_TTL_MS,     /* Life of the session's checkpoints from their last use; value: age. */
    KV_LIMIT_SSD_BYTES,  /* Of the SSD tier; value: in use. */
    KV_LIMIT_SESSIONS,   /* The next three of a user's quota. */
    KV_LIMIT_TURNS,      /* Of one session. */
    KV_LIMIT_USER_BYTES, /* On SSD; value: what the user had. */
    KV_LIMIT_COUNT
};

struct kv_removal {
    enum kv_reason cause; /* EXPIRED, QUOTA, CAPACITY, ROLLED_BACK, DELETED, LOST_NODE, CORRUPT or
                             MODEL_CHANGED. */
    enum kv_removal_part part;
    enum kv_limit limit_of;
    uint32_t from, to;    /* Positions [from, to), from < to. */
    uint32_t checkpoints; /* How many went; at least 1. */
    uint64_t removed_ms;  /* Wall time; of the last of them. */
    uint64_t limit, value;
};

struct kv_removed_id {
    uint64_t id; /* First 8 B of a checkpoint's id. */
    uint8_t removal;
};

/* Oldest first.  Starts as zeros. */
struct kv_history {
    struct kv_removal removals[KV_REMOVALS_MAX];
    struct kv_removed_id ids[KV_REMOVED_IDS_MAX];
    uint32_t removal_count, id_count;
    bool cut; /* Older ones were left out. */
};

/* "ttl_ms", "turns"; "" for NONE. */
const char *kv_limit_name(enum kv_limit limit);
/* Whether a removal can have this cause. */
bool kv_removal_cause(enum kv_reason cause);

/* Adds a removal of one checkpoint.  Removals of one kind that touch become one, at once when they
 * follow each other within a minute, later when the history is full; if none can, the oldest is
 * left out. */
void kv_history_add(struct kv_history *history, const struct kv_removal *removal,
                    const struct kv_checkpoint_id *id);
/* The newest removal that covers the position, of rows only if asked; NULL: none. */
const struct kv_removal *kv_history_at(const struct kv_history *history, uint32_t position,
                                       bool rows_only);
/* The removal that took a checkpoint.  NULL: not known. */
const struct kv_removal *kv_history_of(const struct kv_history *history,
                                       const struct kv_checkpoint_id *id);
/* The newest; NULL: none. */
const struct kv_removal *kv_history_last(const struct kv_history *history);

/* Returns the length, at most KV_RECORD_HISTORY_MAX. */
uint32_t kv_record_history_encode(const struct kv_history *history, uint8_t *buf);
/* KV_CORRUPT: length, version, checksum or a bound is wrong. */
kv_status kv_record_history_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_history *ret_history) KV_MUST_CHECK;
uint32_t kv_key_history(const struct kv_session_id *session, uint8_t key[KV_KEY_HISTORY_BYTES]);

/* A session that is gone. */
struct kv_record_deleted {
    struct kv_user_id user;
    enum kv_reason cause; /* DELETED or QUOTA. */
    enum kv_limit limit_of;
    uint64_t removed_ms, limit, value;
    uint32_t checkpoints;
    uint64_t bytes;
};

/* KV_RECORD_DELETED_BYTES. */
uint32_t kv_record_deleted_encode(const struct kv_record_deleted *record, uint8_t *buf);
kv_status kv_record_deleted_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_record_deleted *ret_record) KV_MUST_CHECK;
uint32_t kv_key_deleted(const struct kv_session_id *session, uint8_t key[KV_KEY_DELETED_BYTES]);
