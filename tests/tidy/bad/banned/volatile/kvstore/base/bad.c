/*
 * A sample.
 */

int kv_bad(int x)
{
    volatile int y = x;
    return x;
}
