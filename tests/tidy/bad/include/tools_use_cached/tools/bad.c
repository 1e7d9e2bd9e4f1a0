/*
 * A sample.
 */

#include "cached/config.h"

int kv_bad(int x)
{
    return x + 1;
}
