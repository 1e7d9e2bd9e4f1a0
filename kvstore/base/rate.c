/*
 * A bucket that fills with time.  Fractions are kept, so that a slow rate is exact over hours; the
 * sum of many of them is off by less than a millionth.
 */

#include "kvstore/base/rate.h"

#include "kvstore/base/bytes.h"

#define NS_PER_S 1000000000ull

static void refill(struct kv_rate *rate, uint64_t per_s, uint64_t now_ns)
{
    const double full = (double)per_s;
    if (!rate->begun) {
        *rate = (struct kv_rate){.balance = full, .at_ns = now_ns, .begun = true};
        return;
    }
    if (now_ns > rate->at_ns) {
        rate->balance += full * ((double)(now_ns - rate->at_ns) / (double)NS_PER_S);
        rate->at_ns = now_ns;
    }
    rate->balance = KV_MIN(rate->balance, full);
}

bool kv_rate_take(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns,
                  uint64_t *ret_wait_ns)
{
    if (per_s == KV_RATE_UNLIMITED || amount == 0) return true;
    refill(rate, per_s, now_ns);
    /* More than a second's worth is let through by a full bucket, and paid off afterwards. */
    const double need = KV_MIN((double)amount, (double)per_s);
    if (rate->balance + 1e-6 >= need) { /* Sums of fractions. */
        rate->balance -= (double)amount;
        return true;
    }
    *ret_wait_ns = (uint64_t)((need - rate->balance) / (double)per_s * (double)NS_PER_S) + 1;
    return false;
}

void kv_rate_charge(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns)
{
    if (per_s == KV_RATE_UNLIMITED) return;
    refill(rate, per_s, now_ns);
    rate->balance -= (double)amount;
}
