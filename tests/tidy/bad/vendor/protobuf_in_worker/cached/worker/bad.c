/*
 * A sample.
 */

#include <protobuf-c/protobuf-c.h>

int kv_bad(int x)
{
    return x + 1;
}
