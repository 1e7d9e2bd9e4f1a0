/*
 * A sample.
 */

int kv_bad(int x)
{
    sprintf(to, "%d", x);
    return x;
}
