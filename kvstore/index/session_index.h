#pragma once

/*
 * What is stored, in memory: users, sessions, and per session the tree of its checkpoints.
 * Owned by: shard.  No I/O here; store/ loads and records, tiers hold the bytes.
 *
 * A node is a checkpoint at `tokens`; its edge covers (parent.tokens, tokens] and lists the pages
 * floor(parent.tokens / 128) .. (tokens - 1) / 128.  A page object is one 128-token page of a
 * branch; it grows in place while the branch fills it (all nodes that list it see the fuller page)
 * and is copied when another branch leaves it in the middle.
 *
 * Limits: nodes and pages from the index budget, sessions KV_SESSIONS_MAX.  Tables are mapped once
 * and never move, so pointers stay valid while an entry is used.
 */

#include "kvstore/base/digest.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/rate.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/image.h"
#include "kvstore/format/reason.h"
#include "kvstore/format/removal.h"
#include "kvstore/tier/tier_pool.h"

#include <stdbool.h>
#include <stdint.h>

#define KV_PAGE_INDEX_NONE UINT32_MAX

struct kv_session;

struct kv_page {
    struct kv_session *session; /* Whose tree it is of. */
    uint64_t uid;               /* Names the page in the manifest; never changes. */
    uint64_t generation;        /* Of its last write. */
    uint64_t tag;               /* First 8 B of the chain digest at its start. */
    uint32_t position;          /* Multiple of 128. */
    uint32_t count;             /* Tokens it holds. */
    uint32_t refs;              /* Edges and live tables that list it; free at 0. */
    uint32_t ssd_page;          /* KV_SSD_PAGE_NONE: not written yet. */
    uint32_t hbm_slot;          /* KV_HBM_SLOT_NONE: not in memory. */
    bool durable;               /* ssd_page holds it and the manifest says so. */
    bool used;
};

struct kv_user {
    struct kv_user_id id;
    uint8_t salt[32];
    struct kv_digest root;           /* D_0 of this user and the model served now. */
    char name[KV_USER_NAME_MAX + 1]; /* Set by whoever adds it; "" in tests. */
    bool erasing;                    /* No session of it is made. */
    uint32_t pages;                  /* Of all sessions, as below. */
    uint32_t main_sessions;          /* Of kind MAIN; kv_index_session_kind(). */
    struct kv_rate requests, tokens; /* What his quota still lets through. */
    struct kv_user *next;
};

struct kv_node {
    struct kv_checkpoint_id id;
    struct kv_digest digest; /* At tokens. */
    struct kv_node *parent;  /* NULL: starts at 0. */
    struct kv_node *child;   /* First. */
    struct kv_node *sibling; /* Next. */
    struct kv_session *session;
    uint32_t tokens;
    uint32_t page_count;
    uint32_t *pages; /* Indices of page objects. */
    uint64_t created_ms, used_ms;
    struct kv_pool_ref image;
    struct kv_image_state image_state; /* Valid while image.slot is. */
    uint32_t replays[KV_REPLAYS_MAX];  /* H of each clipped replay of its edge, ascending:
                                          parent.tokens <= H < tokens. */
    uint64_t kernels;                  /* Family that computed the edge; 0: not known. */
    uint8_t replay_count;
    uint32_t replay_total; /* Of the whole path. */
    uint32_t approx_from;  /* First H of the whole path; UINT32_MAX: the rows are exact. */
    uint8_t kind;
    bool recorded; /* Counted in the session's recorded_nodes. */
    bool durable;
    bool foreign; /* Of another model: never matched. */
    bool used;
};

enum kv_load_state { KV_LOAD_NONE, KV_LOAD_RUNNING, KV_LOAD_DONE };

