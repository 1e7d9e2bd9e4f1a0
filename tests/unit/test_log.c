/*
 * Structured log lines.
 *
 * Goal: the format of a line, levels, no forged lines, cut lines, drops that are counted and told,
 * and that destroy writes out what is queued, within a bound.
 * Method: a sink that keeps what it gets and can be made to stand still, so that the queue fills.
 */

#include "kvstore/base/log.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/thread.h"
#include "tests/harness.h"

#include <time.h>
#include <unistd.h>

#define TEXT_BYTES_MAX (1u << 20)
#define SENDERS 4u

struct sink {
    char text[TEXT_BYTES_MAX];
    uint32_t bytes;
    uint32_t lines;
    pthread_mutex_t gate; /* Held by a test: the sink stands still. */
};

static struct sink *sink_create(void)
{
    struct sink *sink = calloc(1, sizeof(*sink));
    EXPECT(sink != NULL);
    (void)pthread_mutex_init(&sink->gate, NULL);
    return sink;
}

static void sink_write(void *context, const char *line, uint32_t bytes)
{
    struct sink *sink = context;
    EXPECT(line[bytes - 1] == '\n');
    EXPECT(memchr(line, '\n', bytes) == line + bytes - 1);
    EXPECT(bytes <= KV_LOG_LINE_MAX);
    EXPECT(sink->bytes + bytes < TEXT_BYTES_MAX);
    (void)pthread_mutex_lock(&sink->gate);
    memcpy(sink->text + sink->bytes, line, bytes);
    sink->bytes += bytes;
    sink->lines++;
    (void)pthread_mutex_unlock(&sink->gate);
}

static void test_format(void)
{
    struct sink *sink = sink_create();
    struct kv_log *log = NULL;
    EXPECT(kv_log_create(KV_LOG_INFO, 16, sink_write, sink, &log, NULL) == KV_OK);
    kv_log(NULL, KV_LOG_ERROR, "nobody", "hears=%d", 1);
    kv_log(log, KV_LOG_DEBUG, "quiet", "x=1");
    kv_log(log, KV_LOG_INFO, "resume", "session=%s plan=%s", "s1", "exact");
    kv_log(log, KV_LOG_ERROR, "bare", "%s", "");
    kv_log(log, KV_LOG_WARN, "forged", "name=%s", "a\n2026-01-01 level=info\tb\x7f");
    kv_log_destroy(log);

    /* 2026-11-29T18:40:00.123Z level=info event=resume ... */
    const char *shape = "dddd-dd-ddTdd:dd:dd.dddZ ";
    for (size_t i = 0; i < strlen(shape); i++) {
        const char c = sink->text[i];
        EXPECT(shape[i] == 'd' ? c >= '0' && c <= '9' : c == shape[i]);
    }
    EXPECT_EQ_U32(sink->lines, 3);
    EXPECT(strstr(sink->text, "Z level=info event=resume session=s1 plan=exact\n") != NULL);
    EXPECT(strstr(sink->text, " level=error event=bare") != NULL);
    EXPECT(strstr(sink->text, " level=warn event=forged name=a?2026-01-01 level=info?b?\n") !=
           NULL);
    EXPECT(strstr(sink->text, "quiet") == NULL);
    free(sink);
}

static void test_long_line(void)
{
    struct sink *sink = sink_create();
    struct kv_log *log = NULL;
    char value[3 * KV_LOG_LINE_MAX];
    memset(value, 'v', sizeof(value) - 1);
    value[sizeof(value) - 1] = '\0';
    EXPECT(kv_log_create(KV_LOG_DEBUG, 4, sink_write, sink, &log, NULL) == KV_OK);
    kv_log(log, KV_LOG_INFO, "long", "v=%s", value);
    kv_log(log, KV_LOG_INFO, value, "v=%s", "1");
    kv_log_destroy(log);
    EXPECT_EQ_U32(sink->lines, 2);
    EXPECT_EQ_U32(sink->bytes, 2 * KV_LOG_LINE_MAX);
    EXPECT_EQ_STR(sink->text + sink->bytes - 5, "v...\n");
    free(sink);
}

