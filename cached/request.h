#pragma once

/*
 * One call, from decoding to reply: where rpc/ and shard/ meet.
 *
 * Ownership: an rpc thread creates the request and fills `in`; shard_post() hands it to the shard;
 * request_reply() hands it back.  The line that hands it over is the last line that touches it,
 * with one exception: `cancelled` may be set by the rpc thread at any time.
 *
 * Everything the request points to lives in its arena, or in the call's message, until the reply
 * has been sent.
 */

#include "kvstore/base/arena.h"
#include "kvstore/base/digest.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/mailbox.h"
#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/key_record.h"
#include "kvstore/format/reason.h"
#include "kvstore/format/quota.h"
#include "kvstore/format/removal.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum request_method {
    REQUEST_OPEN_SESSION,
    REQUEST_LOOKUP,
    REQUEST_PREFILL,
    REQUEST_DECODE,
    REQUEST_CHECKPOINT,
    REQUEST_WAIT_DURABLE,
    REQUEST_ROLLBACK,
    REQUEST_COMPACT,
    REQUEST_PIN,
    REQUEST_TOUCH,
    REQUEST_FORK,
    REQUEST_CLOSE_SESSION,
    REQUEST_LIST_SESSIONS,
    REQUEST_GET_SESSION,
    REQUEST_GET_USAGE,
    REQUEST_GET_STATS,
    REQUEST_ADVANCE_CLOCK,
    REQUEST_SCRUB,
    REQUEST_DISK_USAGE,
    REQUEST_DELETE_SESSION,
    REQUEST_ERASE_USER,
    REQUEST_ROTATE_KEY,
    REQUEST_WHY,
    REQUEST_PURGE_MODEL,
    REQUEST_SET_QUOTA,
    REQUEST_GET_QUOTA,
    REQUEST_DELETE_QUOTA,
    REQUEST_SET_PLAN,
    REQUEST_LIST_PLANS,
    REQUEST_LIST_USERS,
    REQUEST_METHOD_COUNT,
};

/* Same numbers as in session.proto; LEVEL_DEFAULT and KIND_UNSPECIFIED are its UNSPECIFIED. */
enum request_outcome { OUTCOME_NONE, OUTCOME_EXACT, OUTCOME_REPLAY, OUTCOME_MISS };
enum request_level { LEVEL_DEFAULT, LEVEL_ACCEPTED, LEVEL_RAM, LEVEL_SSD, LEVEL_NONE };
enum request_kind {
    KIND_UNSPECIFIED,
    KIND_PREFILL_END,
    KIND_DECODE_END,
    KIND_ANCHOR,
    KIND_MANUAL,
    KIND_BRANCH
};

/* Same numbers as in admin.proto. */
enum request_scrub_action {
    SCRUB_UNSPECIFIED,
    SCRUB_STATUS,
    SCRUB_START,
    SCRUB_STOP,
    SCRUB_RELEASE,
};

/* Token ids in the arena, aligned, in host order; rpc has checked each against the vocabulary. */
struct request_tokens {
    const uint32_t *ids;
    uint32_t count;
};

/* Why a call failed.  field, limit, value: short texts in the arena or literals; NULL: absent. */
struct request_failure {
    bool failed;
    enum kv_reason reason;
    const char *field;
    const char *limit;
    const char *value;
    const char *text;  /* One sentence; NULL: the reason's cause. */
    uint32_t retry_ms; /* > 0: RetryInfo. */
};

struct request_checkpoint {
    struct kv_checkpoint_id id;
    struct kv_checkpoint_id parent;
    bool has_parent;
    uint32_t position;
    struct kv_digest digest;
    enum request_kind kind;
    enum request_level rows_level;
    enum request_level window_level;
    uint64_t rows_expire_ms;
    uint64_t window_expire_ms;
    bool approximate;
    uint32_t approx_from;
    uint64_t kernels;
    uint64_t bytes;
    uint64_t age_ms;
    uint64_t leave_ms; /* Until it goes with the branch that a compaction left; 0: it does not. */
    uint64_t pin_ms;   /* Until its pin ends; 0: none. */
    const char *session_name; /* That made it; NULL: the session asked for. */
};

/* Another session with a head in the same tree. */
struct request_head {
    const char *session_name; /* Arena. */
    bool has_checkpoint;
    struct kv_checkpoint_id checkpoint;
    uint32_t position;
};

struct request_session {
    const char *name;
    const char *parent_name;
    uint32_t kind;
    uint32_t head_position;
    uint32_t checkpoints;
    bool live;
    uint64_t idle_ms, age_ms, ttl_ms;
    bool ttl_of_plan; /* It has none of its own. */
};

