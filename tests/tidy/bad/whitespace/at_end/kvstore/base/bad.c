/*
 * A sample.
 */

int kv_bad(int x)
{
    return x + 1; 
}
