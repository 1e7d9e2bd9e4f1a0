#pragma once

/*
 * What a quota limits, and the records of quotas (docs/format.md); integers little-endian:
 *
 * Plan, under "Y" name:
 *     0  version   1  u8 length n of the name   2  name
 *     2 + n  seven u64 limits; all ones: none   then u32 checksum of all before it
 *
 * A user's own, under "B" user(16), whether he has a session or not:
 *     0  version   1  u8 length n of his name   2  name   then u8 length p, name of his plan (p 0:
 *     the default one), u32 bits of the limits that are his own, seven u64 limits, u32 checksum
 *
 * Limits stand in the order of enum kv_quota_kind; those that are not his own are zeros.
 *
 * Pure; any thread.
 */

#include "kvstore/base/limits.h"
#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"

#include <stdbool.h>
#include <stdint.h>

/* In the order in which they are stored and shown; never renumbered. */
enum kv_quota_kind {
    KV_QUOTA_SESSIONS,  /* Of kind MAIN. */
    KV_QUOTA_TURNS,     /* Of one session. */
    KV_QUOTA_BYTES_SSD, /* Pages of all sessions, those on their way included. */
    KV_QUOTA_REQUESTS_PER_S,
    KV_QUOTA_TOKENS_PER_S, /* Of prompts, and decoded. */
    KV_QUOTA_SAVES,        /* In flight. */
    KV_QUOTA_TTL_MS,       /* Of rows, of sessions without one of their own; none: ssd.ttl. */
    KV_QUOTA_COUNT
};

#define KV_QUOTA_UNLIMITED UINT64_MAX

struct kv_quota {
    uint64_t limits[KV_QUOTA_COUNT];
};

/* "sessions", "ttl_ms"; as in flags, messages and records. */
const char *kv_quota_name(enum kv_quota_kind kind);
bool kv_quota_find(const char *name, enum kv_quota_kind *ret_kind);
/* The least a limit may be: a daemon with less can do nothing for the user; and the most. */
uint64_t kv_quota_least(enum kv_quota_kind kind);
uint64_t kv_quota_most(enum kv_quota_kind kind);
/* UNLIMITED, or between the two. */
bool kv_quota_is_valid(enum kv_quota_kind kind, uint64_t limit);

#define KV_RECORD_QUOTA_LIMITS KV_QUOTA_COUNT
#define KV_PLAN_NAME_MAX 64u
#define KV_RECORD_PLAN_MAX (2u + KV_PLAN_NAME_MAX + 8u * (uint32_t)KV_RECORD_QUOTA_LIMITS + 4u)
#define KV_RECORD_QUOTA_MAX (KV_RECORD_PLAN_MAX + 1u + KV_USER_NAME_MAX + 4u)
#define KV_KEY_QUOTA_MAX (1u + KV_PLAN_NAME_MAX)

struct kv_record_plan {
    char name[KV_PLAN_NAME_MAX + 1];
    uint64_t limits[KV_RECORD_QUOTA_LIMITS];
};

struct kv_record_quota {
    char user[KV_USER_NAME_MAX + 1];
    char plan[KV_PLAN_NAME_MAX + 1];
    uint32_t set; /* Bit i: limits[i] is his own. */
    uint64_t limits[KV_RECORD_QUOTA_LIMITS];
};

/* Encoders return the length. */
uint32_t kv_record_plan_encode(const struct kv_record_plan *record, uint8_t *buf);
uint32_t kv_record_quota_encode(const struct kv_record_quota *record, uint8_t *buf);
/* KV_CORRUPT: length, version, checksum or a bound is wrong. */
kv_status kv_record_plan_decode(const uint8_t *value, uint32_t bytes,
                                struct kv_record_plan *ret_record) KV_MUST_CHECK;
kv_status kv_record_quota_decode(const uint8_t *value, uint32_t bytes,
                                 struct kv_record_quota *ret_record) KV_MUST_CHECK;
uint32_t kv_key_plan(const char *name, uint8_t key[KV_KEY_QUOTA_MAX]);
uint32_t kv_key_quota(const struct kv_user_id *user, uint8_t key[KV_KEY_QUOTA_MAX]);
