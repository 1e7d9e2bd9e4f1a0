#pragma once

/*
 * The store: index, tiers and manifest behind one object.  Owned by: shard (opened and closed by
 * the main thread while the shard does not run).
 *
 * Order of a save: pages written -> flushed -> recorded in the manifest, synced -> noted in the
 * file `acknowledged` -> acknowledged.
 *
 * Order of a removal: record deleted, synced -> space reused.  Whatever has no record after a
 * restart is free space; there is no repair.
 */

#include "kvstore/base/clock.h"
#include "kvstore/base/disk.h"
#include "kvstore/base/log.h"
#include "kvstore/base/mailbox.h"
#include "kvstore/base/plant.h"
#include "kvstore/format/key_record.h"
#include "kvstore/format/layout.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/old_branch.h"
#include "kvstore/format/quarantine.h"
#include "kvstore/format/quota.h"
#include "kvstore/format/removal.h"
#include "kvstore/format/superblock.h"
#include "kvstore/index/manifest.h"
#include "kvstore/index/match.h"
#include "kvstore/index/session_index.h"
#include "kvstore/plan/quota.h"
#include "kvstore/plan/timeline.h"
#include "kvstore/tier/tier_hbm.h"
#include "kvstore/tier/tier_pool.h"
#include "kvstore/tier/tier_ssd.h"

/* Of what is stored from now on, and what opens what is there. */
struct kv_encryption {
    bool on;               /* New pages and salts are encrypted. */
    const uint8_t *master; /* KV_KEY_BYTES, until kv_store_open() returns; NULL: no key is given. */
    const char *source;    /* Where it is from, to tell: "file '/etc/cached.key'". */
};

struct kv_store_options {
    const char *dir;                 /* State directory: exists; ssd/ is made inside. */
    struct kv_superblock superblock; /* Filled in by kv_store_directory(); an id here is the one a
                                        new directory gets, zeros: a random one. */
    const struct kv_layout *layout;
    struct kv_digest model;
    uint64_t kernels;      /* Family of the engine (format/kernels.h). */
    uint64_t kernels_made; /* What checkpoints are said to be made by: the same, but in tests. */
    struct kv_clock *clock;
    struct kv_log *log;
    struct kv_disk *disk;
    struct kv_manifest *manifest; /* Open; outlives the store. */
    struct kv_mailbox *mailbox;   /* The shard's: manifest answers come here. */
    uint64_t hbm_bytes, pool_bytes, ssd_bytes, segment_bytes, index_bytes;
    uint64_t pool_ttl_ms, rows_ttl_ms;
    uint64_t erase_within_ms; /* Of what is stored no more, on SSD (plan/erase.h); 0: never. */
    uint32_t sessions_max;    /* KV_SESSIONS_MAX; fewer in test builds. */
    struct kv_quota quota;    /* The default plan, until a record takes its place. */
    /* While kv_store_open() runs, on its thread; phase is static.  NULL: nobody asks. */
    void (*progress)(void *context, const char *phase, uint32_t percent);
    void *progress_context;
    struct kv_encryption encryption;
    enum kv_plant plant; /* Test builds: a bug to be found. */
};

/* What a start found.  dropped is the sum of the three below it. */
struct kv_store_recovery {
    uint64_t checkpoints, dropped, sessions, pages, bytes;
    uint64_t dropped_lost;    /* A page of theirs is gone, with its file or behind its end. */
    uint64_t dropped_damaged; /* Their record is damaged. */
    uint64_t dropped_orphans; /* Their session has no record; these are kept, and not served. */
    uint64_t dropped_sessions;
    uint64_t dropped_pages, dropped_bytes;
    const char *scan_why;  /* Why all trees were read; NULL: they were not. */
    uint64_t lost_batches; /* Acknowledged before this start, and not in the manifest any more. */
    uint64_t duration_ns;
};

struct kv_store_counters {
    uint64_t pages_verified, corrupt_pages, corrupt_images, missing_pages;
    uint64_t unreadable_trees; /* Since the start. */
    uint64_t unread_pages;     /* Reads that failed; the pages stay. */
    uint64_t late_reads;       /* Of these, not waited for. */
    uint64_t nodes_dropped, loads, unloads, saves, saves_failed, bytes_saved, bytes_loaded;
    uint64_t notes, notes_failed; /* Of the file `acknowledged`. */
    uint64_t moved_pages;         /* By compaction. */
    uint64_t removed_nodes[KV_REASON_COUNT], removed_pages[KV_REASON_COUNT]; /* By cause. */
    uint64_t scrubbed_pages, scrubbed_bytes, scrub_corrupt_pages, scrub_unread_pages;
    uint64_t quarantined, released; /* Places, since the start. */
    uint64_t pages_encrypted, pages_decrypted;
    uint64_t pages_plain; /* Read from a directory that is encrypted, and in plain. */
    uint64_t key_rotations;
};

