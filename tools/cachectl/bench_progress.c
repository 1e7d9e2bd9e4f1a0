/*
 * What a benchmark says on stderr while it runs, and when it is ended.
 *
 * Lines come from the loops that compute, between two passes or calls and outside of what is timed,
 * so that no thread and no timer runs beside a measurement.
 */

#include "tools/cachectl/bench_progress.h"

#include "kvstore/base/clock.h"
#include "tools/cachectl/spawn.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SECOND_NS 1000000000u
#define TERMINAL_NS (2ull * SECOND_NS)
#define FILE_NS (10ull * SECOND_NS)

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
