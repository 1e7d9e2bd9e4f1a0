#pragma once

/*
 * Reasons: stable names a client may branch on.  Part of the API; one table, printed by
 * `cachectl explain`.  First group: why a resume was not EXACT over everything stored, and why
 * something is gone.  Second group: why a call failed; each has one gRPC status.  Pure; any thread.
 */

#include <stdbool.h>

/* clang-format off */
#define KV_REASONS(X)                                                                              \
    /* outcomes */                                                                                 \
    X(NONE) X(NEVER_STORED) X(TOO_SHORT) X(DIVERGED) X(EXPIRED) X(QUOTA) X(CAPACITY)               \
    X(ROLLED_BACK) X(DELETED) X(LOST_NODE) X(CORRUPT) X(READ_FAILED) X(MODEL_CHANGED)              \
    X(OTHER_KERNELS) X(ONLY_APPROXIMATE)                                                           \
    /* failures: names and ids */                                                                  \
    X(SESSION_NOT_FOUND) X(SESSION_EXISTS) X(SESSION_ID_INVALID) X(SESSION_BUSY)                   \
    X(SESSION_KIND_INVALID) X(REQUEST_ID_INVALID) X(TTL_INVALID) X(STALE_EPOCH)                    \
    X(REQUEST_ID_REUSED)                                                                           \
    X(CHECKPOINT_NOT_FOUND) X(CHECKPOINT_OTHER_BRANCH) X(CHECKPOINT_ID_INVALID)                    \
    X(CHECKPOINT_KIND_INVALID) X(LEVEL_INVALID) X(PAGE_TOKEN_INVALID) X(PAGE_SIZE_INVALID)         \
    /* failures: tokens */                                                                         \
    X(TOKENS_EMPTY) X(TOKENS_MALFORMED) X(TOKEN_OUT_OF_VOCAB) X(PROMPT_TOO_LONG)                   \
    X(STABLE_TOKENS_INVALID) X(ANCHORS_INVALID) X(MAX_TOKENS_INVALID) X(SAMPLING_INVALID)          \
    X(STOP_TOKENS_INVALID) X(FROM_POSITION_INVALID) X(HEAD_EMPTY) X(HEAD_MOVED) X(CONTEXT_FULL)    \
    /* failures: room */                                                                           \
    X(HBM_FULL) X(SSD_FULL) X(SSD_READ_ONLY) X(SSD_SLOW) X(INDEX_FULL) X(QUEUE_FULL)               \
    X(SESSIONS_FULL) X(RESULT_UNKNOWN) X(PIN_LIMIT) X(PIN_INVALID) X(SUB_SESSIONS_FULL)            \
    /* failures: transport and identity */                                                         \
    X(MESSAGE_MALFORMED) X(MESSAGE_TOO_LARGE) X(TOKEN_MISSING) X(TOKEN_UNKNOWN) X(ROLE_DENIED)     \
    X(DEADLINE) X(CANCELLED) X(SHUTTING_DOWN) X(NOT_IMPLEMENTED) X(UNKNOWN_METHOD)                 \
    X(UNKNOWN_SERVICE) X(STARTING) X(SESSION_UNREADABLE)                                           \
    X(CLOCK_NOT_VIRTUAL) X(CLOCK_STEP_INVALID) X(MODEL_LOST) X(INTERNAL)                           \
    X(SCRUB_INVALID) X(USER_INVALID) X(USER_NOT_FOUND) X(ENCRYPTION_OFF) X(MASTER_KEY_INVALID)     \
    /* failures: why and quotas */                                                                 \
    X(POSITION_INVALID) X(MODEL_INVALID) X(MODEL_IN_USE)                                           \
    X(QUOTA_SESSIONS) X(QUOTA_BYTES_SSD) X(QUOTA_REQUESTS) X(QUOTA_TOKENS) X(QUOTA_SAVES)          \
    X(QUOTA_INVALID) X(QUOTAS_FULL) X(PLAN_INVALID) X(PLAN_NOT_FOUND) X(PLAN_IN_USE)
/* clang-format on */

enum kv_reason {
#define KV_REASON_ENUM(name) KV_REASON_##name,
    KV_REASONS(KV_REASON_ENUM)
#undef KV_REASON_ENUM
        KV_REASON_COUNT,
};

struct kv_reason_info {
    const char *name;   /* "SESSION_NOT_FOUND" */
    int grpc_code;      /* 0: an outcome, not a failure. */
    const char *cause;  /* One sentence. */
    const char *remedy; /* One sentence: what to do. */
};

/* Never NULL; asserts reason < KV_REASON_COUNT. */
const struct kv_reason_info *kv_reason_info(enum kv_reason reason);

/* false: no such name. */
bool kv_reason_find(const char *name, enum kv_reason *ret_reason);

/* "DEADLINE_EXCEEDED" for 4: the names of gRPC's status codes 0 to 16; "UNKNOWN" for any other. */
const char *kv_reason_code_name(int grpc_code);