/* A session that is gone as a whole. */
struct kv_deleted {
    struct kv_session_id id;
    struct kv_record_deleted record;
};

struct kv_batches {
    struct kv_batch *first, *last;
};

/* A checkpoint that somebody wants to stay, until a time.  In memory only. */
struct kv_pin {
    struct kv_user_id user;
    struct kv_session_id tree;
    struct kv_checkpoint_id node;
    uint64_t until_ms;
};

struct kv_store {
    struct kv_store_options options;
    struct kv_layout layout;
    struct kv_index *index;
    struct kv_hbm *hbm;
    struct kv_pool *pool;
    struct kv_ssd *ssd;
    struct kv_manifest *manifest;
    struct kv_timeline time;
    struct kv_store_recovery recovery;
    struct kv_store_counters counters;
    uint64_t generation;                /* Last one given out. */
    uint64_t touch_seq;                 /* For LRU of loaded sessions. */
    uint64_t commit;                    /* Number of the last batch posted. */
    struct kv_segments *segments;       /* segments.h */
    struct kv_note *note;               /* store_note.c; NULL: nothing can be noted. */
    struct kv_keys *keys;               /* store_keys.c; NULL: nothing here is encrypted. */
    struct kv_encrypter *encrypter;     /* store_encrypt.c; NULL: nothing is encrypted now. */
    struct kv_batch *dead;              /* Removals waiting for kv_store_tick(). */
    struct kv_batches answered, noting; /* Durable or failed; their owners are not told yet. */
    uint64_t checkpoints;               /* With a durable record, loaded or not. */
    uint32_t batches;                   /* Posted and not answered. */
    uint32_t operations;                /* Batches, loads, reads and writes in flight. */
    uint32_t removals;                  /* Of these, batches that delete records. */
    uint64_t life_max_ms;               /* The longest ttl of any session since the start. */
    bool must_resume;                   /* A batch failed on a full file system. */
    uint32_t freeing;                   /* SSD pages that are free when their batch is durable. */
    enum kv_reason removing;            /* Why what goes now goes; NONE: it leaves memory only. */
    uint32_t reads_late;                /* Pages that the kernel has and nobody waits for. */
    bool unloading;                     /* Pages that go now leave memory only. */
    /* Of the quarantined places the first KV_QUARANTINE_LISTED_MAX; store_quarantine.c. */
    struct kv_record_quarantine *quarantined;
    uint32_t quarantined_count;
    struct kv_record_old_branch *old_branches; /* In no order; store_old_branch.c. */
    uint32_t old_branch_count, old_branch_capacity;
    struct kv_pin pins[KV_PINS_MAX]; /* In no order; store_pins.c. */
    uint32_t pin_count;
    /* The last sessions that went, oldest first; heap, KV_DELETED_MAX; store_history.c. */
    struct kv_deleted *deleted;
    uint32_t deleted_count;
    struct kv_quotas *quotas; /* store_quota.c */
    bool told_refused;        /* That memory is not registered for I/O. */
};

/* Before anything in options->dir is opened: makes its superblock, or compares it with the options.
 * KV_INVALID, in one sentence and with nothing changed: of another layout version, or made for
 * another model shape or segment size, or encrypted and the key is not there or not the right one,
 * or settings that cannot work.  A directory gets its encryption here. */
kv_status kv_store_directory(struct kv_store_options *options, struct kv_error *err) KV_MUST_CHECK;

/* Creates what is missing, recovers what is there. */
kv_status kv_store_open(const struct kv_store_options *options, struct kv_store **ret_store,
                        struct kv_error *err) KV_MUST_CHECK;
/* What the tiers do by themselves comes to an end, on the thread that runs the disk: the last thing
 * it does with the store.  operations must be 0. */
void kv_store_rest(struct kv_store *store);
void kv_store_close(struct kv_store *store); /* Likewise. */

