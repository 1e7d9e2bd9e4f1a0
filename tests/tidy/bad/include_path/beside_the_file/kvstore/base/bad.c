/*
 * A sample.
 */

#include "good.h"

int kv_bad(int x)
{
    return x + 1;
}
