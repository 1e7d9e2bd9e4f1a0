#pragma once

/* Every bound in the system.  Memory follows from these and from the configured budgets; what a
 * client sees of them stands in the .proto comments and in docs/limits.md. */

#include <stdint.h>

/* Model and prompt. */
#define KV_PAGE_TOKENS 128u
#define KV_PROMPT_TOKENS_MAX 1048576u /* A model may allow fewer: kv_layout.context_tokens. */
#define KV_PAGES_PER_SESSION_MAX (KV_PROMPT_TOKENS_MAX / KV_PAGE_TOKENS)
#define KV_SOURCES_MAX 8u /* Layers that own rows. */
#define KV_LAYERS_MAX 64u
#define KV_DRAFT_STAGES_MAX 4u
#define KV_SPARE_TOKENS_MIN 4u
#define KV_SPARE_TOKENS_MAX 128u

/* Names. */
#define KV_USER_NAME_MAX 64u
#define KV_SESSION_NAME_MAX 128u /* [A-Za-z0-9._:-], 1 to 128 bytes. */
#define KV_REQUEST_ID_MAX 64u

/* Answers kept by request_id, in RAM. */
#define KV_REQUEST_FIELDS_MAX 16u        /* Of one message, besides session_id and request_id. */
#define KV_ANSWERS_PER_SESSION_MAX 64u   /* The last ones. */
#define KV_ANSWERS_LIFE_MS 600000u       /* From the end of the call. */
#define KV_ANSWERS_BYTES_MAX (16u << 20) /* Of one shard; the oldest go first. */

/* Requests. */
#define KV_ANCHORS_MAX 4u
#define KV_STOPS_MAX                                                                               \
    (KV_ANCHORS_MAX + 2u) /* Places of one prefill where a checkpoint may stand.                   \
                           */
#define KV_DECODE_TOKENS_MAX 65536u
#define KV_STOP_TOKENS_MAX 16u /* Named by the client; the model's eos comes on top. */
#define KV_MESSAGE_BYTES_MAX (8u << 20)
#define KV_REST_BYTES_MAX 65536u /* Of a message, besides its token list. */
#define KV_METADATA_BYTES_MAX 8192u
#define KV_DEADLINE_MAX_MS 600000u /* Also the deadline of a call that names none. */
#define KV_REQUESTS_INFLIGHT_MAX 256u
#define KV_REQUESTS_PER_SESSION_MAX 64u  /* Parked while a session loads. */
#define KV_LIVE_WAITING_MAX 128u         /* Calls that wait for a live slot of the engine. */
#define KV_LIVE_WAITING_PER_USER_MAX 32u /* Of one user among them. */
#define KV_LIST_PAGE_MAX 1000u
#define KV_TTL_MS_MAX (30ull * 24 * 3600 * 1000)
#define KV_CLOCK_STEP_MS_MAX (365ull * 24 * 3600 * 1000)
#define KV_CLOCK_WALL_MS_MAX 4102444800000ull /* The year 2100: as far as virtual time goes. */

/* Connections. */
#define KV_CONNECTIONS_MAX 1000u
#define KV_CONNECTIONS_MIN 32u            /* However few descriptors there are. */
#define KV_CONNECTION_SILENT_MS 10000u    /* Without a first byte. */
#define KV_STREAMS_MAX 100u               /* Calls at a time on one connection. */
#define KV_WATCHERS_MAX 256u              /* Of health. */
#define KV_RECEIVE_BYTES_MAX (256u << 20) /* Messages on their way in: 32 of the largest. */
#define KV_REQUEST_BYTES_MAX (16u << 20)  /* A call's arena: the longest prompt twice over. */

/* The token file. */
#define KV_AUTH_TOKENS_MAX 4096u
#define KV_AUTH_TOKEN_BYTES_MAX 1024u
#define KV_AUTH_FILE_BYTES_MAX (1u << 20)

/* Checkpoints. */
#define KV_REPLAYS_MAX 16u /* Positions of clipped replays one checkpoint can name. */
#define KV_SESSIONS_MAX 1048576u
#define KV_NODES_MAX 1048576u

/* The engine. */
#define KV_PASS_ROWS_MAX 4096u     /* Encoder rows of one pass, and as many decoder rows. */
#define KV_ENGINE_THREADS_MAX 256u /* That compute, with the worker. */
#define KV_DRAFT_BLOCK_MAX 16u     /* Tokens a model drafts at once. */
#define KV_VERIFY_TOKENS_MAX 8u    /* Of one step: a pending token and drafts behind it. */
#define KV_DRAFTS_MAX (KV_VERIFY_TOKENS_MAX - 1u)

#define KV_DELETED_MAX 1024u /* Ids of deleted sessions that answer DELETED. */

