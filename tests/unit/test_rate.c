/*
 * A rate lets through what it says, and no more over any stretch of time.
 *
 * Method: edges; then random takers, whose sum is compared with what time allows.
 */

#include "kvstore/base/rate.h"

#include "kvstore/base/bytes.h"
#include "tests/harness.h"

#define S 1000000000ull

static uint64_t seed = 11;

static uint64_t random64(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return seed ^ seed >> 29;
}

static uint32_t random_below(uint32_t limit)
{
    return (uint32_t)(random64() >> 33) % limit;
}

/* Over any stretch: at most what was saved up, one call of any size, and rate x time. */
static void test_rate(void)
{
    struct kv_rate rate = {0};
    uint64_t wait_ns = 0;
    for (uint32_t i = 0; i < 10; i++)
        EXPECT(kv_rate_take(&rate, 10, 1, S, &wait_ns));
    EXPECT(!kv_rate_take(&rate, 10, 1, S, &wait_ns));
    EXPECT(wait_ns > S / 10 - 1000 && wait_ns < S / 10 + 1000);
    EXPECT(!kv_rate_take(&rate, 10, 1, S + wait_ns / 2, &wait_ns));
    EXPECT(kv_rate_take(&rate, 10, 1, S + S / 10 + 2, &wait_ns));
    EXPECT(kv_rate_take(&rate, KV_RATE_UNLIMITED, UINT64_MAX, S, &wait_ns));
    EXPECT(kv_rate_take(&rate, 10, 0, S, &wait_ns));
    /* A call that is larger than a second's worth goes through and is paid off. */
    rate = (struct kv_rate){0};
    EXPECT(kv_rate_take(&rate, 100, 1000, S, &wait_ns));
    EXPECT(!kv_rate_take(&rate, 100, 1, 5 * S, &wait_ns));
    EXPECT(wait_ns > 5 * S && wait_ns < 5 * S + S / 50);
    EXPECT(kv_rate_take(&rate, 100, 1, 5 * S + wait_ns, &wait_ns));
    kv_rate_charge(&rate, 100, 500, 11 * S);
    EXPECT(!kv_rate_take(&rate, 100, 1, 12 * S, &wait_ns));
    /* A clock that stands still or goes back gives nothing. */
    rate = (struct kv_rate){0};
    EXPECT(kv_rate_take(&rate, 1, 1, 100 * S, &wait_ns));
    EXPECT(!kv_rate_take(&rate, 1, 1, 99 * S, &wait_ns));
    EXPECT(!kv_rate_take(&rate, 1, 1, 100 * S, &wait_ns));

    for (uint32_t round = 0; round < harness_count(200); round++) {
        const uint64_t per_s = 1 + random_below(1000);
        uint64_t now_ns = S, taken = 0, largest = 0;
        rate = (struct kv_rate){0};
        for (uint32_t i = 0; i < 500; i++) {
            const uint64_t amount = 1 + random_below(2 * (uint32_t)per_s);
            now_ns += random_below(200000000);
            wait_ns = 0;
            if (kv_rate_take(&rate, per_s, amount, now_ns, &wait_ns)) {
                taken += amount;
                largest = KV_MAX(largest, amount);
            } else {
                struct kv_rate later = rate;
                EXPECT(wait_ns > 0);
                EXPECT(kv_rate_take(&later, per_s, amount, now_ns + wait_ns, &wait_ns));
            }
            const double most = (double)per_s + (double)largest +
                                (double)per_s * (double)(now_ns - S) / (double)S + 1;
            EXPECT((double)taken <= most);
        }
    }
}

int main(void)
{
    test_rate();
    HARNESS_END();
}
