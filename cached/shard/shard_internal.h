#pragma once

/* Private to shard/: the shard's own structs.  Owned by: shard. */

#include "cached/request.h"
#include "cached/shard/shard.h"
#include "cached/worker/worker.h"
#include "kvstore/base/metric.h"
#include "kvstore/plan/admission.h"
#include "kvstore/plan/compact.h"
#include "kvstore/plan/evict.h"
#include "kvstore/plan/plan.h"
#include "kvstore/store/store.h"
#include "kvstore/store/store_quota.h"

struct flow;

/* ---- live sessions: what the engine holds windows of ---- */

struct live_page {
    uint32_t slot; /* HBM, pinned by this table. */
    uint32_t page; /* Page object with the same bytes (referenced), or KV_PAGE_INDEX_NONE: the page
                      belongs to this table alone and may be written. */
};

struct live {
    uint32_t slot;              /* Of the engine. */
    struct kv_session *session; /* NULL: free. */
    bool busy;                  /* A job runs on it. */
    struct flow *holder;        /* It is this call's until its end, also while empty; NULL: none. */
    uint64_t used_seq;
    struct kv_image_state state; /* Where the engine's session stands. */
    bool has_logits;
    struct kv_node *node; /* Deepest checkpoint of its history; NULL: position 0. */
    /* The history left this node's edge at branch_at: the next save cuts it there.  NULL: none. */
    struct kv_node *branch;
    uint32_t branch_at;
    uint32_t replays[KV_REPLAYS_MAX]; /* H of clipped replays since `node`, ascending. */
    uint32_t replay_count;
    uint32_t other_until; /* Positions up to this one may be of other kernels than ours; 0: none. */
    uint32_t *ids;        /* Token log [0, state.tokens), then the pending token if any. */
    uint32_t ids_capacity;
    struct kv_digest *chain; /* D_0 .. D_floor(tokens/128), as far as chain_count. */
    uint32_t chain_count, chain_capacity;
    struct live_page *pages;
    uint8_t **page_bytes; /* The same pages for the engine. */
    uint32_t page_count, page_capacity;
    uint32_t spare; /* HBM slot kept for the copy a save needs; KV_HBM_SLOT_NONE. */
    uint64_t turns; /* Rises when its history may become another one. */
};

/* A free one, or the least recently used idle one, which goes back to its last checkpoint.  NULL:
 * calls hold them all. */
struct live *live_find(struct shard *shard);
/* Makes it the session's, whose it may be already. */
void live_attach(struct shard *shard, struct live *live, struct kv_session *session);
/* Notes in the session when what it held was never saved: its head falls back. */
void live_note_loss(struct live *live);
/* Tokens of its history that are neither marked nor of other kernels. */
uint32_t live_unmarked(const struct live *live);
/* Forgets windows, log and pages. */
void live_release(struct shard *shard, struct live *live);
/* Lets go of pages, log and node but stays the session's. */
void live_clear(struct shard *shard, struct live *live);
/* Its history is now the path to `path` up to `tokens`: sets node and branch. */
void live_follow(struct live *live, struct kv_node *path, uint32_t tokens);
/* The same, along its own history.  A branch not yet saved stays where the history only goes on. */
void live_back_to(struct live *live, uint32_t tokens);
/* Its deepest checkpoint is now `node`, an ancestor of the present one: replays that stood in edges
 * below it are the live history's own again, so no mark is lost. */
void live_fall_back(struct live *live, struct kv_node *node);
/* Gives the spare slot back. */
void live_give_spare(struct shard *shard, struct live *live);
/* Drops pages beyond `tokens`, and makes the page `tokens` falls into writable (a copy unless it is
 * the table's own). KV_BUSY: no HBM slot. */
kv_status live_cut(struct shard *shard, struct live *live, uint32_t tokens) KV_MUST_CHECK;
/* Takes over pinned slots of page objects [0, count); references the objects. */
kv_status live_install(struct shard *shard, struct live *live, const uint32_t *pages,
                       const uint32_t *slots, uint32_t count) KV_MUST_CHECK;
