/*
 * A sample.
 */

int kv_bad(int x)
{
    strcpy(to, from);
    return x;
}
