#pragma once

/* Structured log lines: `event key=value ...`.  A line is built on the caller's stack and handed to
 * the sink given at start (the log thread's queue in the daemon, stderr in tools).  No token text,
 * ever.  Any thread.  A full queue drops the line and counts it. */

#include "kvstore/base/status.h"

#include <stdint.h>

enum kv_log_level { KV_LOG_DEBUG, KV_LOG_INFO, KV_LOG_WARN, KV_LOG_ERROR };

struct kv_log; /* The sink. */

/* Lines below `level` are dropped here. NULL log: nothing is written. */
void kv_log(struct kv_log *log, enum kv_log_level level, const char *event, const char *fmt, ...)
    KV_PRINTF(4, 5);

/* Creates a sink that hands complete lines (with newline, "TIME level=L event=E ..." ) to write_fn
 * on the log thread this starts.  `queue_lines` bounds the queue. */
typedef void kv_log_write_fn(void *context, const char *line, uint32_t bytes);
kv_status kv_log_create(enum kv_log_level level, uint32_t queue_lines, kv_log_write_fn *write_fn,
                        void *context, struct kv_log **ret_log, struct kv_error *err) KV_MUST_CHECK;

/* Writes out what is queued, stops the thread.  Where write_fn hangs, it and the log are left as
 * they are after KV_LOG_DRAIN_MS, for the process that ends. */
void kv_log_destroy(struct kv_log *log);

/* Whether a line of that level would be written: to save making its fields. */
bool kv_log_wants(const struct kv_log *log, enum kv_log_level level);

/* Lines dropped because the queue was full. */
uint64_t kv_log_dropped(const struct kv_log *log);
