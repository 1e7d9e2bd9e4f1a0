#pragma once

/*
 * A rate: so much a second.  A second's worth can be saved up, and one taker may take more than
 * that at once: then it is paid off before anybody takes again.  Pure; any thread that owns it.
 */

#include <stdbool.h>
#include <stdint.h>

#define KV_RATE_UNLIMITED UINT64_MAX

/* Starts as zeros. */
struct kv_rate {
    double balance;
    uint64_t at_ns;
    bool begun;
};

/* True: taken.  False: *ret_wait_ns says when to ask again; nothing was taken. */
bool kv_rate_take(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns,
                  uint64_t *ret_wait_ns);
/* Taken after the fact, also into debt: work whose amount nobody knew before. */
void kv_rate_charge(struct kv_rate *rate, uint64_t per_s, uint64_t amount, uint64_t now_ns);
