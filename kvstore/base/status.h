#pragma once

#include <errno.h>
#include <stdbool.h>

#define KV_MUST_CHECK __attribute__((warn_unused_result))
#define KV_PRINTF(fmt_index, first_arg) __attribute__((format(printf, fmt_index, first_arg)))

/* The caller branches on the status; a person reads the error.  Each status therefore stands for
 * one thing a caller can do (plan around it, retry, refuse, give up), and not for one place in the
 * code where something went wrong. */
typedef enum kv_status {
    KV_OK = 0,
    KV_MISS,    /* Not here.  Normal: the caller plans around it. */
    KV_BUSY,    /* A bound was reached.  Retry later or shed; never wait here. */
    KV_CORRUPT, /* Bytes failed verification.  Handled as a miss, counted as a fault. */
    KV_INVALID, /* The peer or the operator gave us something we refuse. */
    KV_IO,      /* The device or the network failed. */
    KV_NOMEM,
    KV_CANCELLED, /* The caller went away or its deadline passed. */
    KV_SHUTDOWN,
    KV_STATUS_COUNT,
} kv_status;

/* One per request (or per start-up step), owned by whoever owns that request.  The function that
 * first sees the failure fills it in; callers above pass the status up untouched.  A NULL err is
 * allowed everywhere: the status is then all the caller gets. */
struct kv_error {
    kv_status status;
    int sys_errno;
    const char *file;
    int line;
    char text[240];
};

/* Lower-case name, never NULL; "unknown" outside the enum. */
const char *kv_status_name(kv_status status);

/* Fills *err (if not NULL) and returns status, so that `return KV_FAIL(...)` is one line.  With
 * KV_FAIL_ERRNO the text gets ": " and strerror(errno) appended. */
kv_status kv_fail(struct kv_error *err, kv_status status, int sys_errno, const char *file, int line,
                  const char *fmt, ...) KV_PRINTF(6, 7);

#define KV_FAIL(err, status, ...) kv_fail((err), (status), 0, __FILE__, __LINE__, __VA_ARGS__)
#define KV_FAIL_ERRNO(err, status, ...)                                                            \
    kv_fail((err), (status), errno, __FILE__, __LINE__, __VA_ARGS__)
