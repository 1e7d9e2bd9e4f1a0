/*
 * A sample.
 */

#include "kvstore/index/manifest.h"

int kv_bad(int x)
{
    return x + 1;
}