/* Wall time, as long as the wall clock is believed (plan/timeline.h). */
uint64_t kv_store_now_ms(const struct kv_store *store);
uint64_t kv_store_now_ns(const struct kv_store *store); /* Pool clock. */
uint64_t kv_store_next_generation(struct kv_store *store);

/* Looks at the clocks, posts pending removals, tells owners of batches, expires pool images.  Once
 * a loop turn, after the mailbox ran. */
void kv_store_tick(struct kv_store *store);

/* ---- store_batch.c: records ---- */

/* A set of manifest changes that becomes durable as one.  Owned by the store from post until done
 * ran; freed after it. */
struct kv_batch;
typedef void kv_batch_done_fn(void *context, kv_status status);

struct kv_batch *kv_batch_create(struct kv_store *store); /* NULL: out of memory. */
void kv_batch_discard(struct kv_batch *batch);
/* As it is now: after the session's nodes, if some are in the same batch. */
kv_status kv_batch_session(struct kv_batch *batch, const struct kv_session *session) KV_MUST_CHECK;
/* With its data keys, where there are some; one is drawn when there should be. */
kv_status kv_batch_user(struct kv_batch *batch, struct kv_user *user,
                        const char *name) KV_MUST_CHECK;
kv_status kv_batch_node(struct kv_batch *batch, struct kv_node *node) KV_MUST_CHECK;
kv_status kv_batch_page(struct kv_batch *batch, const struct kv_page *page) KV_MUST_CHECK;
kv_status kv_batch_delete_node(struct kv_batch *batch, const struct kv_session_id *tree,
                               const struct kv_checkpoint_id *id) KV_MUST_CHECK;
kv_status kv_batch_delete_page(struct kv_batch *batch, const struct kv_session_id *tree,
                               uint64_t uid) KV_MUST_CHECK;
kv_status kv_batch_delete_session(struct kv_batch *batch,
                                  const struct kv_session_id *session) KV_MUST_CHECK;
/* With its data keys: without them nothing that is left of its pages can be read. */
kv_status kv_batch_delete_user(struct kv_batch *batch, const struct kv_user_id *user) KV_MUST_CHECK;
/* A session's history; the last one of a session in a batch counts. */
kv_status kv_batch_history(struct kv_batch *batch, const struct kv_session_id *session,
                           const struct kv_history *history) KV_MUST_CHECK;
kv_status kv_batch_delete_history(struct kv_batch *batch,
                                  const struct kv_session_id *session) KV_MUST_CHECK;
/* An SSD page to free once the batch is durable. */
kv_status kv_batch_free_ssd(struct kv_batch *batch, uint32_t ssd_page) KV_MUST_CHECK;
kv_status kv_batch_quarantine(struct kv_batch *batch,
                              const struct kv_record_quarantine *record) KV_MUST_CHECK;
/* It tells when what was posted before it is durable, and is written wherever that is. */
void kv_batch_barrier(struct kv_batch *batch);
/* `done` gets KV_BUSY: the file system has no room for it, KV_INVALID: a write failed before, and
 * nothing was written; KV_IO: whether it was, the next start finds out. */
void kv_batch_post(struct kv_batch *batch, kv_batch_done_fn *done, void *context);

/* ---- store_load.c: trees on demand ---- */

typedef void kv_load_done_fn(void *context, struct kv_session *session, kv_status status);
/* The session's tree, whose load state must be NONE, with the details of all sessions that have a
 * head in it, which are open then; `done` gets the session named here.  KV_BUSY: index budget
 * reached even after unloading others. */
void kv_store_load_start(struct kv_store *store, struct kv_session *session, kv_load_done_fn *done,
                         void *context);
/* Makes room in the index for `pages` pages and `nodes` nodes by unloading idle trees, least
 * recently used first; false: not possible. */
bool kv_store_make_room(struct kv_store *store, uint32_t nodes, uint32_t pages);
/* The session's tree; nobody uses one of its sessions. */
void kv_store_unload(struct kv_store *store, struct kv_session *session);
/* Whether a call, a save, a removal or the engine works with a session of the tree. */
bool kv_store_tree_in_use(const struct kv_tree *tree);

/* ---- store_detail.c: what of a session is only in its record ---- */

typedef void kv_detail_done_fn(void *context, kv_status status,
                               const struct kv_record_session *record);
/* Reads the record of a session, newest: as it is with all that was posted before.  `done` runs
 * later, with KV_MISS and NULL if there is none, KV_CORRUPT if it is damaged.  KV_NOMEM: it will
 * not run. */
