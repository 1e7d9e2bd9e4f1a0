/*
 * A sample.
 */

#include "proto/session.pb-c.h"

int kv_bad(int x)
{
    return x + 1;
}
