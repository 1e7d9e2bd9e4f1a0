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
    struct kv_session *session; /* That made it; of its tree. */
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
    bool keys_gone;                  /* A batch that deletes its data keys is posted. */
    void *keys;                      /* The store's: data keys, the newest first; NULL: none. */
    uint32_t pages;                  /* Of all sessions, as below. */
    uint32_t mains, others;          /* Sessions of kind main, and of the others. */
    struct kv_rate requests, tokens; /* What his quota still lets through. */
    uint64_t ttl_ms;                 /* Of sessions that have none of their own. */
    struct kv_user *next;
};

struct kv_node {
    struct kv_checkpoint_id id;
    struct kv_digest digest;    /* At tokens. */
    struct kv_node *parent;     /* NULL: starts at 0. */
    struct kv_node *child;      /* First. */
    struct kv_node *sibling;    /* Next. */
    struct kv_session *session; /* That made it. */
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
    bool recorded; /* Counted in its session's recorded_nodes. */
    bool durable;
    bool foreign; /* Of another model: never matched. */
    bool kept;    /* While a session leaves the tree: others need it. */
    bool used;
};

enum kv_load_state { KV_LOAD_NONE, KV_LOAD_RUNNING, KV_LOAD_DONE };

struct kv_session_entry;

#define KV_SESSION_MAIN 1u /* Of kv_session_entry.kind; above it: sub, ephemeral. */

/* What sessions that share checkpoints have in common: the checkpoints.  In memory while one of its
 * sessions is open, and always where it is not simply the tree of the one session of its id. */
struct kv_tree {
    struct kv_session_id id; /* In the keys of its records: of the session that made it, mostly. */
    struct kv_tree *next;    /* Hash chain. */
    struct kv_session_entry *sessions; /* All that have a head in it, open or not. */
    uint32_t session_count;
    enum kv_load_state load;
    /* Only while loaded; then its sessions are open. */
    struct kv_node *roots; /* Children of position 0. */
    bool unreadable;   /* Loaded, and its records cannot be read: nothing of it is used or saved. */
    uint64_t removals; /* Nodes that went since it is in memory: who keeps one looks at this. */
    struct kv_history *history; /* What was removed from it; heap, NULL: nothing. */
    /* For the shard. */
    uint32_t commits;     /* In flight, of all its sessions. */
    uint64_t touched_seq; /* For unloading the least recently used. */
    void *waiters;        /* Requests parked for the load. */
    uint32_t waiter_count;
};

/* What is in memory of every session, also of one that nobody uses: at most 96 B.  Its name and
 * where exactly its head is stand in its record, and are read when it is used.
 *
 * head_tokens: as recorded, for lists while it is not loaded.  recorded_nodes: of those it made,
 * that records name, or batches posted or being filled.  pages: that it made; while its tree is not
 * loaded as it last was, and before the first load what the position of the head says.  fell_back:
 * the head was ahead of what is saved and was lost, so a Decode would go on from somewhere else
 * than its caller thinks.  ttl_ms: of its own; 0: as its user's, which changes with his plan. */
#define KV_SESSION_FIELDS                                                                          \
    struct kv_session_id id; /* Hash of user and name. */                                          \
    struct kv_user *user;                                                                          \
    struct kv_session_entry *next; /* Hash chain. */                                               \
    struct kv_tree *tree;          /* NULL: the one of its own id, and it is not in memory. */     \
    struct kv_session_entry *tree_next; /* The next one with a head in that tree. */               \
    uint64_t created_ms, used_ms, ttl_ms, epoch;                                                   \
    uint32_t head_tokens, recorded_nodes, pages;                                                   \
    uint8_t kind;                                                                                  \
    bool fell_back;                                                                                \
    bool is_open; /* It is the beginning of a struct kv_session. */

struct kv_session_entry {
    KV_SESSION_FIELDS
};

_Static_assert(sizeof(struct kv_session_entry) <= 96, "a session that nobody uses costs 96 B");

/* A session that is used: from the first call that names it until it is at rest and its tree has
 * left memory. */