kv_status kv_store_record_start(struct kv_store *store, const struct kv_session_id *id, bool newest,
                                kv_detail_done_fn *done, void *context) KV_MUST_CHECK;
/* Takes what is still missing from that record.  KV_NOMEM. */
kv_status kv_store_detail_take(struct kv_store *store, struct kv_session *session,
                               const struct kv_record_session *record) KV_MUST_CHECK;
/* Marks a node, those above it and the segments of their pages as used now. */
void kv_store_renew(struct kv_store *store, struct kv_node *node);

/* ---- store_read.c ---- */

/* Brings page objects into memory.  Arrays belong to the caller and stay until done.
 * Results per page: slot pinned (KV_HBM_SLOT_NONE: could not be read), fresh (read now, to be
 * verified with kv_store_read_check before anybody else may see it; without a slot: the read
 * failed, and may succeed another time). */
struct kv_read {
    uint32_t count;
    const uint32_t *pages;
    uint32_t *slots;
    bool *fresh;
    /* Optional: the results of page i stand, others are still on their way.  Once for each page
     * that was not in memory, in any order, before done: the time to check it. */
    void (*arrived)(struct kv_read *read, uint32_t i);
    void (*done)(struct kv_read *read);
    /* Owned by the store. */
    struct kv_store *store;
    struct kv_read_op *ops;
    uint32_t missing, started, waiting;
    uint64_t progress_ns; /* Stopwatch when it began, or the last page of it came. */
    uint64_t bytes;
};
/* KV_BUSY: not enough slots (nothing is pinned then); KV_NOMEM.  KV_OK: done will run, never from
 * inside this call; KV_MISS: everything was in memory, slots are filled, done will not run. */
kv_status kv_store_read_start(struct kv_store *store, struct kv_read *read) KV_MUST_CHECK;

/* The device does not answer: what has not come counts as not read, and done runs.  The slots of
 * reads that the kernel still has stay pinned until it gives them back; until then
 * kv_store.reads_late is above 0, and reads that would ask the device are not started: they end at
 * once, as if everything were in memory (KV_MISS), without the pages that are not. */
void kv_store_read_give_up(struct kv_read *read);

/* Page i of a finished read, compared with what the index says and, if ids is given, its tokens
 * with ids[0..).  A fresh page that agrees becomes the object's cached copy.  Counted and logged:
 * KV_CORRUPT: its bytes are wrong, or the file ends before it; what lists it is to be dropped.
 * KV_IO: it could not be read this time, and stays listed: a passing error must not forget what was
 * acknowledged. */
kv_status kv_store_read_check(const struct kv_read *read, uint32_t i, const struct kv_digest *chain,
                              const uint32_t *ids, uint32_t id_count) KV_MUST_CHECK;

/* Why something goes, and the limit that took it. */
struct kv_loss {
    enum kv_reason cause;
    enum kv_limit limit_of; /* NONE: kv_store_loss() fills in what is known of the cause. */
    bool keeps_rows;        /* Only the checkpoint goes; its rows are part of the next one. */
    uint64_t limit, value;
};

/* Removes every node of the session that lists the page, with all below it. */
void kv_store_drop_page(struct kv_store *store, struct kv_session *session, uint32_t page,
                        enum kv_reason why);
/* Removes a node and all below it: records deleted, windows dropped, pages freed when nobody else
 * lists them. */
void kv_store_drop_node(struct kv_store *store, struct kv_node *node, enum kv_reason why);
/* The same, for a limit that is named. */
void kv_store_drop_node_for(struct kv_store *store, struct kv_node *node,
                            const struct kv_loss *loss);
/* A node with one child loses its id and its window; its rows are part of the child's edge from now
 * on.  Where that cannot be done the node stays. */
void kv_store_join_node(struct kv_store *store, struct kv_node *node, const struct kv_loss *loss);
/* Removes leaves whose time is up. */
void kv_store_drop_expired(struct kv_store *store, struct kv_session *session);

/* ---- store_history.c: what was removed, and why ---- */

/* Adds to the session's history, in memory; it is recorded with its next removal. */
void kv_store_note_node(struct kv_store *store, const struct kv_node *node,
                        const struct kv_loss *loss);
/* What is known of a cause now. */
struct kv_loss kv_store_loss(const struct kv_store *store, const struct kv_node *node,
                             enum kv_reason cause);
