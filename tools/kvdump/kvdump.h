#pragma once

/*
 * kvdump: prints and verifies a state directory that no daemon uses.  It never writes.
 *
 * state.c opens the directory and knows users, sessions and segments; keys.c knows keys and what
 * they open; quarantine.c knows places
 * that nobody gets any more; tree.c walks the records, one session's tree at a time; check.c
 * compares a tree with its pages; segments.c compares what is counted in records with what is
 * there; verify.c and print.c are the two commands.
 */

#include "kvstore/base/limits.h"
#include "kvstore/format/acknowledged.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/old_branch.h"
#include "kvstore/format/page.h"
#include "kvstore/format/quarantine.h"
#include "kvstore/format/quota.h"
#include "kvstore/format/removal.h"
#include "kvstore/format/superblock.h"
#include "kvstore/index/manifest.h"

#include <stdio.h>

enum dump_exit {
    DUMP_OK = 0,
    DUMP_FAILED = 1,
    DUMP_USAGE = 2,
    DUMP_NOT_FOUND = 3,
    DUMP_IN_USE = 5,
    DUMP_DAMAGED = 7,
};

#define DUMP_CAUSE_BYTES 192u
#define DUMP_LABEL_BYTES (KV_USER_NAME_MAX + KV_SESSION_NAME_MAX + 40u)

struct dump_segment {
    bool is_there;
    uint64_t file_bytes;
    uint32_t used; /* Pages that records claim. */
    bool has_record;
    uint8_t state; /* As recorded, like the next two. */
    uint64_t used_ms;
    uint8_t *bits;                /* Heap. */
    bool is_unfinished;           /* Its making was cut off: as such no damage. */
    char cause[DUMP_CAUSE_BYTES]; /* What is wrong with it as a whole; empty: nothing. */
};

struct dump_user {
    struct kv_user_id id;
    struct kv_record_user record;
    bool has_salt; /* record.salt: it stood in plain, or was opened. */
};

struct dump_session {
    struct kv_session_id id;
    const struct dump_user *user;
    char *name, *parent_name;
    uint64_t created_ms, used_ms, ttl_ms;
    struct kv_checkpoint_id head;
    uint32_t head_tokens, checkpoints;
    uint32_t found; /* Checkpoints that are there. */
    bool has_head;
    uint8_t kind;
    bool has_tree; /* Another one than that of its own id: */
    struct kv_session_id tree;
    bool has_origin; /* It is a fork, of this checkpoint. */
    struct kv_checkpoint_id origin;
    uint32_t origin_tokens;
};

struct dump_counts {
    uint64_t checkpoints, pages, unlisted; /* Unlisted: pages that no checkpoint needs. */
    uint64_t damages;                      /* Lines of damage. */
    uint64_t hurt_checkpoints, bad_pages;
    uint64_t encrypted, plain; /* Pages read, by their headers. */
    uint64_t unread; /* Records that could not be read: what is counted says nothing then. */
};

struct dump_keys;

struct dump {
    const char *dir;
    const char *master_key_file; /* NULL: none is given. */
    struct dump_keys *keys;      /* NULL: the directory is not encrypted. */
    FILE *damage_out;            /* For lines of damage. */
    int lock_fd;
    struct kv_superblock superblock;
    uint32_t superblock_damaged;
    struct kv_manifest *manifest;
    uint64_t commit;         /* Number of the last batch in the manifest; 0: none. */
    uint64_t clock_floor_ms; /* When a wall clock that jumped was believed; 0: none was. */
    kv_status noted_status;  /* Of the file acknowledged; KV_MISS: nothing is noted. */
    struct kv_acknowledged noted;
    uint32_t noted_damaged; /* Slots. */
    bool is_doubted;        /* The next start counts again. */
    bool has_store;
    struct kv_record_store store;
    uint32_t pages_per_segment;
    struct dump_segment *segments; /* By number. */
    uint32_t segment_count;        /* Highest number and one. */
    int segment_fd;                /* The one file that is open; there may be many. */
    uint32_t segment_open;
    struct dump_user *users; /* By id. */
    uint32_t user_count, user_capacity;
    struct dump_session *sessions; /* By id. */
    uint32_t session_count, session_capacity;
    uint32_t forked_count; /* Of them, with a head in another tree than that of their id. */
    struct kv_record_quarantine *quarantined; /* By page. */
    uint32_t quarantined_count, quarantined_capacity;
    struct kv_record_old_branch *old_branches; /* By session and checkpoint. */
    uint32_t old_branch_count, old_branch_capacity;
    uint32_t deleted_count; /* Sessions that are gone and say so. */
    uint32_t plan_count, quota_count; /* Plans, and users with limits of their own. */
    uint32_t *claims;       /* Of each page: 1 + index of the session, 0: free. */
    uint8_t *page;          /* One, aligned. */
    struct dump_counts counts;
    uint64_t begun_ns, told_ns;
    uint64_t pages_read;
};

/* ---- state.c ---- */

/* A DUMP_ code; what was wrong is on stderr, or on damage_out.  *dump is zeroed first and can be
 * closed in any case. */
int dump_open(struct dump *dump, const char *dir, const char *master_key_file, FILE *damage_out);
void dump_close(struct dump *dump);

struct dump_session *dump_session_find(const struct dump *dump, const struct kv_session_id *id);
/* The first of those that have a head in the tree, then each next one (after NULL: the first). */
struct dump_session *dump_head_next(const struct dump *dump, const struct kv_session_id *tree,
                                    const struct dump_session *after);
