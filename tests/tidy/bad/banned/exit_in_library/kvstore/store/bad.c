/*
 * A sample.
 */

int kv_bad(int x)
{
    exit(1);
    return x;
}