/* Writable pages for positions up to `tokens`, and a spare one for the save that follows. */
kv_status live_extend(struct shard *shard, struct live *live, uint32_t tokens) KV_MUST_CHECK;
kv_status live_reserve_ids(struct live *live, uint32_t tokens) KV_MUST_CHECK;
/* Clipped replays of the live history with from <= H < below, ascending; returns how many there
 * are, at most max are written. */
uint32_t live_replays(const struct live *live, uint32_t from, uint32_t below, uint32_t *out,
                      uint32_t max);
/* Family that computed position `tokens` of its history; KV_KERNELS_UNKNOWN where nothing says. */
uint64_t live_kernels_at(const struct shard *shard, const struct live *live, uint32_t tokens);
/* Chain values up to floor(tokens / 128), from the log. */
kv_status live_chain(struct live *live, uint32_t tokens) KV_MUST_CHECK;
/* Frees idle live sessions (not `keep`) until `slots` HBM slots can be had. */
bool live_make_room(struct shard *shard, const struct live *keep, uint32_t slots);

/* ---- commits ---- */

/* A checkpoint to be: position, label and its image, if one was exported. */
struct commit_point {
    uint32_t tokens;
    uint8_t kind;
    uint32_t pool_slot; /* KV_POOL_SLOT_NONE: rows only. */
    struct kv_image_state state;
    struct kv_node *node; /* Result. */
    bool existed;
};

struct commit {
    struct shard *shard;
    struct kv_session *session;
    struct live *live; /* Until done: the table the pages came from; NULL once it was released. */
    struct kv_node *nodes[KV_STOPS_MAX + 2]; /* Made by this commit, ascending. */
    uint32_t node_count;
    struct kv_node *found[KV_STOPS_MAX + 1]; /* Stood there already, and have no record yet. */
    uint32_t found_count;
    struct kv_node *shortened;       /* Its edge was cut for this commit. */
    struct kv_checkpoint_id head_id; /* Of the session, once its record is written. */
    uint32_t head_tokens, claimed_tokens;
    struct kv_write *write; /* NULL: nothing to write. */
    struct kv_batch *batch;
    struct flow *waiter; /* Told when done; NULL: nobody waits. */
    enum kv_reason why;  /* What it is told of a save that fails. */
    uint64_t begun_ns;
    struct commit *next;
    struct commit *next_waiting; /* For room. */
};

/* Makes nodes of the points, at once visible to this user, and starts saving them.  Fills
 * points[].node (NULL if it could not be made) and *ret_reason (NONE, or why nothing was saved).
 * Returns the commit in flight, or NULL when there is nothing to wait for. */
struct commit *commit_start(struct shard *shard, struct live *live, struct commit_point *points,
                            uint32_t count, enum kv_reason *ret_reason);

/* Tries to write those that wait for room, in order; the first that finds none holds up the others.
 * Gives up on those that waited too long, and on those that began before hopeless_ns. */
void commit_retry(struct shard *shard, uint64_t hopeless_ns);
/* Whether the session's only work is a save that waits for room. */
bool commit_waits(const struct shard *shard, const struct kv_session *session);
/* Whether a node is on the way to what that save is about. */
bool commit_needs(const struct shard *shard, const struct kv_node *node);

/* What a commit knows of the pages it touches, by position in the live table. */
struct commit_pages {
    uint32_t *objects; /* KV_PAGE_INDEX_NONE: not touched. */
    uint32_t first, count;
};
/* commit_nodes.c.  One point: the node that stands there already, or a new one.  False: no memory,
 * or no room in the index. */
bool commit_place(struct shard *shard, struct live *live, struct commit *commit,
                  struct commit_pages *touched, struct commit_point *point);
#ifdef CACHED_TEST_HOOKS
void commit_ack_early(struct commit *commit); /* A planted bug: as if it were durable. */
#endif

/* ---- flows ---- */

enum flow_next { FLOW_NEXT, FLOW_WAIT };

enum flow_source { SOURCE_NONE, SOURCE_LIVE, SOURCE_NODE };

