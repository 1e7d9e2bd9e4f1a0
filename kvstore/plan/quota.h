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
#include "kvstore/format/quota.h"

#include <stdbool.h>
#include <stdint.h>

/* Limits of a user's own: those whose bit is set. */
struct kv_quota_own {
    uint32_t set; /* 1 << enum kv_quota_kind */
    struct kv_quota quota;
};

/* No limits. */
struct kv_quota kv_quota_unlimited(void);
/* The plan with the user's own in their place. */
struct kv_quota kv_quota_merge(const struct kv_quota *plan, const struct kv_quota_own *own);

/* Whether `more` fits beside what is used, reservations included. */
bool kv_quota_admits(const struct kv_quota *quota, enum kv_quota_kind kind, uint64_t used,
                     uint64_t more);
/* How much is too much; 0: nothing. */
uint64_t kv_quota_over(const struct kv_quota *quota, enum kv_quota_kind kind, uint64_t used);

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
