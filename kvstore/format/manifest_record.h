#pragma once

/*
 * Keys and values of the manifest (docs/format.md); integers little-endian; every value starts with
 * a version byte and ends with a CRC-32C of what comes before.  No token ids stand here: digests
 * are salted per user.  Pure; any thread.
 *
 *   "M"                                  store: directory, fingerprint, boot count
 *   "C"                                  commit: how many batches there were
 *   "W"                                  clock: when a wall clock that jumped was believed
 *   "U" user(16)                         user: name, salt (version 2: encrypted)
 *   "K" user(16) key id u32 BE           a data key of that user (format/key_record.h)
 *   "S" session(16)                      session
 *   "T" tree(16) "N" checkpoint(16)      node of a tree: of the session of that id, and its forks
 *   "T" tree(16) "P" page uid u64 BE     page of that tree
 *   "G" segment u32 BE                   segment: which of its pages the records above name
 *   "G"                                  doubt: those are to be counted again at the next start
 */

#include "kvstore/base/digest.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/key_record.h"
#include "kvstore/format/kernels.h"

#include <stdbool.h>
#include <stdint.h>

#define KV_RECORD_KEY_MAX 40u

struct kv_record_store {
    struct kv_directory_id directory; /* As in the superblock. */
    struct kv_digest model;           /* Served last. */
    uint64_t boots;                   /* Starts so far: the high half of generations. */
};

/* In every batch: which one it is. */
struct kv_record_commit {
    uint64_t number; /* From 1; numbers rise by one from batch to batch. */
};

/* Only of a directory under which the wall clock jumped, and stayed. */
struct kv_record_clock {
    uint64_t floor_ms;  /* What was used before counts as used then. */
    uint64_t before_ms; /* What the time had been. */
};

struct kv_record_user {
    char name[KV_USER_NAME_MAX + 1];
    uint8_t salt[KV_SALT_BYTES];  /* In plain, unless: */
    struct kv_sealed_salt sealed; /* With a key id: the salt, and version 2 of the record. */
};

struct kv_record_session {
    struct kv_user_id user;
    uint8_t kind;
    uint64_t created_ms, used_ms, ttl_ms, epoch; /* Wall time. */
    bool has_head;
    struct kv_checkpoint_id head;
    uint32_t head_tokens;    /* Position of that checkpoint, for lists. */
    uint32_t claimed_tokens; /* Where its caller was told the head is; above head_tokens when the
                                rest was not to be stored (stable_tokens). */
    uint32_t checkpoints;    /* That it made and that were there when it was written. */
    bool has_tree;           /* Its head is in another tree than that of its own id: */
    struct kv_session_id tree;
    bool has_origin; /* And was forked there, from this checkpoint; only with has_tree. */
    struct kv_checkpoint_id origin;
    uint32_t origin_tokens;
    char name[KV_SESSION_NAME_MAX + 1];
    char parent_name[KV_SESSION_NAME_MAX + 1];
};

struct kv_record_node {
    struct kv_checkpoint_id id;
    bool has_parent;
    struct kv_checkpoint_id parent;
    uint64_t model_tag; /* First 8 B of the fingerprint. */
    uint64_t kernels;   /* Which family computed its edge; 0: not known. */
    uint32_t tokens;    /* t */
    struct kv_digest digest;
    uint8_t kind;
    uint64_t created_ms, used_ms;
    uint32_t replays[KV_REPLAYS_MAX]; /* H of each clipped replay, ascending. */
    uint32_t replay_count;
    bool has_maker; /* Made by another session than that of the tree's id: */
    struct kv_session_id maker;
    uint32_t page_count;      /* Pages of its edge: floor(parent.t/128) .. (t-1)/128. */
    const uint8_t *page_uids; /* u64 LE each; borrowed from the value on decode. */
};

struct kv_record_page {
    uint64_t uid;
    uint32_t ssd_page;
    uint64_t generation;
    uint32_t position;
    uint32_t count;
    uint64_t tag; /* First 8 B of the chain digest at the page's start. */
};

