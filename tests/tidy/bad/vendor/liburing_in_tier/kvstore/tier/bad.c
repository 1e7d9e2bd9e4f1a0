/*
 * A sample.
 */

#include <liburing.h>

int kv_bad(int x)
{
    return x + 1;
}