/* Nanoseconds by stage. */
struct request_times {
    uint64_t arrived_ns; /* kv_clock_stopwatch_ns() at decoding; set by rpc. */
    uint64_t queue_ns, lookup_ns, read_ns, run_ns, commit_ns;
};

/* One field of the message, to tell a repeated call from another one with its id. */
struct request_field {
    const char *name; /* As in the .proto; static. */
    bool is_number;
    uint64_t value; /* The number; else the start of a digest of its bytes. */
};

struct request_in {
    /* By rpc for every session call; the name is in the arena, like the message it came in. */
    const char *session_name;
    struct kv_session_id session;
    const char *request_id;             /* Arena; NULL: none. */
    const struct request_field *fields; /* Only with a request_id: all but that and session_id. */
    uint32_t field_count;
    uint64_t epoch; /* 0: none. */
    enum request_level level;
    union {
        struct {
            uint32_t kind;
            const char *parent_name;
            uint64_t ttl_ms; /* 0: as the plan of the user says. */
        } open;
        struct {
            struct request_tokens tokens;
        } lookup;
        struct {
            struct request_tokens tokens;
            bool has_parent;
            struct kv_checkpoint_id parent;
            uint32_t stable_tokens;
            uint32_t anchors[KV_ANCHORS_MAX];
            uint32_t anchor_count;
            bool no_checkpoint;
            bool exact; /* Nothing approximate is used. */
        } prefill;
        struct {
            uint32_t max_tokens;
            float temperature, top_p;
            uint32_t top_k;
            uint64_t seed;
            struct request_tokens forced;
            uint32_t stop_tokens[KV_STOP_TOKENS_MAX];
            uint32_t stop_count;
            bool ignore_eos;
            bool no_checkpoint;
            uint32_t from_position; /* 0: the head. */
        } decode;
        struct {
            enum request_kind kind;
        } checkpoint;
        struct {
            struct kv_checkpoint_id id;
        } wait_durable;
        struct {
            bool has_id; /* Else position and digest name it. */
            struct kv_checkpoint_id id;
            uint32_t position;
            struct kv_digest digest;
            bool keep;
        } rollback;
        struct {
            uint64_t keep_ms; /* At least 1. */
        } compact;
        struct {
            struct kv_checkpoint_id id;
            uint64_t ttl_ms; /* Pin; 0: it ends. */
        } node;
        struct {
            bool has_id; /* Else from the head. */
            struct kv_checkpoint_id id;
            const char *session_name; /* Of the new one. */
            struct kv_session_id session;
            uint32_t kind;   /* 0: as its parent. */
            uint64_t ttl_ms; /* 0: as its parent's. */
        } fork;
        struct {
            uint32_t page_size;
            struct kv_session_id after; /* Page token: last id of the previous page. */
            bool has_after;
        } list;
        struct {
            uint64_t ms;
        } advance;
        struct {
            enum request_scrub_action action;
            uint64_t rate_bytes; /* 0: as configured. */
        } scrub;
        struct {
            bool has_user; /* By session of this one; else by user. */
            struct kv_user_id user;
            const char *user_name;
            bool has_after; /* Page token: last session of the previous answer. */
            struct kv_session_id after;
        } usage;
        struct {
            bool dry_run;
            struct kv_user_id user; /* EraseUser. */
            const char *user_name;
        } remove;
        struct {
            struct kv_user_id user;
            bool has_position;
            uint32_t position;
        } why;
        struct {
            struct kv_user_id user;
            const char *name;    /* Of the user. */
            const char *plan;    /* "": as it is. */
            uint32_t set, unset; /* 1 << enum kv_quota_kind */
            uint64_t limits[KV_QUOTA_COUNT];
            bool dry_run, remove; /* remove: the plan. */
        } quota;
        struct {
            const char *digits;   /* Of the fingerprint; lower case. */
            uint32_t digit_count; /* 0: every model but the served one. */
            bool dry_run;
        } purge;
    } u;
};