struct flow {
    struct request *req;
    struct shard *shard;
    struct kv_session *session;
    struct live *live; /* In use: the session's. */
    struct live *slot; /* Held, from resume_slot() to the end; NULL: none. */
    struct flow *next; /* In the shard's list, or a session's waiters. */
    struct flow *prev;
    struct flow *next_waiter;
    uint32_t stage;
    bool holds_session;
    bool failed;
    uint32_t quota_tries; /* Sessions that went to make room for it. */
    bool closed;          /* Its session goes: it ends whoever waits for it. */
    atomic_bool stop;     /* Looked at by the worker: set by flow_stop(). */
    /* With a request_id (answers.c): what it makes, or (joins) waits for or sends again. */
    struct answer *answer;
    bool joins;
    uint64_t mark_ns; /* Stopwatch at the start of the present stage group. */

    /* Resume. */
    uint32_t *ids; /* The whole prompt. */
    uint32_t count;
    struct kv_digest *chain;
    struct kv_match match;
    uint64_t removals;   /* Of the tree, when it was matched. */
    uint32_t live_match; /* Tokens shared with the live log. */
    struct kv_plan plan;
    enum flow_source source;
    struct kv_node *node; /* SOURCE_NODE: whose path; for EXACT also whose image. */
    uint32_t image_slot;  /* Pinned pool slot, or NONE. */
    struct kv_image_state image_state;
    uint32_t replays[KV_REPLAYS_MAX]; /* Of the chosen history since its deepest node <= H. */
    uint32_t replay_count;
    uint64_t kernels;     /* That computed the state at H. */
    uint32_t other_until; /* Deepest position <= H that is of other kernels than ours; 0: none. */

    struct kv_read read;
    bool unread; /* A page at unread_from could not be read; this call goes without it. */
    uint32_t unread_from;
    uint32_t *read_pages, *read_slots;
    bool *read_fresh;
    kv_status *read_status; /* What the check of each page said; KV_STATUS_COUNT: not yet. */
    uint32_t read_count;    /* Entries whose slots are pinned by this flow. */
    /* Of a path read for its ids (flow_path.c): pages there, checked so far and how that went. */
    bool *path_there;
    uint32_t path_tokens, path_next;
    kv_status path_status;
    struct kv_digest path_chain;

    struct worker_job job;
    void (*job_finished)(struct flow *flow);
    struct commit_point points[KV_STOPS_MAX + 1];
    uint32_t point_count;
    uint32_t reserved[KV_STOPS_MAX + 1]; /* Pool slots for the job's exports. */
    struct commit *commit;

    /* Decode. */
    uint32_t streamed;    /* Entries of out_tokens, or of the answer's log, sent. */
    uint32_t logged;      /* Entries of the answer's log before its own. */
    uint32_t resend_from; /* Positions below the head still to be sent again; */
    uint32_t resend_to;   /* equal: none. */
    bool job_done, saved, drained;
    uint32_t first_position; /* Of the first token this decode takes. */
    uint32_t *no_crcs;       /* Zeros: tokens sent again have no logits at hand. */

    void (*wake)(struct flow *flow);      /* What a load, read or commit completion goes on with. */
    void (*ready)(struct flow *flow);     /* What follows a resume. */
    void (*next_step)(struct flow *flow); /* What follows flow_begin. */
    void (*after_save)(struct flow *flow);   /* What follows turn_save. */
    void (*checkpointed)(struct flow *flow); /* What follows checkpoint_start. */
    bool waits_commit;                       /* Woken when a commit of its session ends. */
    bool waits_session;                      /* Woken when its session is no longer claimed. */
    bool waits_slot;                         /* Woken when it has a slot. */
    /* Checkpoint beside a Decode: */
    struct live *beside;        /* whose state it takes, */
    uint64_t beside_turns;      /* as it was then, */
    bool is_exporting;          /* and the worker has its job. */
    bool is_posted;             /* The worker has its job, or had. */
    bool plan_only;             /* Lookup: holds nothing, changes nothing. */
    bool probed;                /* Lookup: it has waited for pages once. */
    bool exact;                 /* Nothing approximate is used. */
    struct session_name *names; /* Of what is listed. */
    bool want_pending;          /* Decode: a pending token at the head is worth an image. */
    uint32_t extra_tokens;      /* Room to reserve beyond the prompt. */
};

