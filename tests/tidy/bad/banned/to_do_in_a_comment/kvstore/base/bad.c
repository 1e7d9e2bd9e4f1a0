/*
 * A sample.
 */

int kv_bad(int x)
{
    /* TODO: think. */
    return x;
}
