/*
 * A sample.
 */

#include "kvstore/tier/tier_ssd.h"

int kv_bad(int x)
{
    return x + 1;
}
