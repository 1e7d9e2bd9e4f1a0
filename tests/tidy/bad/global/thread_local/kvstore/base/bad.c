/*
 * A sample.
 */

static _Thread_local int depth;

int kv_bad(int x)
{
    return x + 1;
}
