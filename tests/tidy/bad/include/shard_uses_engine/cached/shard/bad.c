/*
 * A sample.
 */

#include "engine/engine.h"

int kv_bad(int x)
{
    return x + 1;
}
