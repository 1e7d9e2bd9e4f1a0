#pragma once

/* What a daemon that was never killed says: the CRC of the logits after any tokens, computed by the
 * same engine in this process, with nothing ever stored.  One per thread. */

#include <stdint.h>

struct cr_oracle;

struct cr_oracle *cr_oracle_create(uint32_t spare_tokens);
void cr_oracle_destroy(struct cr_oracle *oracle); /* NULL is fine. */

uint32_t cr_oracle_vocab(const struct cr_oracle *oracle);

/* ret_crcs[i]: of the logits after ids[0, from + i), for from + i = from .. count; from > 0. */
void cr_oracle_crcs(struct cr_oracle *oracle, const uint32_t *ids, uint32_t from, uint32_t count,
                    uint32_t *ret_crcs);
