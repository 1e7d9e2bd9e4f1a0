/*
 * A sample.
 */

int calls_count = 1;

int kv_bad(int x)
{
    return x + 1;
}
