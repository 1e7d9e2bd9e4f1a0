/*
 * Names of statuses, and the one place that fills a struct kv_error.
 *
 * An error is written once, where the failure is first seen, and never allocates: it has to work
 * when memory is what ran out.  A text that does not fit is cut; the errno's words are kept whole
 * by cutting the sentence before them, because they are what tells two failures of one call apart.
 */

#include "kvstore/base/status.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *kv_status_name(kv_status status)
{
    switch (status) {
    case KV_OK:
        return "ok";
    case KV_MISS:
        return "miss";
    case KV_BUSY:
        return "busy";
    case KV_CORRUPT:
        return "corrupt";
    case KV_INVALID:
        return "invalid";
    case KV_IO:
        return "io";
    case KV_NOMEM:
        return "nomem";
    case KV_CANCELLED:
        return "cancelled";
    case KV_SHUTDOWN:
        return "shutdown";
    case KV_STATUS_COUNT:
        break;
    }
    return "unknown";
}

static void append_errno(char *text, size_t room, int sys_errno)
{
    char buf[96];
    const char *words = strerror_r(sys_errno, buf, sizeof(buf)); /* The GNU form: thread-safe. */
    const size_t tail = strlen(words) + 2;
    if (tail >= room) return;
    size_t used = strlen(text);
    if (used + tail >= room) used = room - tail - 1;
    (void)snprintf(text + used, room - used, ": %s", words);
}

kv_status kv_fail(struct kv_error *err, kv_status status, int sys_errno, const char *file, int line,
                  const char *fmt, ...)
{
    assert(status != KV_OK);
    assert(fmt != NULL);
    if (err == NULL) return status;

    err->status = status;
    err->sys_errno = sys_errno;
    err->file = file;
    err->line = line;

    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(err->text, sizeof(err->text), fmt, args);
    va_end(args);
    if (sys_errno != 0) append_errno(err->text, sizeof(err->text), sys_errno);
    return status;
}
