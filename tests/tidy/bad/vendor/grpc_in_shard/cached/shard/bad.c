/*
 * A sample.
 */

#include <grpc/grpc.h>

int kv_bad(int x)
{
    return x + 1;
}
