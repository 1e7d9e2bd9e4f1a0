/*
 * Real and virtual time behind one struct.
 *
 * The virtual clock is one atomic number of elapsed ns added to where the real clocks stood at its
 * creation, so monotonic and wall time move together and never disagree by a rounding.  Monotonic
 * time is CLOCK_BOOTTIME: an age must go on while a machine sleeps, because a TTL does.
 */

#include "kvstore/base/clock.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct kv_clock {
    bool is_virtual;
    uint64_t mono_base_ns; /* Virtual only: both bases are fixed at creation. */
    uint64_t wall_base_ns;
    _Atomic uint64_t elapsed_ns; /* Virtual only: written by whoever advances. */
};

static uint64_t read_ns(clockid_t id)
{
    struct timespec now;
    const int rc = clock_gettime(id, &now);
    assert(rc == 0); /* Fails only for an id the kernel does not know. */
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Times have no sign, and 0 is none: a wall clock before 1970 counts as the first millisecond of
 * it, which is as wrong, and far behind. */
static uint64_t read_wall_ns(void)
{
    const uint64_t now_ns = read_ns(CLOCK_REALTIME);
    return (int64_t)now_ns <= 0 ? 1000000u : now_ns;
}

struct kv_clock *kv_clock_create_real(void)
{
    return calloc(1, sizeof(struct kv_clock));
}

struct kv_clock *kv_clock_create_virtual(void)
{
    struct kv_clock *clock = calloc(1, sizeof(*clock));
    if (clock == NULL) return NULL;
    clock->is_virtual = true;
    clock->mono_base_ns = read_ns(CLOCK_BOOTTIME);
    clock->wall_base_ns = read_wall_ns();
    return clock;
}

void kv_clock_destroy(struct kv_clock *clock)
{
    free(clock);
}

bool kv_clock_is_virtual(const struct kv_clock *clock)
{
    return clock->is_virtual;
}

uint64_t kv_clock_mono_ns(const struct kv_clock *clock)
{
    if (!clock->is_virtual) return read_ns(CLOCK_BOOTTIME);
    return clock->mono_base_ns + atomic_load(&clock->elapsed_ns);
}

uint64_t kv_clock_wall_ms(const struct kv_clock *clock)
{
    if (!clock->is_virtual) return read_wall_ns() / 1000000u;
    return (clock->wall_base_ns + atomic_load(&clock->elapsed_ns)) / 1000000u;
}

void kv_clock_advance(struct kv_clock *clock, uint64_t ns)
{
    assert(clock->is_virtual);
    atomic_fetch_add(&clock->elapsed_ns, ns);
}

uint64_t kv_clock_stopwatch_ns(void)
{
    return read_ns(CLOCK_MONOTONIC);
}
