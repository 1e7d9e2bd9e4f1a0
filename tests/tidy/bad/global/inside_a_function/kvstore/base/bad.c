/*
 * A sample.
 */

int kv_bad(int x)
{
    static int calls_count = 0;

    return x + calls_count++;
}