/* A session that went or is about to; NULL: not known.  Valid until the next note or erase. */
const struct kv_deleted *kv_store_deleted_find(const struct kv_store *store,
                                               const struct kv_session_id *id);
/* With the batch that deletes the session; of more than KV_DELETED_MAX the oldest is forgotten. */
kv_status kv_store_deleted_note(struct kv_store *store, struct kv_batch *batch,
                                const struct kv_session_id *id,
                                const struct kv_record_deleted *record) KV_MUST_CHECK;
/* It is there again. */
kv_status kv_store_deleted_forget(struct kv_store *store, struct kv_batch *batch,
                                  const struct kv_session_id *id) KV_MUST_CHECK;
/* All of one user. */
kv_status kv_store_deleted_erase(struct kv_store *store, struct kv_batch *batch,
                                 const struct kv_user_id *user) KV_MUST_CHECK;
/* Before the first session with a head in another's tree is recorded: marks the directory, durable
 * when it returns KV_OK. */
kv_status kv_store_forks(struct kv_store *store, struct kv_error *err) KV_MUST_CHECK;

/* ---- store_leave.c: one of several sessions goes that have a head in a tree ---- */

struct kv_store_leaving {
    uint64_t nodes, pages; /* That go with it. */
};
/* The tree is loaded, like for the next one. */
struct kv_store_leaving kv_store_leaving(struct kv_session *session);
typedef void kv_before_drop_fn(struct kv_node *node);
/* deleted NULL: nothing says afterwards that it was there.
 * Removes what only it needs (`before` is told each node), gives the rest to others, and its record
 * with all that in one batch; `done` runs when that is durable.  The session itself is removed by
 * the caller then; no commit is in flight in the tree.  KV_NOMEM: to be called again. */
kv_status kv_store_leave(struct kv_store *store, struct kv_session *session,
                         const struct kv_record_deleted *deleted, kv_before_drop_fn *before,
                         kv_batch_done_fn *done, void *context) KV_MUST_CHECK;

/* The head of `session` goes from `old` (NULL: position 0) to `target`: what only it needs of the
 * way from there on goes, leaf first.  With kv_store_take_removals() it becomes durable together
 * with the session's record, which counts it. */
void kv_store_roll_back(struct kv_store *store, struct kv_session *session, struct kv_node *old,
                        const struct kv_node *target, kv_before_drop_fn *before);
/* Removals not yet posted: the caller adds to them and posts.  NULL: out of memory. */
struct kv_batch *kv_store_take_removals(struct kv_store *store);

/* ---- store_quarantine.c: places that are given to nobody any more ---- */

/* The bytes on disk of a page object are wrong.  Once a place: its file, offset, cause and owners
 * are logged, it is recorded with the next removals, and from now on nobody gets it.  What lists
 * the page is dropped by the caller. */
void kv_store_quarantine(struct kv_store *store, uint32_t page, enum kv_found_by found_by,
                         const char *cause);
/* Checkpoints of its session whose rows are in the page: those that list it, and those below that
 * list no other one for its position. */
uint32_t kv_store_page_owners(const struct kv_store *store, uint32_t page);

/* ---- store_old_branch.c: what compactions left, for a while ---- */

/* Notes it, or its new time, with the batch.  KV_BUSY: KV_OLD_BRANCHES_MAX are noted. */
kv_status kv_batch_old_branch(struct kv_batch *batch, struct kv_store *store,
                              const struct kv_record_old_branch *record) KV_MUST_CHECK;
/* Entry `at` of store->old_branches is not to go any more, or has gone; the last entry takes its
 * place. */
void kv_store_old_branch_gone(struct kv_store *store, uint32_t at);
kv_status kv_batch_delete_old_branches(struct kv_batch *batch, struct kv_store *store,
                                       const struct kv_session_id *session) KV_MUST_CHECK;

/* ---- store_pins.c ---- */

/* The pin of this checkpoint; NULL: none that has not ended. */
struct kv_pin *kv_store_pin_find(struct kv_store *store, const struct kv_node *node);
/* Whether there is a pin in it: the tree stays in memory. */
bool kv_store_pin_holds(const struct kv_store *store, const struct kv_tree *tree);
/* Pinned until then, 0: not any more; rows, those above them and the window.  KV_BUSY:
 * KV_PINS_MAX are. */
kv_status kv_store_pin(struct kv_store *store, struct kv_node *node,
                       uint64_t until_ms) KV_MUST_CHECK;