/* A number for GetStats. */
struct request_counter {
    const char *name, *labels, *help;
    double value;
};
struct request_latency {
    const char *name;
    uint64_t count;
    double p50_ms, p99_ms, max_ms;
};
struct request_tier {
    const char *name, *note;
    uint64_t bytes_used, bytes_capacity, items_used, items_capacity;
};
/* Filled by the shard; rpc adds version, commit, pid, RSS and its own counters. */
struct request_stats {
    struct kv_arena *arena; /* Of the request. */
    uint64_t uptime_ms;
    const char *model_name, *engine_backend, *engine_isa, *engine_family, *io_backend, *clock_mode,
        *health;
    struct kv_digest model;
    struct request_tier tiers[3];
    struct request_counter *counters;
    uint32_t counter_count;
    struct request_latency *latencies;
    uint32_t latency_count;
    uint64_t sessions, sessions_live, checkpoints, recovered, dropped, rss_budget_bytes;
    uint64_t page_bytes, image_bytes, wrong_bytes;
    double bytes_per_token;
    uint32_t window_tokens, spare_tokens, vocab_tokens;
    const char *start_phase; /* NULL: the daemon serves. */
    uint32_t start_percent;
};

/* A place that is given to nobody any more; texts in the arena. */
struct request_quarantined {
    uint32_t segment, ssd_page, owners;
    uint64_t offset, generation, age_ms;
    const char *found_by, *cause;
};
struct request_scrub {
    bool running, changed, stopping;
    const char *failure; /* Static, of the last pass; NULL: none. */
    uint64_t rate_bytes, elapsed_ms;
    uint64_t pages_total, pages, bytes, damaged, unread, waiting, checkpoints_dropped; /* A run. */
    uint64_t passes, full_age_ms; /* Since the start; age of the last one, 0: none. */
    uint64_t plain;               /* Not encrypted. */
    uint64_t quarantined_pages;
    uint64_t released, still_bad, still_named; /* By this call. */
    const struct request_quarantined *listed;  /* Arena. */
    uint32_t listed_count;
};

/* What a removal removed, or would. */
struct request_receipt {
    bool found; /* EraseUser: there was such a user. */
    uint64_t sessions, checkpoints, bytes;
};

/* Bytes on SSD of a user, or of one session. */
struct request_usage_row {
    struct kv_user_id user_id;
    const char *user, *session; /* Arena; session "" where rows are users. */
    uint64_t sessions, checkpoints, live_pages, expired_pages;
};
struct request_usage {
    bool own;               /* Asked by a harness: rows only. */
    const char *encryption; /* Static. */
    uint64_t bytes_max, bytes_files, page_bytes, pages_free, pages_used, pages_quarantined;
    struct request_usage_row *rows; /* Arena. */
    uint32_t row_count;
    bool more;
    struct kv_session_id after;
};

/* What the sessions of one user hold. */
struct request_use {
    uint64_t sessions, checkpoints, bytes_ssd, bytes_pool, bytes_hbm;
    uint64_t pins, pinned_bytes_ssd, pinned_bytes_pool;
};

struct request_rotation {
    bool rotated; /* False: it is the key in use. */
    char master[KV_MASTER_ID_TEXT_BYTES], before[KV_MASTER_ID_TEXT_BYTES];
    uint64_t keys;
};

/* Why, of a position or of the head; with out.removed and out.removals. */
struct request_why {
    bool is_there; /* The session; false: out.removed says how it went. */
    bool has_position, is_stored;
    uint32_t position;
    enum kv_reason reason;
    uint32_t head_position, checkpoints;
    uint64_t idle_ms, ttl_ms;
};

/* A user's limits, with what counts against them and what goes next. */
struct request_quota_next {
    struct kv_session_id id;
    const char *session; /* NULL: it went meanwhile. */
    bool is_held, would_go;
    uint64_t idle_ms, bytes;
};
struct request_quota {
    bool found;
    const char *plan;
    struct kv_quota quota;
    uint64_t ttl_ms; /* What counts where the quota has none. */
    uint32_t own;    /* Bits of those that are not the plan's. */
    uint64_t used[KV_QUOTA_COUNT];
    struct request_quota_next next[KV_QUOTA_NEXT_MAX];
    uint32_t next_count;
    uint64_t expired; /* Sessions with checkpoints that go because of its ttl. */
};
struct request_plan {
    const char *name;
    struct kv_quota quota;
    uint64_t ttl_ms; /* As above. */
    uint32_t users;
    bool is_configured; /* As the configuration has it. */
};
struct request_user_row {
    struct kv_user_id id;
    const char *name, *plan;
    bool has_own;
    uint64_t sessions, sessions_limit, bytes, bytes_limit;
};

/* Models whose checkpoints are stored, and what went of them. */
struct request_purge_model {
    uint64_t tag; /* First 8 B of the fingerprint. */
    uint64_t checkpoints;
    bool is_served, is_asked;
};
struct request_purge {
    bool dry_run;
    struct request_purge_model models[KV_PURGE_MODELS_MAX];
    uint32_t model_count;
    uint64_t checkpoints, pages;
    uint64_t page_bytes;
};

