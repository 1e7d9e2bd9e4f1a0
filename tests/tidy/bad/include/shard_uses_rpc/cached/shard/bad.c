/*
 * A sample.
 */

#include "cached/rpc/rpc_server.h"

int kv_bad(int x)
{
    return x + 1;
}
