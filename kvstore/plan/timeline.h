#pragma once

/*
 * The time that ages of rows are counted by.
 *
 * Last uses are kept as wall time, and a wall clock can be wrong: no battery, a slip of a finger, a
 * virtual machine that stood still.  So the store has a time of its own.  It follows the wall clock
 * as long as that moves as the time since boot does, within KV_TIMELINE_TOLERANCE_MS; otherwise it
 * goes on by the time since boot, and a jump makes nothing older or younger.  A wall clock that
 * stays where it jumped to for KV_TIMELINE_GRACE_MS is believed: rows used before count as used at
 * that moment (floor_ms, which the owner keeps durably), because how old they are is not known.
 *
 * Over a restart only what was recorded can be compared.  A wall clock before the last use on
 * record, or more than KV_TIMELINE_GAP_MS behind it, counts as one that jumped from there: a
 * directory whose every row would be too old is more likely under a wrong clock.
 *
 * Pure; times are handed in.  One owner at a time.
 */

#include <stdbool.h>
#include <stdint.h>

#define KV_TIMELINE_TOLERANCE_MS (5ull * 60 * 1000)
#define KV_TIMELINE_GRACE_MS (60ull * 60 * 1000)
/* Uses of before a jump back that was believed: at most so long before it, as sessions are kept. */
#define KV_TIMELINE_ERA_MS (61ull * 24 * 3600 * 1000)
#define KV_TIMELINE_GAP_MS (30ull * 24 * 3600 * 1000) /* The longest life rows can have. */

struct kv_timeline {
    uint64_t now_ms;    /* At mono_ns. */
    uint64_t mono_ns;   /* Since boot. */
    uint64_t begun_ms;  /* now_ms of the start, or when a jump was believed. */
    uint64_t floor_ms;  /* Nothing counts as used before; 0: no jump was ever believed. */
    uint64_t before_ms; /* now_ms before it was. */
    uint64_t last_ms;   /* Last use seen on record. */
    int64_t off_ms;     /* How far the wall clock is ahead; 0: it is followed. */
    uint64_t jumped_ns;
    uint64_t jumps;
};

enum kv_timeline_event {
    KV_TIMELINE_NONE,
    KV_TIMELINE_JUMPED,   /* Away, or further. */
    KV_TIMELINE_BACK,     /* It agrees again. */
    KV_TIMELINE_BELIEVED, /* floor_ms and before_ms are to be kept. */
};

/* floor_ms, before_ms: as kept by an earlier run; 0: none were. */
void kv_timeline_begin(struct kv_timeline *line, uint64_t wall_ms, uint64_t mono_ns,
                       uint64_t floor_ms, uint64_t before_ms);
/* Between begin and judge: each last use on record. */
void kv_timeline_saw(struct kv_timeline *line, uint64_t used_ms);
/* Compares the wall clock of begin with what was seen: NONE or JUMPED. */
enum kv_timeline_event kv_timeline_judge(struct kv_timeline *line);

/* Looks at both clocks; as often as one likes, at least every few seconds. */
enum kv_timeline_event kv_timeline_look(struct kv_timeline *line, uint64_t wall_ms,
                                        uint64_t mono_ns);

uint64_t kv_timeline_now_ms(const struct kv_timeline *line, uint64_t mono_ns);

/* What a last use on record counts as.  One that lies in the future was written under a clock that
 * was wrong, and counts as of this run's begin. */
uint64_t kv_timeline_used_ms(const struct kv_timeline *line, uint64_t used_ms);