/* Finds or refuses the session, checks the epoch.  Fills the failure and returns false. */
bool flow_find_session(struct flow *flow);
/* Claims it against concurrent calls: SESSION_BUSY otherwise. */
bool flow_claim_session(struct flow *flow);
/* FLOW_NEXT: the tree is loaded; FLOW_WAIT: wake runs when it is (or failure is set). */
enum flow_next flow_load(struct flow *flow);
/* Goes on with the requests that waited for the session's tree. */
void flow_wake_loaded(struct kv_session *session, kv_status status);
/* Waits for the tree and for a commit in flight, then goes on with next_step. */
void flow_begin(struct flow *flow, void (*next_step)(struct flow *flow));
/* Gives everything back and replies.  The flow is gone below. */
void flow_finish(struct flow *flow);
void flow_fail(struct flow *flow, enum kv_reason reason, const char *field, const char *limit,
               const char *value);
/* What the HBM tier has room for, in tokens: the limit that HBM_FULL names. */
const char *flow_hbm_tokens(struct flow *flow);
/* Begins it, as its method says. */
void flow_start(struct flow *flow);
/* True (and failed) when nobody waits any more. */
bool flow_cancelled(struct flow *flow);
/* Its caller is gone or its time is up, and nobody else wants what it does; or the shard stops. */
bool flow_is_over(const struct flow *flow);
/* Ends it at its next chunk or step, whoever waits for it: its session goes. */
void flow_close(struct flow *flow);
/* Why the job did not end well: nobody waits any more, or a bug. */
void flow_fail_job(struct flow *flow);
/* True (and failed): the call names another epoch than the session's. */
bool flow_stale_epoch(struct flow *flow);
/* Result of a kv_status that has no better reason. */
void flow_fail_status(struct flow *flow, kv_status status);
void flow_unpin_read(struct flow *flow);
void flow_fill_checkpoint(struct flow *flow, const struct kv_node *node,
                          struct request_checkpoint *out);
/* Reserves a pool slot and returns its bytes; NULL: no room, the window is not stored. */
uint8_t *flow_reserve_image(struct flow *flow, uint32_t at);

/* One entry point per method; each leads to flow_finish(). */
void flow_open_session(struct flow *flow);
void flow_lookup(struct flow *flow);
void flow_prefill(struct flow *flow);
void flow_decode(struct flow *flow);
void flow_checkpoint(struct flow *flow);
void flow_wait_durable(struct flow *flow);
void flow_rollback(struct flow *flow);
void flow_compact(struct flow *flow);
void flow_pin(struct flow *flow);
void flow_touch(struct flow *flow);
void flow_get_usage(struct flow *flow);
void flow_fork(struct flow *flow);
void flow_close_session(struct flow *flow);
void flow_list_sessions(struct flow *flow);
void flow_get_session(struct flow *flow);
void flow_get_stats(struct flow *flow);
void flow_advance_clock(struct flow *flow);
void flow_scrub(struct flow *flow);
void flow_rotate_key(struct flow *flow);
void flow_release(struct flow *flow); /* Of flow_scrub(). */
void flow_disk_usage(struct flow *flow);
void flow_delete_session(struct flow *flow);
void flow_erase_user(struct flow *flow);
void flow_why(struct flow *flow);
void flow_purge_model(struct flow *flow);
void flow_set_quota(struct flow *flow);
void flow_get_quota(struct flow *flow);
void flow_delete_quota(struct flow *flow);
void flow_set_plan(struct flow *flow);
void flow_list_plans(struct flow *flow);
void flow_list_users(struct flow *flow);

/* False (and failed): the user has too many sessions of that kind. */
bool session_has_room(struct flow *flow, uint8_t kind);

/* Shared by Lookup, Prefill and Decode: from flow->ids to flow->live standing prepared (pages, log,
 * start of the job filled in), when `ready` is called; the flow then posts its job.  With plan_only
 * it stops once flow->plan is known.  On failure the flow is finished. */
