#pragma once

/*
 * Capacity eviction: what goes when the SSD tier has no room.
 *
 * Order: what is past its time; then sessions of users who hold more than their fair share; then
 * the others; within each, the least recently used first.  A fair share is the tier divided by the
 * users who have anything in it, so whoever fills the tier pushes out his own, and nobody else's
 * while he has something that may go.  A session that the engine holds between two calls goes after
 * those of its kind that it does not hold; one that a call works on does not go, but for the
 * branches beside the one that is being saved.
 *
 * Eviction begins while some room is left, so that saves seldom wait for it.
 *
 * Pure: no I/O, no clock, no allocation.
 */

#include "kvstore/format/ids.h"

#include <stdbool.h>
#include <stdint.h>

/* Looked at together: best found in one walk over all sessions. */
#define KV_EVICT_CANDIDATES_MAX 64u

/* What is known of a session. */
struct kv_evict_facts {
    uint64_t used_ms;    /* Last use. */
    uint32_t pages;      /* Of its tree. */
    uint32_t user_pages; /* Of all sessions of its user. */
    bool is_expired;
    bool is_idle;   /* Live, and no call works on it. */
    bool is_saving; /* A call works on it, and all that it still does is to save. */
    bool is_in_use; /* A call, a load or a save works on it. */
};

enum kv_evict_class {
    KV_EVICT_EXPIRED,
    KV_EVICT_ABOVE_SHARE,
    KV_EVICT_OTHER,
    KV_EVICT_NEVER, /* Not now. */
};

struct kv_evict_rank {
    enum kv_evict_class kind;
    uint8_t held; /* 0: by nobody; 1: live and idle; 2: by its own save. */
    uint64_t used_ms;
};

/* Pages of one user that are his fair share. */
uint32_t kv_evict_share(uint32_t pages_max, uint32_t users);
struct kv_evict_rank kv_evict_rank(const struct kv_evict_facts *facts, uint32_t share);
/* Whether a goes before b. */
bool kv_evict_before(const struct kv_evict_rank *a, const struct kv_evict_rank *b);

struct kv_evict_candidate {
    struct kv_evict_rank rank;
    struct kv_session_id session;
};

/* The best of what was offered, in the order in which they go.  Starts as zeros. */
struct kv_evict_list {
    struct kv_evict_candidate candidates[KV_EVICT_CANDIDATES_MAX];
    uint32_t count;
};

/* NEVER is not taken; of more than fit the last one goes. */
void kv_evict_offer(struct kv_evict_list *list, const struct kv_evict_rank *rank,
                    const struct kv_session_id *session);

/* One leaf of a session's tree. */
struct kv_evict_leaf {
    uint64_t used_ms;
    uint32_t tokens;
    bool is_kept; /* Not yet durable, or on the path of what is being saved. */
};

/* Whether a goes before b: kept ones never, else the least recently used, else the deeper. */
bool kv_evict_leaf_before(const struct kv_evict_leaf *a, const struct kv_evict_leaf *b);

/* In pages. */
struct kv_evict_space {
    uint32_t limit;   /* The tier may hold this many now. */
    uint32_t used;    /* Including what is being freed. */
    uint32_t freeing; /* Free once their records are deleted. */
    uint32_t waiting; /* Wanted by saves that found no room. */
    bool is_evicting; /* Begun and not yet done. */
};

/* Pages kept free for saves to come. */
uint32_t kv_evict_reserve(uint32_t limit);
/* Pages that are to go now; 0: none.  Begun, it goes on until half as much again is free as where
 * it began, so that it does not begin with every save. */
uint32_t kv_evict_need(const struct kv_evict_space *space);
