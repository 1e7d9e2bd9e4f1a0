/*
 * Standard error as the log.
 *
 * One write a line, so that lines of several processes on one pipe or journal do not mix.  If the
 * descriptor fails for good there is nobody left to tell: the line is lost, the daemon goes on.
 */

#include "cached/obs/log_sink.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

void log_sink_write(void *context, const char *line, uint32_t bytes)
{
    (void)context;
    while (bytes > 0) {
        const ssize_t wrote = write(STDERR_FILENO, line, bytes);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return;
        line += wrote;
        bytes -= (uint32_t)wrote;
    }
}

void log_sink_try(const char *line, uint32_t bytes)
{
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    /* A pipe that is writable takes PIPE_BUF bytes, 4 KiB, at once. */
    if (poll(&out, 1, 0) == 1 && (out.revents & POLLOUT) != 0) log_sink_write(NULL, line, bytes);
}