/* What pins of a user hold, each page and window once; with `more` (NULL: none) pinned too. */
struct kv_pin_use {
    uint32_t pins;
    uint64_t pages, windows;
};
struct kv_pin_use kv_store_pin_use(struct kv_store *store, const struct kv_user_id *user,
                                   const struct kv_node *more);
/* Drops those that ended. */
void kv_store_pins_tick(struct kv_store *store);
/* ---- store_release.c ---- */

struct kv_release_result {
    uint32_t released; /* They keep what is written to them, and are free again. */
    uint32_t bad;      /* They do not. */
    uint32_t named;    /* A record still names them: when its tree is loaded it goes. */
};
typedef void kv_release_done_fn(void *context, const struct kv_release_result *result,
                                kv_status status);
/* Tries every quarantined place whose file is there, one after the other.  `done` may run inside of
 * this call, and does not after KV_NOMEM; its status: KV_INVALID, the tier is read-only; or that of
 * the batch that should have released the last ones.  `cancelled` is asked between two places: true
 * ends it there. */
kv_status kv_store_release_start(struct kv_store *store, bool (*cancelled)(void *context),
                                 kv_release_done_fn *done, void *context) KV_MUST_CHECK;

/* ---- store_scrub.c: everything stored is read and compared, in the background ---- */

/* A page that is not what its record says.  By the time this is looked at it may have been written
 * elsewhere or removed: kv_scrub_current() knows, when the tree is loaded. */
struct kv_scrub_finding {
    struct kv_session_id tree;
    uint64_t uid, generation;
    uint32_t ssd_page;
    bool missing; /* Its file ends before it: nothing is wrong with the place. */
    char cause[KV_QUARANTINE_CAUSE_MAX + 1];
};
typedef void kv_scrub_found_fn(void *context, const struct kv_scrub_finding *finding);

struct kv_scrub_options {
    struct kv_store *store;
    uint64_t rate_bytes;      /* A second; at least 1. */
    kv_scrub_found_fn *found; /* On the shard; must not destroy the scrub. */
    void *context;
};

struct kv_scrub_progress {
    uint64_t pages_total;          /* In use when it began. */
    uint64_t pages, bytes;         /* Read. */
    uint64_t bad, unread, leaving; /* Not what their record says; that the device did not give;
                                      gone before they were read. */
    uint64_t plain;                /* Not encrypted. */
    kv_status status;              /* Of the scan of records; KV_OK. */
    bool done;                     /* All were seen, nothing is in flight. */
};

struct kv_scrub;
/* One pass.  Memory: one buffer of records and at most KV_SCRUB_BUFFER_BYTES of pages. */
kv_status kv_scrub_create(const struct kv_scrub_options *options,
                          struct kv_scrub **ret_scrub) KV_MUST_CHECK;
void kv_scrub_destroy(struct kv_scrub *scrub); /* Nothing in flight. */
/* Starts what the pace allows.  Once a loop turn; `hold` starts nothing. */
void kv_scrub_step(struct kv_scrub *scrub, uint64_t now_ns, bool hold);
void kv_scrub_set_rate(struct kv_scrub *scrub, uint64_t rate_bytes);
bool kv_scrub_in_flight(const struct kv_scrub *scrub);
/* All pages of the records at hand were read: those of a session lie together, so whoever acts on
 * findings acts now. */
bool kv_scrub_is_between(const struct kv_scrub *scrub);
/* Nanoseconds until a step can start something; UINT64_MAX: when something in flight is back. */
uint64_t kv_scrub_wait_ns(const struct kv_scrub *scrub, uint64_t now_ns);
struct kv_scrub_progress kv_scrub_progress(const struct kv_scrub *scrub);
/* The page object of a finding, as it was found; KV_PAGE_INDEX_NONE: it was written again, moved or
 * removed since.  The session's tree is loaded. */
uint32_t kv_scrub_current(struct kv_store *store, struct kv_session *session,
                          const struct kv_scrub_finding *finding);

/* ---- store_write.c ---- */