struct kv_session {
    struct kv_session_id id;
    struct kv_user *user;
    struct kv_session *next; /* Hash chain. */
    uint64_t created_ms, used_ms, ttl_ms, epoch;
    struct kv_checkpoint_id head_id; /* As recorded; resolved to head when the tree is loaded. */
    bool has_head;
    uint32_t head_tokens;    /* As recorded, like the next: for lists while not loaded. */
    uint32_t recorded_nodes; /* That records name, or batches posted or being filled. */
    uint32_t pages; /* Of its tree; while that is not loaded as it last was, and before the first
                       load what the position of the head says. */
    uint32_t claimed_tokens; /* Where the caller of the last save was told the head is. */
    uint8_t kind;
    enum kv_load_state load;
    char *name, *parent_name; /* Heap. */
    /* Only while loaded. */
    struct kv_node *roots; /* Children of position 0. */
    struct kv_node *head;  /* Deepest checkpoint of the head's branch; NULL: position 0. */
    uint32_t node_count;
    bool unreadable; /* Loaded, and its records cannot be read: nothing of it is used or saved. */
    struct kv_history *history; /* What was removed from it; heap, NULL: nothing. */
    /* For the shard. */
    void *live;     /* struct live, or NULL. */
    void *busy;     /* The request that has the session. */
    bool fell_back; /* The head was ahead of what is saved and was lost: a Decode would go on
                       from somewhere else than its caller thinks. */
    bool deleting;  /* Its records are on their way out: nobody may begin anything with it. */
    uint64_t sweep_after_ms; /* A load by the sweep failed: not again before this. */
    uint32_t commits;        /* In flight. */
    uint32_t flows;          /* Requests under way on it: it is not unloaded. */
    uint64_t touched_seq;    /* For unloading the least recently used. */
    void *waiters;           /* Requests parked for the load. */
    uint32_t waiter_count;
};

struct kv_index;

struct kv_index_options {
    uint64_t bytes; /* For nodes and pages. */
    struct kv_digest model;
    uint64_t kernels;      /* Of this process: what new nodes are made by. */
    uint32_t sessions_max; /* At most KV_SESSIONS_MAX. */
};

kv_status kv_index_create(const struct kv_index_options *options, struct kv_index **ret_index,
                          struct kv_error *err) KV_MUST_CHECK;
void kv_index_destroy(struct kv_index *index);

/* In no particular order; start with *bucket = 0, last = NULL. */
struct kv_user *kv_index_user_next(const struct kv_index *index, uint32_t *bucket,
                                   const struct kv_user *last);
struct kv_user *kv_index_user_find(struct kv_index *index, const struct kv_user_id *id);
/* salt NULL: a fresh random one.  NULL: out of memory. */
struct kv_user *kv_index_user_add(struct kv_index *index, const struct kv_user_id *id,
                                  const uint8_t salt[32]);

/* It has no session. */
void kv_index_user_remove(struct kv_index *index, struct kv_user *user);

struct kv_session *kv_index_session_find(struct kv_index *index, const struct kv_session_id *id);
/* NULL: KV_SESSIONS_MAX or memory reached. */
struct kv_session *kv_index_session_add(struct kv_index *index, const struct kv_session_id *id,
                                        struct kv_user *user, const char *name,
                                        const char *parent_name);
/* Of a new one; it counts for its user as what it is until it is removed. */
void kv_index_session_kind(struct kv_session *session, uint8_t kind);
void kv_index_session_remove(struct kv_index *index, struct kv_session *session);
/* Its history, to be added to; made if there is none.  NULL: no memory. */
struct kv_history *kv_index_history(struct kv_index *index, struct kv_session *session);
void kv_index_history_drop(struct kv_index *index, struct kv_session *session);
/* Says how many pages a tree has that is not loaded. */
void kv_index_session_pages(struct kv_index *index, struct kv_session *session, uint32_t pages);
/* In no particular order; start with *bucket = 0, last = NULL. */
struct kv_session *kv_index_session_next(struct kv_index *index, uint32_t *bucket,
                                         struct kv_session *last);

/* NULL: the table is full. The node is linked under parent (NULL: session root); pages: page_count
 * indices, copied; each gets one reference more. */
struct kv_node *kv_index_node_add(struct kv_index *index, struct kv_session *session,
                                  struct kv_node *parent, uint32_t tokens, const uint32_t *pages,
                                  uint32_t page_count);