/* USER/SESSION, fit to be printed. */
void dump_label(const struct dump_session *session, char label[DUMP_LABEL_BYTES]);
void dump_hex(const uint8_t *bytes, uint32_t count, char *text); /* 2 x count + 1 characters. */
/* A line of damage, counted. */
void dump_damage(struct dump *dump, const char *fmt, ...) KV_PRINTF(2, 3);
void dump_error(const char *fmt, ...) KV_PRINTF(1, 2);
/* Progress, on stderr, every 2 s. */
void dump_tell(struct dump *dump);
/* Makes a segment's file the one that is open; -1: errno. */
int dump_segment_open(struct dump *dump, uint32_t number);
/* Where page `ssd_page` lies. */
uint64_t dump_offset(const struct dump *dump, uint32_t ssd_page);

/* ---- keys.c ---- */

/* Records K, before users; opened, if the master key is given.  KV_INVALID: it cannot be read, or
 * is not this directory's. */
kv_status dump_keys_read(struct dump *dump, struct kv_error *err) KV_MUST_CHECK;
void dump_keys_close(struct dump *dump);
/* A user's record was read: opens its salt. */
void dump_keys_user(struct dump *dump, struct dump_user *user);
/* When all users were read: lines of damage for keys of nobody. */
void dump_keys_check(struct dump *dump);
uint32_t dump_keys_count(const struct dump *dump);
bool dump_keys_are_open(const struct dump *dump);
/* Makes dump->page plain, a verified page of that place, and counts it.  KV_MISS: there is no key
 * to do it with; KV_CORRUPT. */
kv_status dump_decrypt(struct dump *dump, const struct kv_page_header *header, uint32_t ssd_page,
                       struct kv_error *err) KV_MUST_CHECK;
/* Reads the header of the page at that place; KV_IO. */
kv_status dump_page_cipher(struct dump *dump, uint32_t ssd_page,
                           struct kv_page_cipher *ret_cipher) KV_MUST_CHECK;

/* ---- quarantine.c ---- */

/* Records Q; what is wrong with one is a damage line. */
kv_status dump_quarantine_read(struct dump *dump, struct kv_error *err) KV_MUST_CHECK;
const struct kv_record_quarantine *dump_quarantine_find(const struct dump *dump, uint32_t ssd_page);
/* Of a segment; those that a record claims all the same are not counted. */
uint32_t dump_quarantine_count(const struct dump *dump, uint32_t segment);
/* A line for each, on stdout: no damage, it is known. */
void dump_quarantine_print(const struct dump *dump);

/* ---- old_branch.c ---- */

/* Records L; one that is damaged is a damage line. */
kv_status dump_old_branches_read(struct dump *dump, struct kv_error *err) KV_MUST_CHECK;

/* ---- tree.c ---- */

struct dump_page {
    struct kv_record_page record;
    bool is_good;    /* Read and verified; what follows is known. */
    bool is_sealed;  /* It is encrypted and there is no key: ids are not known. */
    bool is_listed;  /* By a checkpoint. */
    bool is_leaving; /* Its place is quarantined: not read, and no damage unless it is listed. */
    char *cause;     /* Heap; NULL: nothing is wrong. */
    struct kv_digest chain, model;
    uint32_t ids[KV_PAGE_TOKENS];
};

struct dump_node {
    struct kv_record_node record;
    uint8_t *uids; /* What record.page_uids points to. */
    struct dump_node *parent;
    struct kv_digest chain; /* At floor(tokens / 128), if known. */
    bool has_chain;
    uint32_t bad_position; /* Of the first bad page that it needs; UINT32_MAX: none. */
    bool is_broken;        /* It or one above it is wrong by itself. */
    bool is_owner;         /* Of the page that is looked at. */
    char *cause;           /* Heap: of the checkpoint itself. */
};

struct dump_name {
    struct kv_checkpoint_id id;
    uint32_t index;
};

struct dump_tree {
    struct kv_session_id id;
    const struct dump_session *session; /* With a head in it; NULL: none has a record. */
    struct dump_node *nodes;            /* By position. */
    struct dump_name *names;            /* Of nodes, by id. */
    uint32_t node_count, node_capacity;
    struct dump_page *pages; /* By uid. */
    uint32_t page_count, page_capacity;
    struct kv_history history; /* What was removed. */
    bool has_history;
};

typedef kv_status dump_tree_fn(struct dump *dump, struct dump_tree *tree, void *context);

/* Calls fn for every tree; records that cannot be read are damage lines.  only NULL: all. */
kv_status dump_trees(struct dump *dump, const struct kv_session_id *only, dump_tree_fn *fn,
                     void *context, struct kv_error *err) KV_MUST_CHECK;
struct dump_page *dump_page_find(const struct dump_tree *tree, uint64_t uid);
struct dump_node *dump_node_find(const struct dump_tree *tree, const struct kv_checkpoint_id *id);

/* ---- check.c ---- */

/* Takes the place of a page; false: it is not there or taken, and the cause is set. */
bool dump_claim(struct dump *dump, const struct dump_tree *tree, struct dump_page *page);

/* Compares a tree with its pages; lines of damage. */
kv_status dump_check_tree(struct dump *dump, struct dump_tree *tree, void *context);

/* ---- segments.c ---- */

/* Of a `G` record. */
kv_status dump_visit_segment(void *context, const struct kv_manifest_put *put);
/* Notes how many checkpoints a session has. */
void dump_count_tree(struct dump *dump, const struct dump_tree *tree);
/* When all trees were seen: lines of damage for what is counted wrong. */
void dump_check_counted(struct dump *dump);
/* "open", "sealed"; NULL: it has no record. */
const char *dump_segment_state(const struct dump_segment *segment);

/* ---- the commands ---- */

int dump_verify(struct dump *dump);
int dump_print(struct dump *dump, const char *session, bool json);
