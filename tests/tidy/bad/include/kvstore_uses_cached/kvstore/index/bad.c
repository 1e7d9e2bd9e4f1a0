/*
 * A sample.
 */

#include "cached/request.h"

int kv_bad(int x)
{
    return x + 1;
}