/* Cuts node's edge at `tokens` (inside it): a new node there takes the first part of the edge and
 * its replays, and node becomes its child.  Only memory changes; node's record stays true.
 * NULL: the table is full. */
struct kv_node *kv_index_node_split(struct kv_index *index, struct kv_node *node, uint32_t tokens);
/* The clipped replays of a new node's edge (count <= KV_REPLAYS_MAX): sets its marks. */
void kv_index_node_mark(struct kv_node *node, const uint32_t *replays, uint32_t count);
/* Clipped replays on the path to node with from <= H < below, ascending.  Returns how many there
 * are; at most max are written. */
uint32_t kv_index_replays(const struct kv_node *node, uint32_t from, uint32_t below, uint32_t *out,
                          uint32_t max);
/* A record names it, or will with the batch that is being filled. */
void kv_index_node_recorded(struct kv_node *node);
/* Whether the node can become part of its child `below`: one family of kernels, and an edge holds
 * the replays of both. */
bool kv_index_may_join(const struct kv_node *node, const struct kv_node *below);
/* The node's edge becomes the first part of its only child's (asserted), and the node is gone.  Its
 * window was dropped before.  Only memory changes.  False: no memory, nothing changed. */
bool kv_index_node_join(struct kv_index *index, struct kv_node *node);
/* Unlinks and frees a leaf (asserted); drops its page references. */
void kv_index_node_remove(struct kv_index *index, struct kv_node *node);
struct kv_node *kv_index_node_find(struct kv_session *session, const struct kv_checkpoint_id *id);
/* Depth first, parents before children; NULL: the end. Start with NULL. */
struct kv_node *kv_index_node_next(struct kv_session *session, struct kv_node *node);
/* Deepest of node and its ancestors with tokens <= limit; NULL: position 0. */
struct kv_node *kv_index_ancestor(struct kv_node *node, uint32_t limit);
bool kv_index_is_ancestor(const struct kv_node *ancestor, const struct kv_node *node);

/* KV_PAGE_INDEX_NONE: the table is full. refs starts at 1. */
uint32_t kv_index_page_add(struct kv_index *index, struct kv_session *session);
struct kv_page *kv_index_page(struct kv_index *index, uint32_t page);
void kv_index_page_ref(struct kv_index *index, uint32_t page);
/* At 0 the callback frees its bytes (SSD, HBM), then the entry is free. */
void kv_index_page_unref(struct kv_index *index, uint32_t page);
typedef void kv_index_page_free_fn(void *context, uint32_t page, struct kv_page *object);
void kv_index_on_page_free(struct kv_index *index, kv_index_page_free_fn *fn, void *context);

/* Page objects of the path to `node`, deepest first choice, for positions [0, tokens): writes
 * pages_for(tokens) indices. */
void kv_index_path_pages(const struct kv_node *node, uint32_t tokens, uint32_t *ret_pages);

/* Marks node and its ancestors as used now. */
void kv_index_renew(struct kv_node *node, uint64_t now_ms);
bool kv_index_expired(const struct kv_node *node, uint64_t now_ms);

struct kv_index_usage {
    uint32_t users, sessions, nodes, nodes_max, pages, pages_max;
    uint32_t users_with_pages;
    uint64_t bytes;
    uint64_t bytes_sessions; /* Of them: entries of users and sessions, with names. */
};
/* Whether so many more nodes and pages fit the tables and, beside the sessions, the budget.  Trees
 * have a quarter of it in any case. */
bool kv_index_has_room(const struct kv_index *index, uint32_t nodes, uint32_t pages);
struct kv_index_usage kv_index_usage(const struct kv_index *index);
uint64_t kv_index_model_tag(const struct kv_index *index);
uint64_t kv_index_kernels(const struct kv_index *index);
/* Family that computed position `tokens` (at most node->tokens, above 0) of the path to node. */
uint64_t kv_index_kernels_at(const struct kv_node *node, uint32_t tokens);
