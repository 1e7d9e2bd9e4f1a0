/*
 * A sample.
 */

int kv_bad(int x)
{
    strcat(to, from);
    return x;
}
