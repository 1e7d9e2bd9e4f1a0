#pragma once

/* Where log lines end: standard error, written whole by the log thread. */

#include <stdint.h>

/* A kv_log_write_fn; context is unused. */
void log_sink_write(void *context, const char *line, uint32_t bytes);
