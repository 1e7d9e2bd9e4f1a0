/* When free places on SSD are written over that still hold what was stored in them. */

#include "kvstore/plan/erase.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

#define PASS_PARTS 7u /* Of PARTS. */
#define PARTS 16u

/* Until the next step, when all of them take as much as this one. */
static uint64_t pause_ns(const struct kv_erase *erase, uint64_t now_ns, uint32_t step,
                         uint32_t left)
{
    const uint64_t rest_ns = erase->end_ns > now_ns ? erase->end_ns - now_ns : 0;
    return left <= step ? rest_ns : rest_ns / left * step;
}

bool kv_erase_due(struct kv_erase *erase, uint64_t now_ns, uint32_t left, uint32_t most)
{
    assert(most > 0);
    if (erase->within_ns == 0) return false;
    if (left == 0) {
        kv_erase_pass_over(erase);
        return false;
    }
    if (erase->end_ns == 0) {
        erase->end_ns = now_ns + KV_MAX(erase->within_ns / PARTS * PASS_PARTS, 1u);
        erase->next_ns = now_ns + pause_ns(erase, now_ns, most, left);
    }
    return now_ns >= erase->next_ns;
}

void kv_erase_took(struct kv_erase *erase, uint64_t now_ns, uint32_t count, uint32_t left)
{
    assert(count > 0);
    erase->next_ns = now_ns + pause_ns(erase, now_ns, count, KV_MAX(left, 1u));
}

void kv_erase_pass_over(struct kv_erase *erase)
{
    erase->end_ns = erase->next_ns = 0;
}
