#pragma once

/* Bucket counts of the Engram tables (the model's specification, section 2.8, rule 3).  Pure; any
 * thread. */

#include <stdint.h>

/* Consecutive primes from `base` on, `columns` for each Engram layer in order: writes those of the
 * `index`-th layer.  base: 2 to 2^28, columns x (index + 1) below 2^16. */
void eng_engram_primes(uint32_t base, uint32_t columns, uint32_t index, uint32_t *ret_primes);
