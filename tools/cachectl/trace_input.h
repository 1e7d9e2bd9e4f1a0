#pragma once

/* Lines of a text file that may be compressed with zstd or gzip.  The kind is told from the first
 * bytes, never from the name.  Owned by: the thread that opened it. */

#include "kvstore/base/status.h"

#include <stddef.h>
#include <stdint.h>

/* A session of 4 MiB compressed is a line of about 4 MB; this bound only stops a runaway. */
#define TRACE_LINE_BYTES_MAX (256u << 20)

struct trace_input;

KV_MUST_CHECK kv_status trace_input_open(const char *path, struct trace_input **ret_input,
                                         struct kv_error *err);
void trace_input_close(struct trace_input *input);

/* The next line without its newline, ended by a zero byte and valid until the next call.  KV_MISS
 * at the end of the file, KV_CORRUPT when a compressed stream is damaged or cut off. */
KV_MUST_CHECK kv_status trace_input_line(struct trace_input *input, const char **ret_text,
                                         size_t *ret_bytes, struct kv_error *err);

/* Number of the line returned last, from 1. */
uint64_t trace_input_line_number(const struct trace_input *input);

/* Part of the file read so far, 0 to 100. */
unsigned trace_input_percent(const struct trace_input *input);

/* Fills *err with "PATH:LINE: text". */
kv_status trace_input_fail(const struct trace_input *input, kv_status status, struct kv_error *err,
                           const char *fmt, ...) KV_PRINTF(4, 5);
