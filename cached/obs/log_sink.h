#pragma once

/* Where log lines end: standard error, written whole by the log thread. */

#include <stdint.h>

/* A kv_log_write_fn; context is unused. */
void log_sink_write(void *context, const char *line, uint32_t bytes);

/* Any thread: the same, if it would not wait; else the line is lost.  At most 4 KiB. */
void log_sink_try(const char *line, uint32_t bytes);