enum kv_segment_state { KV_SEGMENT_OPEN = 1, KV_SEGMENT_SEALED = 2 };

struct kv_record_segment {
    uint8_t state;    /* enum kv_segment_state */
    uint64_t used_ms; /* No checkpoint that needs a page of it was used later. */
    uint32_t pages;   /* Of every segment of the directory. */
    /* Bit i % 8 of byte i / 8: a page record names page i.  kv_record_segment_bits(pages) bytes;
     * borrowed from the value on decode. */
    const uint8_t *bits;
};

/* Encoders write into buf (size *_MAX or the given function) and return the length. */
#define KV_RECORD_STORE_MAX 128u
#define KV_RECORD_COMMIT_BYTES 13u
#define KV_RECORD_CLOCK_BYTES 21u
#define KV_RECORD_USER_MAX 256u
#define KV_RECORD_SESSION_MAX 512u
#define KV_RECORD_PAGE_MAX 64u
#define KV_RECORD_DOUBT_BYTES 5u
uint32_t kv_record_node_max(uint32_t page_count);
uint32_t kv_record_segment_bits(uint32_t pages);
uint32_t kv_record_segment_bytes(uint32_t pages); /* Exactly. */

uint32_t kv_record_store_encode(const struct kv_record_store *record, uint8_t *buf);
uint32_t kv_record_commit_encode(const struct kv_record_commit *record, uint8_t *buf);
uint32_t kv_record_clock_encode(const struct kv_record_clock *record, uint8_t *buf);
uint32_t kv_record_user_encode(const struct kv_record_user *record, uint8_t *buf);
uint32_t kv_record_session_encode(const struct kv_record_session *record, uint8_t *buf);
uint32_t kv_record_node_encode(const struct kv_record_node *record, uint8_t *buf);
uint32_t kv_record_page_encode(const struct kv_record_page *record, uint8_t *buf);
uint32_t kv_record_segment_encode(const struct kv_record_segment *record, uint8_t *buf);
uint32_t kv_record_doubt_encode(uint8_t *buf);

/* KV_CORRUPT: length, version, checksum or a bound is wrong. */
kv_status kv_record_store_decode(const uint8_t *value, uint32_t bytes,
                                 struct kv_record_store *ret_record) KV_MUST_CHECK;
kv_status kv_record_commit_decode(const uint8_t *value, uint32_t bytes,
                                  struct kv_record_commit *ret_record) KV_MUST_CHECK;
kv_status kv_record_clock_decode(const uint8_t *value, uint32_t bytes,
                                 struct kv_record_clock *ret_record) KV_MUST_CHECK;
kv_status kv_record_user_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_user *ret_record) KV_MUST_CHECK;
kv_status kv_record_session_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_record_session *ret_record) KV_MUST_CHECK;
kv_status kv_record_node_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_node *ret_record) KV_MUST_CHECK;
kv_status kv_record_page_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_page *ret_record) KV_MUST_CHECK;
kv_status kv_record_segment_decode(const uint8_t *value, uint32_t bytes,
                                   struct kv_record_segment *ret_record) KV_MUST_CHECK;

/* Keys; return the length. */
uint32_t kv_key_store(uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_commit(uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_clock(uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_doubt(uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_segment(uint32_t number, uint8_t key[KV_RECORD_KEY_MAX]);
/* False: the key of another kind of record. */
bool kv_key_segment_parse(const uint8_t *key, uint32_t key_bytes, uint32_t *ret_number);
uint32_t kv_key_user(const struct kv_user_id *user, uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_session(const struct kv_session_id *session, uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_tree(const struct kv_session_id *session, uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_node(const struct kv_session_id *session, const struct kv_checkpoint_id *id,
                     uint8_t key[KV_RECORD_KEY_MAX]);
uint32_t kv_key_page(const struct kv_session_id *session, uint64_t uid,
                     uint8_t key[KV_RECORD_KEY_MAX]);