void resume_start(struct flow *flow, void (*ready)(struct flow *flow));
/* Reads the ids of the path to `node` into flow->ids (already allocated); then `ready`. */
void resume_path_ids(struct flow *flow, struct kv_node *node, void (*ready)(struct flow *flow));
/* The parts of a resume, in the order in which they run; each starts the next or waits. */
#define RESUME_WEAKEN_MAX 2u
void resume_slot(struct flow *flow); /* slots.c: waits where all are in use. */
void resume_digest(struct flow *flow);
void resume_match(struct flow *flow);
void resume_plan(struct flow *flow);
void resume_read(struct flow *flow);
/* False (and failed): the whole call does not fit the HBM tier. */
bool resume_fits(struct flow *flow);
/* A page is damaged (KV_CORRUPT): drops what lists it.  It could not be read (KV_IO): this call
 * uses rows before its position only.  Starts over with the rest. */
void resume_weaken(struct flow *flow, uint32_t page, uint32_t position, kv_status status);
/* Tokens a replay reruns, and how far below the rows a window may lie to be preferred: a window, or
 * what rebuilds all windows exactly. */
uint32_t resume_reach(const struct flow *flow);
/* Checkpoints of the tree went since the match, for another session: what was found may be gone. */
bool resume_is_stale(const struct flow *flow);
/* Nanoseconds since the last call. */
uint64_t resume_lap(struct flow *flow);

/* A live session whose windows or rows outlived their time is not used. */
void resume_expire_live(struct flow *flow);
/* What the worker looks at itself; 0: others may want the answer later than its caller does. */
uint64_t flow_job_deadline(const struct flow *flow);
/* Starts the job; `done` runs on the shard when it is over, after resume_job_done(). */
void resume_post_job(struct flow *flow, void (*done)(struct flow *flow));

/* ---- answers by request_id ---- */

struct answer;

struct answers {
    struct answer *buckets[1024]; /* By session; new ones first. */
    struct answer *oldest, *newest;
    uint64_t bytes;
    uint32_t count; /* Of those that are over. */
};

/* False: the flow got an answer, waits for one, or was refused: it is not to begin. */
bool answers_begin(struct flow *flow);
/* Keeps the answer, or leaves what it joined.  Returns those that go on behind flow_finish(). */
struct flow *answers_end(struct flow *flow);
void answers_wake(struct flow *woken);
/* Whether others joined the call. */
bool answers_wanted(const struct flow *flow);
/* Decode: tokens that an earlier call with this id made. */
uint32_t answers_made_before(const struct flow *flow);
/* Before the job: its tokens go to the log of the answer.  False (and failed): the head is not
 * where that log ends, or there is no memory. */
bool answers_decode_log(struct flow *flow);
/* Sends a piece of the log.  False: there is nothing to send now. */
bool answers_stream(struct flow *flow);
/* The job ended and made so many. */
void answers_decoded(struct flow *flow, uint32_t made);
/* Feeds the streams of those that joined. */
void answers_pump(struct flow *flow);
/* Drops what is past its time; each tick. */
void answers_tick(struct shard *shard);
void answers_forget_session(struct shard *shard, const struct kv_session_id *session);
void answers_forget_user(struct shard *shard, const struct kv_user_id *user);
void answers_free_all(struct shard *shard); /* No flow is left. */

/* ---- slots ---- */

/* Gives free slots to those who wait for one: after everything that may have freed one. */
void slots_give(struct shard *shard);
/* Runs the flows that no longer wait. */
void slots_wake(struct shard *shard);
/* Takes a flow out of the queue: it goes on without a slot. */
void slots_leave(struct flow *flow);
/* Slots that running calls keep: of this user, or (NULL) of all. */
uint32_t slots_in_use(const struct shard *shard, const struct kv_user_id *user);

/* ---- names ---- */

struct session_name {
    struct kv_session_id id;
    const char *name, *parent_name; /* Arena; NULL: it is gone. */
};
/* Fills in the names of a list in the arena; then `done`, perhaps inside this call, where the flow
 * may have failed. */