static void test_full_queue(void)
{
    struct sink *sink = sink_create();
    struct kv_log *log = NULL;
    EXPECT(kv_log_create(KV_LOG_INFO, 8, sink_write, sink, &log, NULL) == KV_OK);
    (void)pthread_mutex_lock(&sink->gate);
    for (int i = 0; i < 100; i++)
        kv_log(log, KV_LOG_INFO, "burst", "i=%d", i);
    /* 8 in the queue, at most one in the sink's hands. */
    const uint64_t dropped = kv_log_dropped(log);
    EXPECT(dropped == 91 || dropped == 92);
    (void)pthread_mutex_unlock(&sink->gate);
    kv_log_destroy(log);
    EXPECT_EQ_U64(sink->lines, 100 - dropped + 1);
    char want[64];
    (void)snprintf(want, sizeof(want), " level=warn event=log_dropped count=%u\n",
                   (unsigned)dropped);
    EXPECT(strstr(sink->text, want) != NULL);
    EXPECT(strstr(sink->text, "event=burst i=0\n") != NULL); /* The oldest are kept. */
    free(sink);
}

struct sender {
    struct kv_thread thread;
    struct kv_log *log;
    uint64_t lines;
};

static void sender_main(void *arg)
{
    const struct sender *sender = arg;
    for (uint64_t i = 0; i < sender->lines; i++)
        kv_log(sender->log, KV_LOG_INFO, "line", "i=%u", (unsigned)i);
}

static void test_many_senders(void)
{
    struct sink *sink = sink_create();
    struct sender senders[SENDERS];
    struct kv_log *log = NULL;
    const uint64_t lines = harness_count(2000);
    EXPECT(kv_log_create(KV_LOG_INFO, 64, sink_write, sink, &log, NULL) == KV_OK);
    for (uint32_t i = 0; i < SENDERS; i++) {
        senders[i] = (struct sender){.log = log, .lines = lines};
        EXPECT(kv_thread_start(&senders[i].thread, KV_THREAD_ANY, "sender", sender_main,
                               &senders[i], NULL) == KV_OK);
    }
    for (uint32_t i = 0; i < SENDERS; i++)
        kv_thread_join(&senders[i].thread);
    const uint64_t dropped = kv_log_dropped(log);
    kv_log_destroy(log);
    /* Every line is there or counted; the reports of drops add lines of their own. */
    uint64_t written = 0;
    uint64_t told = 0;
    for (const char *line = sink->text; *line != '\0'; line = strchr(line, '\n') + 1) {
        const char *count = strstr(line, "event=log_dropped count=");
        if (count != NULL && count < strchr(line, '\n')) {
            told += strtoull(count + strlen("event=log_dropped count="), NULL, 10);
        } else {
            written++;
        }
    }
    EXPECT_EQ_U64(written + dropped, SENDERS * lines);
    EXPECT_EQ_U64(told, dropped);
    free(sink);
}

/* A sink that does not come back: destroying has a bound, and takes nothing from under it. */
static void test_stuck_sink(void)
{
    static struct sink *sink; /* Both outlive the test, as in a process that ends. */
    static struct kv_log *log;
    sink = sink_create();
    EXPECT(kv_log_create(KV_LOG_INFO, 8, sink_write, sink, &log, NULL) == KV_OK);
    (void)pthread_mutex_lock(&sink->gate);
    kv_log(log, KV_LOG_INFO, "stuck", "i=%d", 1);
    kv_log(log, KV_LOG_INFO, "stuck", "i=%d", 2);
    struct timespec before;
    struct timespec after;
    (void)clock_gettime(CLOCK_MONOTONIC, &before);
    kv_log_destroy(log);
    (void)clock_gettime(CLOCK_MONOTONIC, &after);
    const int64_t ms = (after.tv_sec - before.tv_sec) * 1000 +
                       (after.tv_nsec - before.tv_nsec) / 1000000;
    EXPECT(ms >= (int)KV_LOG_DRAIN_MS - 1 && ms < (int)KV_LOG_DRAIN_MS + 5000);
    EXPECT_EQ_U32(sink->lines, 0);
    (void)pthread_mutex_unlock(&sink->gate);

    uint32_t lines = 0;
    for (int i = 0; i < 1000 && lines < 2; i++) {
        (void)usleep(10000);
        (void)pthread_mutex_lock(&sink->gate);
        lines = sink->lines;
        (void)pthread_mutex_unlock(&sink->gate);
    }
    EXPECT_EQ_U32(lines, 2); /* The thread was left whole. */
}

int main(void)
{
    test_format();
    test_long_line();
    test_full_queue();
    test_many_senders();
    test_stuck_sink();
    kv_log_destroy(NULL);
    HARNESS_END();
}
