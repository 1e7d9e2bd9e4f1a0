/*
 * A sample.
 */

#include "kvstore/store/store.h"

int kv_bad(int x)
{
    return x + 1;
}
