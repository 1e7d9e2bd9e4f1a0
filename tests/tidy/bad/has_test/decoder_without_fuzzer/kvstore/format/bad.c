/*
 * A sample.
 */

int kv_bad_decode(int x)
{
    return x;
}
