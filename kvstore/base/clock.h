#pragma once

/* All time passes through here.  CLOCK_REAL reads the kernel; CLOCK_VIRTUAL starts at the wall
 * time of its creation and moves only by kv_clock_advance(), for trace replay and tests.
 * Any thread may read; advance is called by one thread at a time. */

#include <stdbool.h>
#include <stdint.h>

struct kv_clock;

/* NULL when out of memory. */
struct kv_clock *kv_clock_create_real(void);
struct kv_clock *kv_clock_create_virtual(void);
void kv_clock_destroy(struct kv_clock *clock);

bool kv_clock_is_virtual(const struct kv_clock *clock);

/* Monotonic (boot) time in ns: timers, ages inside one run of the process. */
uint64_t kv_clock_mono_ns(const struct kv_clock *clock);

/* Wall time, ms since 1970: what is persisted (created, last used). */
uint64_t kv_clock_wall_ms(const struct kv_clock *clock);

/* Virtual clock only (asserted). */
void kv_clock_advance(struct kv_clock *clock, uint64_t ns);

/* The kernel's monotonic clock, ns, whatever clock is configured: for measuring durations only. */
uint64_t kv_clock_stopwatch_ns(void);
