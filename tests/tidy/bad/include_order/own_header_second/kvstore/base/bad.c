/*
 * A sample.
 */

#include "kvstore/base/good.h"
#include "kvstore/base/bad.h"

int kv_bad(int x)
{
    return x + 1;
}
