/*
 * A sample.
 */

#include "session.pb-c.h"

int kv_bad(int x)
{
    return x + 1;
}