void names_read(struct flow *flow, struct session_name *list, uint32_t count,
                void (*done)(struct flow *flow));

/* ---- sweep ---- */

/* Drops what is past its time, a bounded part of the sessions each tick. */
void sweep_tick(struct shard *shard);
/* flow->wake runs after one whole sweep. */
void sweep_wait(struct flow *flow);

/* Says whether a session is past its time, and drops what is. */
bool sweep_is_due(const struct shard *shard, const struct kv_session *session);
void sweep_session(struct shard *shard, struct kv_session *session);

/* ---- branches that Compact left ---- */

/* Those that are due go, of any session; each tick. */
void old_branches_tick(struct shard *shard);
/* The same of this one, which is loaded and which nobody changes. */
void old_branches_look(struct shard *shard, struct kv_session *session);
/* The head was moved: a branch that it stands on is not to go any more. */
void old_branches_came_back(struct shard *shard, struct kv_session *session);
/* When the node goes with such a branch of the session; 0: it does not. */
uint64_t old_branches_until_ms(const struct shard *shard, struct kv_session *session,
                               const struct kv_node *node);

/* ---- capacity eviction ---- */

struct evict {
    struct kv_evict_list list; /* Of the last walk. */
    uint32_t at;               /* In it. */
    uint32_t bucket;           /* Where the walk goes on. */
    bool walking, walked;
    uint64_t walk_ns;     /* When it began. */
    bool is_evicting;     /* As kv_evict_need() takes it. */
    uint32_t gained;      /* Pages, since the walk began. */
    uint32_t loads;       /* Trees it waits for, */
    uint32_t loading;     /* and what they hold. */
    uint64_t hopeless_ns; /* A whole walk gained nothing; 0: not so. */
    uint64_t refused_ns;  /* When a save was last refused because the file system is full. */
};

/* Makes room for saves to come and for those that wait; a bounded part each turn.  True: there is
 * more to do at once. */
bool evict_tick(struct shard *shard);
/* Why saves are refused now for lack of room that others took; NULL: they are not. */
const char *evict_health(const struct shard *shard);
/* Every 50 ms, and before an answer that health must agree with. */
void shard_look_at_health(struct shard *shard);

/* ---- compaction ---- */

#define COMPACT_TREES_MAX 4096u /* Of one scan. */

enum compact_stage {
    COMPACT_IDLE, /* No segment is closed. */
    COMPACT_WAIT, /* For a scan, a load or a move. */
    COMPACT_TREE, /* The next one. */
    COMPACT_MOVE, /* The next pages of one, which is held. */
};

struct compact_page {
    uint32_t position, page;
};

struct compact {
    enum compact_stage stage;
    uint32_t segments;           /* Closed. */
    struct kv_session_id *trees; /* With pages in them. */
    uint32_t count, at;
    struct kv_session *session; /* Held: counted in the commits of its tree, */
    uint64_t held_ns;           /* since this. */
    bool has_last;
    struct compact_page last; /* Of its pages, the last one looked at. */
    bool expires;             /* What is in them is dropped, not moved. */
    bool is_over;             /* Something failed. */
    uint64_t moved;           /* Pages, in this round. */
    uint64_t look_ns;         /* Not before this. */
    uint64_t next_ns;         /* As kv_compact_next_ns() has it. */
};

/* A bounded part of it, each turn.  True: there is more to do at once. */
bool compact_tick(struct shard *shard);

/* ---- patience ---- */

/* Lets calls go on that wait for a device that does not answer; each tick. */
void patience_tick(struct shard *shard);
/* The save of its session hangs, and it can do without: a turn, or what refuses at once. */
bool patience_is_over(const struct flow *flow);
/* ---- scrub ---- */