struct request_out {
    struct request_failure failure;
    struct request_times times;
    uint64_t epoch;
    bool repeated; /* The answer of an earlier call with its request_id. */
    enum request_outcome outcome;
    enum kv_reason reason;
    enum kv_reason save_reason; /* NONE, or why a checkpoint was not stored. */
    uint32_t prompt_tokens, hit_tokens, replayed_tokens, computed_tokens, stored_tokens;
    uint32_t hbm_tokens, ssd_tokens, weakened;
    bool diverged;
    uint32_t diverged_at;
    bool approximate;
    uint32_t approx_from;
    bool other_kernels;  /* The state that was resumed is of another family: */
    const char *kernels; /* its name (arena). */
    bool has_resumed;
    struct kv_checkpoint_id resumed;
    struct request_checkpoint *checkpoints; /* Arena. */
    uint32_t checkpoint_count;
    uint32_t head_position;
    uint32_t tokens_sent;             /* Decode. */
    bool stopped;                     /* Decode: FINISH_STOP. */
    bool created;                     /* Open. */
    bool was_live;                    /* Close. */
    enum request_level rows_level;    /* WaitDurable. */
    uint64_t pin_ms;                  /* Pin. */
    uint64_t rows_expire_ms;          /* Touch. */
    uint64_t window_expire_ms;        /* Touch, Pin; 0: no window. */
    struct request_use use;           /* GetUsage. */
    struct request_session session;   /* GetSession. */
    struct request_session *sessions; /* List; arena. */
    uint32_t session_count;
    bool list_more;
    struct kv_session_id list_last;
    struct request_head *heads; /* GetSession; arena. */
    uint32_t head_count;
    bool has_head_checkpoint;
    struct kv_checkpoint_id head_checkpoint;
    struct request_stats *stats;    /* Arena. */
    uint64_t wall_ms;               /* AdvanceClock. */
    struct request_scrub *scrub;    /* Arena. */
    struct request_usage *usage;    /* Arena. */
    struct request_receipt receipt; /* DeleteSession, EraseUser. */
    struct request_rotation rotation;
    bool has_removed;            /* Lookup, Prefill, Decode, Why: what took the rows that are */
    struct kv_removal removed;   /* missing next. */
    struct kv_removal *removals; /* GetSession, Why; arena, oldest first. */
    uint32_t removal_count;
    bool removals_cut;           /* Older ones were forgotten. */
    struct request_why *why;     /* Arena. */
    struct request_purge *purge; /* Arena. */
    struct request_quota *quota; /* Arena. */
    struct request_plan *plans;  /* Arena. */
    uint32_t plan_count;
    struct request_user_row *users; /* Arena. */
    uint32_t user_count;
};

struct request {
    struct kv_msg msg; /* Into the shard's mailbox, and back. */
    enum request_method method;
    struct kv_arena *arena;
    struct kv_user_id user;
    const char *user_name;
    bool is_ops;          /* Its token has role ops. */
    uint64_t deadline_ns; /* kv_clock_stopwatch_ns() after which nobody waits. */
    /* Client gone or its deadline passed: set by rpc, looked at by the shard. */
    atomic_bool cancelled;
    struct request_in in;
    struct request_out out;
    void *flow; /* Shard's own state of this request. */

    /* Streams (Decode).  The shard sends one message at a time with request_stream(); when it has
     * left, rpc posts stream_msg to the shard's mailbox (its run function set by the shard). */
    struct kv_msg stream_msg;
    bool stream_busy; /* Shard: a message is on its way. */
};

/* Implemented by rpc/, called on the shard thread.  Starts the call's last batch (status from
 * out.failure, or the encoded response) and gives the request back: do not touch it below. */
void request_reply(struct request *req);

/* Decode: starts one DecodeResponse (stream_busy must be false; set true by this call).  The arrays
 * may be reused at once. */
void request_stream(struct request *req, uint32_t position, const uint32_t *tokens,
                    const uint32_t *logits_crc, uint32_t count);

/* Fills failure; texts are formatted into the arena.  fmt NULL: the reason's own cause. */
void request_fail(struct request *req, enum kv_reason reason, const char *field, const char *limit,
                  const char *value, const char *fmt, ...) __attribute__((format(printf, 6, 7)));

/* Decimal text in the arena, for limit and value. */
const char *request_u64(struct request *req, uint64_t value);
