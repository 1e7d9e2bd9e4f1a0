/*
 * What a benchmark says on stderr while it runs, and when it is ended.
 *
 * Lines come from the loops that compute, between two passes or calls and outside of what is timed,
 * so that no thread and no timer runs beside a measurement.  The one thread there is sleeps until a
 * signal comes: a model being opened or a daemon's answer cannot be left at once, and Ctrl-C must
 * not look as if nothing had heard it.
 */

#include "tools/cachectl/bench_progress.h"

#include "kvstore/base/clock.h"
#include "tools/cachectl/spawn.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define SECOND_NS 1000000000u
#define TERMINAL_NS (2ull * SECOND_NS)
#define FILE_NS (10ull * SECOND_NS)
/* A minute, without a reserve for the pair that is under way and for what comes after it. */
#define QUICK_NS (50ull * SECOND_NS)
#define STOPPING_MS 200 /* An end that comes sooner needs no word. */

static void *watch(void *context)
{
    const struct bench_progress *progress = context;
    struct pollfd ends[] = {{.fd = progress->signal_fd, .events = POLLIN},
                            {.fd = progress->done_fd, .events = POLLIN}};
    int ready;

    do {
        ready = poll(ends, 2, -1);
    } while (ready < 0 && errno == EINTR);
    if (ready <= 0 || ends[1].revents != 0 || poll(&ends[1], 1, STOPPING_MS) != 0) return NULL;
    const char *name = sigabbrev_np(spawn_signal());
    (void)fprintf(stderr, "cachectl: SIG%s: stopping when the step under way is done\n",
                  name != NULL ? name : "?");
    return NULL;
}

/* Without it the benchmark runs all the same. */
static void start_watcher(struct bench_progress *progress)
{
    progress->signal_fd = spawn_signal_fd();
    progress->done_fd = eventfd(0, EFD_CLOEXEC);
    progress->watched = progress->signal_fd >= 0 && progress->done_fd >= 0 &&
                        pthread_create(&progress->watcher, NULL, watch, progress) == 0;
}

void bench_progress_stop(struct bench_progress *progress)
{
    if (progress->watched && eventfd_write(progress->done_fd, 1) == 0)
        (void)pthread_join(progress->watcher, NULL);
    if (progress->signal_fd >= 0) (void)close(progress->signal_fd);
    if (progress->done_fd >= 0) (void)close(progress->done_fd);
    progress->watched = false;
}

void bench_progress_start(struct bench_progress *progress, const struct ctl *ctl)
{
    spawn_hold_signals();
    *progress = (struct bench_progress){
        .ctl = ctl,
        .doing = "preparing",
        .began_ns = kv_clock_stopwatch_ns(),
        .every_ns = isatty(STDERR_FILENO) == 1 ? TERMINAL_NS : FILE_NS,
    };
    progress->said_ns = progress->began_ns;
    start_watcher(progress);
}

void bench_say(struct bench_progress *progress, const char *fmt, ...)
{
    char text[320];
    va_list list;

    va_start(list, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, list);
    va_end(list);
    ctl_say(progress->ctl, "%s", text);
    progress->said_ns = kv_clock_stopwatch_ns();
}

bool bench_go_on(struct bench_progress *progress)
{
    const uint64_t now = kv_clock_stopwatch_ns();

    if (spawn_interrupted()) return false;
    if (now - progress->said_ns >= progress->every_ns)
        bench_say(progress, "%s, %llu s since the start", progress->doing,
                  (unsigned long long)((now - progress->began_ns) / SECOND_NS));
    return true;
}

void bench_quick(struct bench_progress *progress, uint32_t lines)
{
    progress->until_ns = progress->began_ns + QUICK_NS;
    progress->lines_left = lines;
}

uint64_t bench_line_end(struct bench_progress *progress, uint64_t now)
{
    if (progress->until_ns == 0 || progress->lines_left == 0) return 0;
    const uint64_t left = progress->until_ns > now ? progress->until_ns - now : 0;
    return now + left / progress->lines_left--;
}

void bench_note(struct bench_progress *progress, uint32_t index, const char *fmt, ...)
{
    va_list list;

    assert(index <= progress->note_count && index < BENCH_NOTES_MAX);
    if (index == progress->note_count) progress->note_count++;
    va_start(list, fmt);
    (void)vsnprintf(progress->notes[index], sizeof(progress->notes[index]), fmt, list);
    va_end(list);
}

void bench_say_interrupted(const struct bench_progress *progress)
{
    const char *name = sigabbrev_np(spawn_signal());

    ctl_error("interrupted by SIG%s; %s", name != NULL ? name : "?",
              progress->note_count > 0 ? "measured so far:" : "nothing was measured");
    for (uint32_t i = 0; i < progress->note_count; i++)
        (void)fprintf(stderr, "  %s\n", progress->notes[i]);
}
