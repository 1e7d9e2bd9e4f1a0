/*
 * A sample.
 */

#include "kvstore/tier/tier.h"

int kv_bad(int x)
{
    return x + 1;
}
