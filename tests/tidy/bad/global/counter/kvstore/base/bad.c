/*
 * A sample.
 */

static int calls_count;

int kv_bad(int x)
{
    return x + 1;
}