/* Pages on their way to SSD.  Allocated by the store, freed after done ran. */
struct kv_write_item {
    uint32_t page;    /* Object; its ssd_page and generation were set by kv_write_add. */
    uint32_t slot;    /* Sealed bytes; pinned by the store until done. */
    uint32_t old_ssd; /* To free when the record is durable; KV_SSD_PAGE_NONE. */
    uint64_t old_generation;
    uint32_t old_count;
    struct kv_ssd_op op;
    /* Owned by the store: where it is encrypted, and the next one that waits for such a place. */
    uint8_t *buffer;
    struct kv_write_item *next;
};
struct kv_write {
    struct kv_store *store;
    struct kv_write_item *items;
    uint32_t count, capacity;
    uint32_t waiting;
    kv_status status;
    struct kv_error err; /* When done says that there was no place: why. */
    struct kv_ssd_wait space;
    struct kv_ssd_flush flush;
    void (*done)(struct kv_write *write, kv_status status);
    void *context;
};
struct kv_write *kv_write_create(struct kv_store *store, uint32_t capacity);
/* Seals the page in `slot` (count tokens, chain digest at its start) under a fresh generation and
 * queues it.  For a page that is already on SSD the old place is remembered. */
void kv_write_add(struct kv_write *write, uint32_t page, uint32_t slot, uint32_t count,
                  const struct kv_digest *chain);
/* Allocates space, waiting for a new segment if need be, and writes, then flushes.  Fails at once
 * (done does not run) with KV_BUSY: SSD full, and what is evicted makes room; KV_INVALID:
 * read-only; KV_IO: with ENOSPC, the file system has no room for records; KV_NOMEM.  The same come
 * to done() with write->err set when it had to wait for space, and KV_IO: no segment could be made.
 * It can be started again after KV_BUSY. */
kv_status kv_write_start(struct kv_write *write, struct kv_error *err) KV_MUST_CHECK;
/* Puts the objects back to what they were before kv_write_add.  free_space: also gives the new
 * places back; not after a failed record, which may still turn up at the next start. */
void kv_write_undo(struct kv_write *write, bool free_space);
void kv_write_destroy(struct kv_write *write);

/* ---- store_move.c: pages to other places ---- */

#define KV_MOVE_PAGES_MAX 32u

typedef void kv_move_done_fn(void *context, uint32_t moved, kv_status status);
/* Durable pages of one tree, none twice.  The session is neither saved nor changed before `done`
 * ran, which may be inside this call; pages that are not what their record says stay.  KV_BUSY: no
 * slot to read into; KV_NOMEM: `done` will not run.  moved 0: status says why; KV_CORRUPT: none of
 * them could be read right. */
kv_status kv_store_move_start(struct kv_store *store, const uint32_t *pages, uint32_t count,
                              kv_move_done_fn *done, void *context) KV_MUST_CHECK;

/* Records looked at in one piece: the reader is free for others between them. */
#define KV_PLACES_SCAN_RECORDS 1024u
#define KV_PLACES_SCAN_BYTES (1u << 20)

typedef void kv_places_done_fn(void *context, uint32_t count, kv_status status);
/* Trees that have pages in closed segments, by their records; the first `max` of them.  The
 * array is the caller's, and is filled when `done` runs. */
kv_status kv_store_places_start(struct kv_store *store, struct kv_session_id *trees, uint32_t max,
                                kv_places_done_fn *done, void *context) KV_MUST_CHECK;

/* ---- store_keys.c: who can read what ---- */

struct kv_encryption_facts {
    bool on;           /* New pages are encrypted. */
    bool is_encrypted; /* The directory has keys; what follows says something then. */
    char master[KV_MASTER_ID_TEXT_BYTES];
    uint32_t keys;      /* Of users. */
    int unlocked_errno; /* 0: all keys lie in memory that is locked. */
    bool is_being_rotated;
};
struct kv_encryption_facts kv_store_encryption(const struct kv_store *store);

/* The user goes from memory, with its keys; it has no session and no records. */
void kv_store_forget_user(struct kv_store *store, struct kv_user *user);

typedef void kv_rotated_fn(void *context, kv_status status);
/* All data keys under another master key, in one batch.  It begins with a write of the superblock,
 * which blocks.  KV_OK: `done` will run; its KV_OK: the new key is the only one that opens the
 * directory; KV_BUSY: the file system has no room, the old key stays; KV_IO: the next start tells
 * which one it is.  Else it will not run: KV_MISS: that is the key in use; KV_BUSY: one is under
 * way; KV_INVALID: nothing here is encrypted; KV_IO, KV_NOMEM: nothing changed. */
kv_status kv_store_rotate_start(struct kv_store *store, const uint8_t master[KV_KEY_BYTES],
                                kv_rotated_fn *done, void *context,
                                struct kv_error *err) KV_MUST_CHECK;
