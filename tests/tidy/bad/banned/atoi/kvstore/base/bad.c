/*
 * A sample.
 */

int kv_bad(int x)
{
    x = atoi(from);
    return x;
}
