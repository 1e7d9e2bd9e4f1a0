/*
 * A sample.
 */

#include "kvstore/base/good.h"

int kv_choose(int x);

int kv_choose(int x)
{
    return x;
}
