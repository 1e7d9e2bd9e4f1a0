/*
 * The primes that size the Engram tables.
 *
 * The reference searches upwards from base - 1 anew for every order and skips what is used, which
 * gives consecutive primes over layers, orders and heads.  Miller and Rabin's test with the bases
 * 2, 3, 5, 7 is exact below 3,215,031,751; the largest candidate here is far below 2^29.
 */

#include "engine/model/primes.h"

#include <assert.h>
#include <stdbool.h>

static uint32_t power_mod(uint64_t base, uint32_t exponent, uint32_t modulus)
{
    uint64_t result = 1;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result = result * base % modulus;
        base = base * base % modulus;
    }
    return (uint32_t)result;
}

static bool is_prime(uint32_t n)
{
    static const uint32_t bases[] = {2, 3, 5, 7};
    uint32_t odd = n - 1, twos = 0;

    for (int i = 0; i < 4; i++)
        if (n % bases[i] == 0) return n == bases[i];
    if (n < 2) return false;
    for (; odd % 2 == 0; odd /= 2)
        twos++;
    for (int i = 0; i < 4; i++) {
        uint64_t x = power_mod(bases[i], odd, n);
        bool witness = x != 1 && x != n - 1;
        for (uint32_t k = 1; k < twos && witness; k++) {
            x = x * x % n;
            witness = x != n - 1;
        }
        if (witness) return false;
    }
    return true;
}

void eng_engram_primes(uint32_t base, uint32_t columns, uint32_t index, uint32_t *ret_primes)
{
    const uint32_t first = index * columns;
    uint32_t candidate = base;

    assert(base >= 2 && base <= 1u << 28 && first + columns < 1u << 16);
    for (uint32_t found = 0; found < first + columns; candidate++) {
        if (!is_prime(candidate)) continue;
        if (found >= first) ret_primes[found - first] = candidate;
        found++;
    }
}
