#pragma once

/*
 * When free places on SSD are written over that still hold what was stored in them.
 *
 * All of them within a time that the operator states, and no sooner than that needs: most places
 * are given out again before their time comes, and are then not written twice.  A pass goes through
 * the places once and takes 7/16 of that time; what becomes free behind it waits for the next one,
 * and two passes leave an eighth for writing.  A pass is cut into steps of equal distance, as far
 * as one can know.
 *
 * Pure: no I/O, no clock, no allocation, any thread.
 */

#include <stdbool.h>
#include <stdint.h>

struct kv_erase {
    uint64_t within_ns;       /* The time stated; 0: nothing is written over. */
    uint64_t end_ns, next_ns; /* Of the pass that runs, and its next step; 0, 0: none runs. */
};

/* True: a step is due, which kv_erase_took() is told of.  `left`: places to be written over; a pass
 * begins when there are some.  `most`: of one step. */
bool kv_erase_due(struct kv_erase *erase, uint64_t now_ns, uint32_t left, uint32_t most);

/* `count` places are written over now, `left` remain. */
void kv_erase_took(struct kv_erase *erase, uint64_t now_ns, uint32_t count, uint32_t left);

/* It went through all of them. */
void kv_erase_pass_over(struct kv_erase *erase);
