/*
 * A sample.
 */

#include "kvstore/format/page.h"

int kv_bad(int x)
{
    return x + 1;
}