struct scrub {
    struct kv_scrub *run; /* NULL: none runs. */
    bool stopping;        /* It ends when nothing is in flight. */
    bool loading;         /* The tree of a finding is on its way. */
    bool settling;        /* What was found is being recorded, */
    bool settled;         /* and is. */
    uint64_t retry_ns;    /* The last one could not be loaded: not again before this. */
    uint64_t rate_bytes;
    uint64_t started_ns, ended_ns; /* Stopwatch; of the last run, ended_ns 0: it goes on. */
    struct kv_scrub_progress last; /* Of the last run, when it ended. */
    uint64_t damaged, dropped;     /* Of the run: pages that were bad, checkpoints that went. */
    uint64_t passes, full_ns;      /* Whole ones since the start; when the last one ended. */
    struct kv_scrub_finding pending[KV_SCRUB_PENDING_MAX];
    uint32_t pending_count;
};

/* Once a loop turn.  Returns the nanoseconds until it wants the next one; UINT64_MAX: none. */
uint64_t scrub_tick(struct shard *shard);
/* Why a call fails whose records were not written (KV_BUSY: for want of room), or may have been
 * (KV_IO). */
enum kv_reason shard_unrecorded(const struct shard *shard, kv_status status);
/* Why a call fails whose file of the directory could not be written: nothing happened. */
enum kv_reason shard_unwritten(const struct kv_error *err);

/* The answer to any call of the scrub; false: no memory. */
bool scrub_fill_status(struct flow *flow, bool changed);
/* Seconds since a whole pass ended, or since the start where none did. */
double scrub_age_s(const struct shard *shard);

/* ---- delete ---- */

struct removal;

/* Removals whose session is at rest now go on. */
void delete_tick(struct shard *shard);

/* Deletes a session at rest to make room for the flow, and wakes that; false: it cannot begin. */
bool delete_for_quota(struct flow *flow, struct kv_session *session, const struct kv_loss *loss);

/* ---- quotas ---- */

struct kv_quota quota_of(const struct shard *shard, const struct kv_user *user);
/* What counts against a limit now; 0 for those that are not of the user as a whole.  NULL: a user
 * without sessions. */
uint64_t quota_used(const struct shard *shard, const struct kv_user *user, enum kv_quota_kind kind);
uint64_t quota_saves(const struct shard *shard, const struct kv_user *user);
struct kv_quota_victim quota_victim(const struct kv_session *session);

/* One more session of kind MAIN.  FLOW_WAIT: `again` runs when another one is gone.  FLOW_NEXT: it
 * fits, or the flow has failed. */
enum flow_next admit_session(struct flow *flow, void (*again)(struct flow *flow));
/* So many more pages of the flow's session; refused: out.save_reason is set. */
enum flow_next admit_pages(struct flow *flow, uint32_t pages, void (*again)(struct flow *flow));
/* False (and failed): too many calls, or saves, or tokens, for now. */
bool admit_request(struct flow *flow);
bool admit_turn(struct flow *flow);
/* A checkpoint was saved: of more turns than the quota allows the oldest lose theirs. */
void admit_turns(struct shard *shard, struct kv_session *session);
/* What the turn came to. */
void admit_computed(struct flow *flow, uint64_t tokens);

/* ---- purge ---- */

struct purge;

/* Those whose session is at rest now go on. */
void purge_tick(struct shard *shard);

/* ---- why ---- */

/* What took a checkpoint that is not there; NEVER_STORED: nothing that is known. */
enum kv_reason why_gone(const struct kv_session *session, const struct kv_checkpoint_id *id);
/* Why nothing of the session's is used. */
enum kv_reason why_missed(const struct kv_session *session);
/* Why the head could not be resumed EXACT; NONE: it could. */
enum kv_reason why_head(const struct shard *shard, struct kv_session *session);
/* Fills out.removed where the prompt goes on behind `stored` and something was removed there. */
void why_resumed(struct flow *flow, uint32_t stored, bool diverged);
/* Fills out.removals; false: no memory. */
bool why_removals(struct flow *flow, const struct kv_session *session);

/* ---- the shard ---- */

/* Answers with the checkpoints of flow->points. */
void turn_reply(struct flow *flow);
/* Commits flow->points from flow->beside, or flow->live (image of point i in reserved[i]); `after`
 * runs when the level asked for is reached or refused (out.save_reason). */