/* DiskUsage, one answer: records looked at (a session is never cut), and rows. */
#define KV_USAGE_RECORDS_MAX 65536u
#define KV_USAGE_ROWS_MAX 1000u
#define KV_PLANS_MAX 64u         /* Of quotas. */
#define KV_QUOTA_USERS_MAX 65536u /* Users with limits of their own. */
#define KV_QUOTA_NEXT_MAX 8u     /* What goes next, as it is told. */
#define KV_PURGE_MODELS_MAX 64u /* Told apart by one PurgeModel call. */

#define KV_SUB_SESSIONS_MAX 64u /* Sub and ephemeral sessions, for each main one of a user. */

#define KV_OLD_BRANCHES_MAX 16384u    /* That compactions left and that have not gone yet. */
#define KV_OLD_BRANCH_KEEP_MS 600000u /* How long one stays, where the call does not say. */

/* Pins, in RAM. */
#define KV_PINS_MAX 1024u
#define KV_PINS_PER_USER_MAX 64u
#define KV_PIN_MS_MAX 600000u
#define KV_PIN_SHARE 4u /* Of what a user may have in a tier, one in so many bytes. */

/* The scrub. */
#define KV_SCRUB_RATE_MIN (1u << 20) /* Bytes a second. */
#define KV_SCRUB_RATE_MAX (64ull << 30)
#define KV_SCRUB_BUFFER_BYTES (2u << 20) /* Pages in flight, at least two of them. */
#define KV_SCRUB_DEPTH_MAX 32u           /* Pages in flight. */
#define KV_SCRUB_PENDING_MAX 64u         /* Findings whose session is busy. */
#define KV_QUARANTINE_LISTED_MAX 256u    /* Places that status names; others are counted. */

/* Encryption: pages on their way to SSD lie in buffers of their own, at least four of them. */
#define KV_ENCRYPT_BUFFER_BYTES (4u << 20)
#define KV_ENCRYPT_PAGES_MAX 64u

/* Threads and I/O. */
#define KV_DESCRIPTORS_MIN 128u /* Open files of a daemon, beside its segments. */
#define KV_DISK_NAMES_BYTES_MAX (64u << 20) /* Of one folder: more than a million segments. */
#define KV_RING_DEPTH 128u
/* A device that gave nothing to a read or a save for so long is not waited for any more. */
#define KV_DISK_PATIENCE_MS 5000u
#define KV_READ_DEPTH 32u            /* Pages of one read that are with the disk at a time. */
#define KV_MANIFEST_BATCHES_MAX 256u /* Of one synced write. */
#define KV_LOG_LINE_MAX 1024u
#define KV_LOG_QUEUE_LINES 1024u
#define KV_LOG_DRAIN_MS 2000u /* At the end, for whoever reads the log. */
#define KV_IO_ALIGN 4096u

_Static_assert(KV_PROMPT_TOKENS_MAX % KV_PAGE_TOKENS == 0, "a session is whole pages");
_Static_assert(4ull * KV_PROMPT_TOKENS_MAX + KV_REST_BYTES_MAX <= KV_MESSAGE_BYTES_MAX,
               "the longest prompt fits one message");
_Static_assert(2ull * 4 * KV_PROMPT_TOKENS_MAX <= KV_REQUEST_BYTES_MAX,
               "the longest prompt fits one arena twice");
_Static_assert(2 * KV_LIVE_WAITING_MAX <= KV_REQUESTS_INFLIGHT_MAX,
               "calls that wait for a slot leave room for those that run and those that look");
_Static_assert(2 * KV_LIVE_WAITING_PER_USER_MAX <= KV_LIVE_WAITING_MAX,
               "one user cannot fill the queue");
_Static_assert(KV_SPARE_TOKENS_MAX <= KV_PAGE_TOKENS, "spare rows reach one page back at most");
_Static_assert(KV_DRAFTS_MAX <= KV_DRAFT_BLOCK_MAX, "no more is verified than is drafted");
_Static_assert(4 * KV_VERIFY_TOKENS_MAX <= KV_PASS_ROWS_MAX,
               "a whole step fits beside the quarter of a pass that prefills keep");
_Static_assert(KV_VERIFY_TOKENS_MAX <= KV_SPARE_TOKENS_MAX,
               "spare rows can cover what one step may reject");
_Static_assert(2 * KV_CONNECTIONS_MIN <= KV_DESCRIPTORS_MIN,
               "the daemon's own files have the rest");
_Static_assert(2 * KV_READ_DEPTH <= KV_RING_DEPTH, "a long read leaves room for others");
_Static_assert(KV_PASS_ROWS_MAX <= KV_PROMPT_TOKENS_MAX, "a pass is no longer than a prompt");
