/*
 * A sample.
 */

int kv_bad(int x)
{
    from = strtok(from, ",");
    return x;
}