void turn_save(struct flow *flow, void (*after)(struct flow *flow));

/* The head becomes a checkpoint, also beside a Decode, or is one: flow->points[0].node, NULL with
 * out.save_reason where it could not be stored; then `after`.  On failure the flow is finished. */
void checkpoint_start(struct flow *flow, void (*after)(struct flow *flow));
/* Those go on that waited for what was stored to be on its way. */
void checkpoint_wake(struct flow *flow);

/* Wakes flows that wait for a commit in this session's tree. */
void shard_commit_ended(struct shard *shard, struct kv_session *session);
/* Wakes flows that wait for the session to be unclaimed, or for its Decode to have a first step. */
void shard_session_freed(struct shard *shard, struct kv_session *session);
/* Drops every checkpoint that lists a damaged page. */
void shard_drop_page(struct shard *shard, struct kv_session *session, uint32_t page);
/* The store drops `node` next: nobody may keep a pointer to it. */
void shard_before_drop(struct kv_session *session, const struct kv_node *node);

struct shard_counters {
    uint64_t outcomes[4]; /* By enum request_outcome. */
    uint64_t outcome_reasons[KV_REASON_COUNT];
    uint64_t prompt_tokens, hit_tokens, replayed_tokens, computed_tokens, decoded_tokens;
    uint64_t lookups, weakened, failures, save_refused;
    uint64_t live_evictions;
    uint64_t slot_waits, slot_refused;
    uint64_t compact_rounds;           /* That moved something. */
    uint64_t room_waits, room_refused; /* Saves that found the SSD tier full. */
    uint64_t late_saves;               /* Not waited for. */
    uint64_t sessions_deleted;
    uint64_t quota_sessions; /* Deleted by a quota; counted in sessions_deleted, too. */
    uint64_t quota_turns; /* Checkpoints that lost id and window to it. */
    uint64_t quota_refused[KV_QUOTA_COUNT];
    uint64_t answers_repeated, answers_joined, answers_continued, answers_refused;
};

enum shard_latency {
    LATENCY_PREFILL,
    LATENCY_DECODE,
    LATENCY_LOOKUP,
    LATENCY_READ,
    LATENCY_RUN,
    LATENCY_COMMIT,
    LATENCY_QUEUE,
    LATENCY_LIVE_QUEUE,   /* Of calls that had to wait for a slot. */
    LATENCY_ENGINE_QUEUE, /* From the job to its first row. */
    LATENCY_COUNT
};

struct shard {
    struct shard_options options;
    struct kv_store *store;
    const struct kv_layout *layout;
    struct live *lives;
    uint32_t live_count;
    uint64_t used_seq;
    uint32_t sweep_bucket; /* Where the sweep goes on. */
    uint32_t sweep_loads;  /* Trees it is waiting for. */
    struct flow *sweep_waiters;
    uint32_t branch_loads;                 /* Trees that old branches wait for. */
    struct flow *flows;                    /* All in progress. */
    struct kv_waiting_queue waiting;       /* For a slot. */
    struct flow *woken_first, *woken_last; /* They go on in this turn. */
    struct commit *commits;
    struct commit *waiting_first, *waiting_last; /* For room, of commits. */
    uint32_t waiting_count, waiting_pages;
    struct evict evict;
    struct compact compact;
    struct scrub scrub;
    struct flow *releases;    /* Calls that have quarantined places tried, the first one now. */
    struct removal *removals; /* Under way. */
    struct purge *purges;     /* Likewise. */
    struct answers answers;
    struct shard_counters counters;
    struct kv_histogram latencies[LATENCY_COUNT];
    uint64_t started_ns;
    uint64_t patience_ns; /* Stopwatch at the last patience_tick(). */
    bool slow;            /* The device does not answer: nothing new is asked of it. */
    bool look_now;        /* Somebody left: look at cancelled flags in this turn. */
    atomic_uint inflight;
    atomic_bool stopping;
    atomic_bool poked;
    struct kv_msg poke;
    _Atomic(const char *) health;
    _Atomic(const char *) pages_gone, records_gone; /* Set by whoever watches the files. */
};
