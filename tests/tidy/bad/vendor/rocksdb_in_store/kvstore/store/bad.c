/*
 * A sample.
 */

#include <rocksdb/c.h>

int kv_bad(int x)
{
    return x + 1;
}
