/*
 * Log lines through a bounded queue to one thread.
 *
 * A line is complete before the lock is taken, so the lock is held for one copy of at most 1 KiB
 * and no caller ever waits for the disk or terminal behind write_fn.  A full queue drops the new
 * line: a shard must not stand still because somebody's stderr does.  What was dropped is counted,
 * and the thread says so in a line of its own once there is room again.
 *
 * Nor does the end of the process wait for it: what nobody takes in KV_LOG_DRAIN_MS is lost.
 *
 * Control characters become '?', so that no name or error text can forge a second line.
 */

#include "kvstore/base/log.h"

#include "kvstore/base/limits.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct line {
    uint32_t bytes;
    char text[KV_LOG_LINE_MAX];
};

struct kv_log {
    enum kv_log_level level;
    kv_log_write_fn *write_fn;
    void *context;
    struct kv_thread thread;
    _Atomic uint64_t dropped; /* Written by senders, under the lock. */

    pthread_mutex_t lock; /* Guards what follows. */
    pthread_cond_t wake;
    struct line *lines;
    uint32_t line_max;
    uint32_t first;
    uint32_t count;
    bool stop;
};

static const char *level_name(enum kv_log_level level)
{
    switch (level) {
    case KV_LOG_DEBUG:
        return "debug";
    case KV_LOG_INFO:
        return "info";
    case KV_LOG_WARN:
        return "warn";
    case KV_LOG_ERROR:
        break;
    }
    return "error";
}

static uint32_t clip(int printed, uint32_t room)
{
    if (printed < 0) return 0;
    return (uint32_t)printed < room ? (uint32_t)printed : room - 1;
}

static uint32_t line_begin(struct line *line, enum kv_log_level level, const char *event)
{
    struct timespec now;
    struct tm parts;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)gmtime_r(&now.tv_sec, &parts);
    const int printed = snprintf(
        line->text, sizeof(line->text), "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ level=%s event=%s",
        parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min,
        parts.tm_sec, (int)(now.tv_nsec / 1000000), level_name(level), event);
    return clip(printed, sizeof(line->text));
}

static void line_end(struct line *line, uint32_t used)
{
    /* A line that was cut says so at its end. */
    if (used >= sizeof(line->text) - 1) {
        used = sizeof(line->text) - 1;
        memcpy(line->text + used - 3, "...", 3);
    }
    for (uint32_t i = 0; i < used; i++) {
        const unsigned char c = (unsigned char)line->text[i];
        if (c < 0x20 || c == 0x7f) line->text[i] = '?';
    }
    line->text[used] = '\n';
    line->bytes = used + 1;
}

static void enqueue(struct kv_log *log, const struct line *line)
{
    (void)pthread_mutex_lock(&log->lock);
    if (log->count == log->line_max) {
        atomic_fetch_add(&log->dropped, 1);
    } else {
        struct line *slot = &log->lines[(log->first + log->count) % log->line_max];
        slot->bytes = line->bytes;
        memcpy(slot->text, line->text, line->bytes);
        if (log->count++ == 0) (void)pthread_cond_signal(&log->wake);
    }
    (void)pthread_mutex_unlock(&log->lock);
}

bool kv_log_wants(const struct kv_log *log, enum kv_log_level level)
{
    return log != NULL && level >= log->level;
}

void kv_log(struct kv_log *log, enum kv_log_level level, const char *event, const char *fmt, ...)
{
    if (log == NULL || level < log->level) return;

    struct line line;
    uint32_t used = line_begin(&line, level, event);
    if (fmt[0] != '\0' && used < sizeof(line.text) - 1) {
        line.text[used++] = ' ';
        const uint32_t room = (uint32_t)sizeof(line.text) - used;
        va_list args;
        va_start(args, fmt);
        used += clip(vsnprintf(line.text + used, room, fmt, args), room);
        va_end(args);
    }
    line_end(&line, used);
    enqueue(log, &line);
}

static void report_dropped(struct kv_log *log, uint64_t count)
{
    struct line line;
    uint32_t used = line_begin(&line, KV_LOG_WARN, "log_dropped");
    const uint32_t room = (uint32_t)sizeof(line.text) - used;
    used += clip(snprintf(line.text + used, room, " count=%" PRIu64, count), room);
    line_end(&line, used);
    log->write_fn(log->context, line.text, line.bytes);
}

static void log_main(void *arg)
{
    struct kv_log *log = arg;
    struct line line;
    uint64_t reported = 0;

    (void)pthread_mutex_lock(&log->lock);
    for (;;) {
        while (log->count == 0 && !log->stop)
            (void)pthread_cond_wait(&log->wake, &log->lock);
        if (log->count == 0) break;

        const struct line *slot = &log->lines[log->first];
        line.bytes = slot->bytes;
        memcpy(line.text, slot->text, slot->bytes);
        log->first = (log->first + 1) % log->line_max;
        log->count--;
        /* Reported when the backlog is gone: one line for one burst. */
        const uint64_t dropped = log->count == 0 ? atomic_load(&log->dropped) : reported;
        (void)pthread_mutex_unlock(&log->lock);

        log->write_fn(log->context, line.text, line.bytes);
        if (dropped > reported) report_dropped(log, dropped - reported);
        reported = dropped;
        (void)pthread_mutex_lock(&log->lock);
    }
    (void)pthread_mutex_unlock(&log->lock);
}

kv_status kv_log_create(enum kv_log_level level, uint32_t queue_lines, kv_log_write_fn *write_fn,
                        void *context, struct kv_log **ret_log, struct kv_error *err)
{
    assert(queue_lines > 0);
    assert(write_fn != NULL);

    struct kv_log *log = calloc(1, sizeof(*log));
    if (log == NULL) return KV_FAIL(err, KV_NOMEM, "create the log");
    log->level = level;
    log->write_fn = write_fn;
    log->context = context;
    log->line_max = queue_lines;
    (void)pthread_mutex_init(&log->lock, NULL); /* Neither fails with default attributes. */
    (void)pthread_cond_init(&log->wake, NULL);

    kv_status status;
    log->lines = calloc(queue_lines, sizeof(*log->lines));
    if (log->lines == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "create a log queue of %" PRIu32 " lines", queue_lines);
        goto fail;
    }
    status = kv_thread_start(&log->thread, KV_THREAD_LOG, "kv-log", log_main, log, err);
    if (status != KV_OK) goto fail;
    *ret_log = log;
    return KV_OK;

fail:
    kv_log_destroy(log);
    return status;
}

void kv_log_destroy(struct kv_log *log)
{
    if (log == NULL) return;
    (void)pthread_mutex_lock(&log->lock);
    log->stop = true;
    (void)pthread_cond_signal(&log->wake);
    (void)pthread_mutex_unlock(&log->lock);
    if (!kv_thread_join_within(&log->thread, KV_LOG_DRAIN_MS)) return;
    (void)pthread_cond_destroy(&log->wake);
    (void)pthread_mutex_destroy(&log->lock);
    free(log->lines);
    free(log);
}

uint64_t kv_log_dropped(const struct kv_log *log)
{
    return atomic_load(&log->dropped);
}
