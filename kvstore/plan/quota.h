#pragma once

/*
 * Quotas: what a user may have, whether something more is admitted, and what of his own goes when
 * he has too much.
 *
 * A limit is hard: what is in flight counts as used before it begins, so use never passes it.  A
 * limit that is lowered below use refuses what is new until enough of the user's own has gone:
 * windows that a later turn superseded, then his oldest turns, then his least recently used
 * session.  Nothing of another user ever goes for it.
 *
 * A user has the limits of his plan, or of the default plan, with his own in their place where he
 * has any.
 *
 * Pure: no I/O, no clock, no allocation.
 */

#include "kvstore/format/ids.h"

#include <stdbool.h>
#include <stdint.h>

/* In the order in which they are stored and shown; never renumbered. */
enum kv_quota_kind {
    KV_QUOTA_SESSIONS, /* Of kind MAIN. */
    KV_QUOTA_TURNS,    /* Of one session. */
    KV_QUOTA_BYTES_HBM,
    KV_QUOTA_BYTES_POOL,
    KV_QUOTA_BYTES_SSD,
    KV_QUOTA_REQUESTS_PER_S,
    KV_QUOTA_TOKENS_PER_S, /* Computed: prompt tokens that are not a hit, and decoded ones. */
    KV_QUOTA_SAVES,        /* In flight. */
    KV_QUOTA_PINS,
    KV_QUOTA_COUNT
};

#define KV_QUOTA_UNLIMITED UINT64_MAX

struct kv_quota {
    uint64_t limits[KV_QUOTA_COUNT];
};

/* Limits of a user's own: those whose bit is set. */
struct kv_quota_own {
    uint32_t set; /* 1 << enum kv_quota_kind */
    struct kv_quota quota;
};

/* "sessions", "bytes_ssd"; as in flags, messages and records. */
const char *kv_quota_name(enum kv_quota_kind kind);
bool kv_quota_find(const char *name, enum kv_quota_kind *ret_kind);
/* The least a limit may be: a daemon with less can do nothing for the user; and the most. */
uint64_t kv_quota_least(enum kv_quota_kind kind);
uint64_t kv_quota_most(enum kv_quota_kind kind);
/* UNLIMITED, or between the two. */
bool kv_quota_is_valid(enum kv_quota_kind kind, uint64_t limit);

/* No limits. */
struct kv_quota kv_quota_unlimited(void);
/* The plan with the user's own in their place. */
struct kv_quota kv_quota_merge(const struct kv_quota *plan, const struct kv_quota_own *own);

/* Whether `more` fits beside what is used, reservations included. */
bool kv_quota_admits(const struct kv_quota *quota, enum kv_quota_kind kind, uint64_t used,
                     uint64_t more);
/* How much is too much; 0: nothing. */
uint64_t kv_quota_over(const struct kv_quota *quota, enum kv_quota_kind kind, uint64_t used);

/* ---- rates ---- */

/* What a user may still do now; a second's worth can be saved up, and one call may take more than
 * that: then it is waited for.  Starts as zeros. */
struct kv_rate {
    double balance;
    uint64_t at_ns;
    bool begun;
};

/* True: taken.  False: *ret_wait_ns says when to ask again; nothing was taken. */
bool kv_rate_take(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns,
                  uint64_t *ret_wait_ns);
/* Taken after the fact, also into debt: work whose amount nobody knew before. */
void kv_rate_charge(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns);

/* ---- victims ---- */

enum kv_quota_class {
    KV_QUOTA_WINDOW,  /* A window that a later turn of its branch superseded. */
    KV_QUOTA_TURN,    /* The oldest turn of a session. */
    KV_QUOTA_SESSION, /* A whole session, when nothing smaller helps. */
    KV_QUOTA_NOTHING,
};

/* What could go, of one user. */
struct kv_quota_victim {
    enum kv_quota_class kind;
    bool is_held;     /* In use, pinned, or leased: not now. */
    uint64_t used_ms; /* Of the window's checkpoint, the turn, the session. */
    uint32_t tokens;  /* Position, for windows and turns of one age. */
    struct kv_session_id session;
};

/* Whether a goes before b: held ones never, else by class, else the least recently used, else the
 * one that stands higher in its session, else by id, so that the order is one. */
bool kv_quota_victim_before(const struct kv_quota_victim *a, const struct kv_quota_victim *b);
/* Which classes give room for a kind: 1 << enum kv_quota_class. */
uint32_t kv_quota_helps(enum kv_quota_kind kind);
