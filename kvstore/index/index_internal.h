#pragma once

/* Private to index/: the tables.  Owned by: shard. */

#include "kvstore/index/session_index.h"

#define SESSION_BUCKETS 65536u
#define USER_BUCKETS 4096u
#define TREE_BUCKETS 4096u

struct kv_index {
    struct kv_digest model;
    uint64_t kernels;
    uint32_t sessions_max;
    struct kv_user *users[USER_BUCKETS];
    struct kv_session_entry *sessions[SESSION_BUCKETS];
    struct kv_tree *trees[TREE_BUCKETS];
    struct kv_session_entry *entries; /* While they are not open. */
    uint32_t entries_touched;
    struct kv_session_entry *entry_free;       /* Chained by next. */
    struct kv_session *open_first, *open_last; /* Looked at least recently, most recently. */
    uint32_t open_count;
    struct kv_node *nodes;
    struct kv_page *pages;
    uint32_t nodes_max, pages_max;
    uint32_t nodes_touched, pages_touched; /* Entries ever used: the rest is untouched memory. */
    struct kv_node *node_free;             /* Chained by sibling. */
    uint32_t page_free;                    /* Chained by position. */
    uint32_t user_count, session_count, node_count, page_count;
    uint32_t users_with_pages;
    uint64_t bytes_max;
    uint64_t heap_bytes;    /* Page lists of nodes. */
    uint64_t session_bytes; /* Users, entries of sessions, and what is open, with names. */
    kv_index_page_free_fn *page_freed;
    void *page_freed_context;
};

/* index_sessions.c: everything of sessions and trees goes; nodes are the caller's. */
void kv_index_sessions_free(struct kv_index *index);
