/*
 * A sample.
 */

int kv_bad(int x)
{
    // FIXME
    return x;
}
