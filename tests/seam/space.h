#pragma once

/*
 * Invariants of space, of a store in which nothing is in flight (I3 and I4):
 *   every recorded page has a place of its own, which is in use, and no other place is in use;
 *   what is charged to a user is what its sessions' records come to;
 *   pages free, used and closed are together all pages of the segment files.
 */

#include "tests/seam/world.h"

enum { SPACE_WHY_BYTES = 160 };

/* False, and a sentence: they do not hold.  may_leak: a failed record's pages may turn up at the
 * next start, and stay taken until then. */
bool space_is_even(struct world *world, bool may_leak, char why[SPACE_WHY_BYTES]);
