#include "kvstore/base/good.h"

int kv_bad(int x)
{
    return x + 1;
}