struct kv_session {
    union {
        struct kv_session_entry entry;
        struct {
            KV_SESSION_FIELDS
        };
    };
    struct kv_session *open_prev, *open_next; /* All that are open. */
    /* From its record: valid once has_details. */
    bool has_details;
    bool has_head;
    struct kv_checkpoint_id head_id; /* As recorded; resolved to head when the tree is loaded. */
    uint32_t claimed_tokens;         /* Where the caller of the last save was told the head is. */
    bool has_origin;                 /* It is a fork, of this checkpoint of its parent: */
    uint32_t origin_tokens;
    struct kv_checkpoint_id origin_id;
    char *name, *parent_name; /* Heap; NULL before. */
    uint32_t page_objects; /* That count as made by it, and point here; also after their tree left
                              memory, while a late read holds them. */
    /* Only while its tree is loaded. */
    struct kv_node *head; /* Deepest checkpoint of the head's branch; NULL: position 0. */
    uint32_t node_count;  /* That it made. */
    struct {
        uint32_t recorded_nodes, pages;
    } before; /* While its tree comes or goes. */
    /* For the shard. */
    void *live;      /* struct live, or NULL. */
    void *busy;      /* The request that has the session. */
    bool deleting;   /* Its records are on their way out: nobody may begin anything with it. */
    bool head_falls; /* In an eviction: its head goes, and its record is to say so. */
    uint64_t sweep_after_ms; /* The sweep could do nothing about it: not again before this. */
    uint32_t flows;          /* Requests under way on it: it is not unloaded. */
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

struct kv_user *kv_index_user_find(struct kv_index *index, const struct kv_user_id *id);
/* salt NULL: a fresh random one.  NULL: out of memory. */
struct kv_user *kv_index_user_add(struct kv_index *index, const struct kv_user_id *id,
                                  const uint8_t salt[32]);

/* In no particular order; start with *bucket = 0, last = NULL. */
struct kv_user *kv_index_user_next(struct kv_index *index, uint32_t *bucket, struct kv_user *last);

/* It has no session. */
void kv_index_user_remove(struct kv_index *index, struct kv_user *user);

/* What is always there; NULL: no such session. */
struct kv_session_entry *kv_index_entry_find(const struct kv_index *index,
                                             const struct kv_session_id *id);
/* Start-up: one that is recorded.  tree NULL: the one of its own id.  NULL: sessions_max or memory
 * reached. */
struct kv_session_entry *kv_index_entry_add(struct kv_index *index, const struct kv_session_id *id,
                                            struct kv_user *user, const struct kv_session_id *tree);
/* Sets what the session is for; its user's sessions are counted by it. */
void kv_index_entry_kind(struct kv_session_entry *entry, uint8_t kind);
/* Start-up, while none is open: below the number of sessions, another one for each. */
uint32_t kv_index_entry_number(const struct kv_index *index, const struct kv_session_entry *entry);
/* In no particular order; start with *bucket = 0, last = NULL.  `last` may have been opened. */
struct kv_session_entry *kv_index_entry_next(const struct kv_index *index, uint32_t *bucket,
                                             const struct kv_session_entry *last);
/* For looking only: the session if it is open, else `shape`, filled in as it would be opened. */
const struct kv_session *kv_index_look(const struct kv_session_entry *entry,
                                       struct kv_session *shape);

/* Opens it if need be, without its details.  NULL: no such session, or no memory. */
struct kv_session *kv_index_session_find(struct kv_index *index, const struct kv_session_id *id);
/* A new one, open, with its details.  NULL: sessions_max or memory reached. */
struct kv_session *kv_index_session_add(struct kv_index *index, const struct kv_session_id *id,
                                        struct kv_user *user, const char *name,
                                        const char *parent_name);
/* What is only in its record.  False: no memory. */
bool kv_index_session_detail(struct kv_index *index, struct kv_session *session, const char *name,
                             const char *parent_name);
/* It made no node that is in memory, and no page but such as others of its tree hold: these are
 * another one's then. */
void kv_index_session_remove(struct kv_index *index, struct kv_session *session);
/* The history of a tree, to be added to; made if there is none.  NULL: no memory. */
struct kv_history *kv_index_history(struct kv_index *index, struct kv_tree *tree);
void kv_index_history_drop(struct kv_index *index, struct kv_tree *tree);
/* Leaves the entry only, if nothing needs more; at most `count` of those that are open are looked
 * at, in turn.  Pointers to them are not valid after it. */
void kv_index_close_idle(struct kv_index *index, uint32_t count, uint64_t now_ms);
/* All that are open; NULL: the end.  Start with NULL. */
struct kv_session *kv_index_open_next(const struct kv_index *index,
                                      const struct kv_session *session);
/* Says how many pages it made, of a tree that is not loaded. */
void kv_index_session_pages(struct kv_index *index, struct kv_session_entry *entry, uint32_t pages);

/* One that has a head in that tree, open; NULL: there is no such tree, or no memory. */
struct kv_session *kv_index_tree_session(struct kv_index *index, const struct kv_session_id *tree);
/* Likewise, for looking only. */
const struct kv_session_entry *kv_index_tree_entry(const struct kv_index *index,
                                                   const struct kv_session_id *tree);
/* The id of its tree, also where that is not in memory. */
const struct kv_session_id *kv_index_tree_id(const struct kv_session_entry *entry);
/* The first, then each next one with a head in the tree; all are open while it is loaded. */
struct kv_session *kv_index_head_next(const struct kv_tree *tree, const struct kv_session *session);
/* Opens all of them.  False: no memory. */
bool kv_index_tree_open(struct kv_index *index, struct kv_tree *tree);
/* A second head in the tree of `source`: a new session, open.  NULL: as above. */
struct kv_session *kv_index_session_fork(struct kv_index *index, const struct kv_session *source,
                                         const struct kv_session_id *id, const char *name,
                                         const char *parent_name);
/* From now on it counts as made by another session of the tree, with the pages of its edge that
 * were made by its maker. */
void kv_index_node_give(struct kv_index *index, struct kv_node *node, struct kv_session *to);
/* Likewise a page, whatever lists it. */
void kv_index_page_give(struct kv_index *index, uint32_t page, struct kv_session *to);
/* Likewise all pages that still count as made by `from`. */
void kv_index_pages_give(struct kv_index *index, struct kv_session *from, struct kv_session *to);
/* A session other than `but` (NULL: any) whose head is at or below the node; NULL: none. */
struct kv_session *kv_index_stands(const struct kv_node *node, const struct kv_session *but);

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
/* Whether the node can become part of its child `below`: made by one session and one family of
 * kernels, and an edge holds the replays of both. */
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
/* How long the session's rows live after their last use: its own ttl, or its user's. */
uint64_t kv_index_session_ttl_ms(const struct kv_session_entry *session);
/* How long it lives after its last use: the ttl of its maker, or of another session whose head is
 * at or below it, if that is longer. */
uint64_t kv_index_ttl_ms(const struct kv_node *node);
/* Where sessions share a tree what is below may live on: leaves go first. */
bool kv_index_expired(const struct kv_node *node, uint64_t now_ms);

struct kv_index_usage {
    uint32_t users, sessions, nodes, nodes_max, pages, pages_max;
    uint32_t users_with_pages;
    uint64_t bytes;
    uint64_t bytes_sessions; /* Of them: users, and sessions, with what is open of them. */
    uint64_t bytes_entries;  /* Of these: the entries of sessions. */
    uint32_t sessions_open;
};
/* Whether so many more nodes and pages fit the tables and, beside the sessions, the budget.  Trees
 * have a quarter of it in any case. */
bool kv_index_has_room(const struct kv_index *index, uint32_t nodes, uint32_t pages);
struct kv_index_usage kv_index_usage(const struct kv_index *index);
uint64_t kv_index_model_tag(const struct kv_index *index);
uint64_t kv_index_kernels(const struct kv_index *index);
/* Family that computed position `tokens` (at most node->tokens, above 0) of the path to node. */
uint64_t kv_index_kernels_at(const struct kv_node *node, uint32_t tokens);
