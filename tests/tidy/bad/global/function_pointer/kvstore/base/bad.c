/*
 * A sample.
 */

static int (*hook)(int x);

int kv_bad(int x)
{
    return x + 1;
}
