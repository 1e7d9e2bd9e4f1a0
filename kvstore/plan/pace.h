#pragma once

/*
 * Pace of work in the background: so many bytes a second, in small even steps.
 *
 * Every unit is given a time at which it may start; a pace that falls behind may catch up by a
 * little, so a loop that looks once a millisecond keeps the rate, and one that slept for a second
 * does not make up for it in one go.
 *
 * Pure: the caller passes the time.  Owned by: whoever owns the work.
 */

#include <stdbool.h>
#include <stdint.h>

#define KV_PACE_CATCH_UP_NS 20000000u
/* Work in the background beside work that somebody waits for. */
#define KV_PACE_DEPTH_BUSY 2u

struct kv_pace {
    uint64_t rate_bytes; /* A second; at least 1. */
    uint64_t next_ns;    /* The next unit may start then. */
};

/* True: a unit of `bytes` starts now. */
bool kv_pace_take(struct kv_pace *pace, uint64_t now_ns, uint32_t bytes);
/* Nanoseconds until take can say yes; 0: now. */
uint64_t kv_pace_wait_ns(const struct kv_pace *pace, uint64_t now_ns);

/* How many units may be in flight: depth_max, or few while `others` are. */
uint32_t kv_pace_depth(uint32_t depth_max, uint32_t others);
