/*
 * A sample.
 */

#ifdef BAD
int kv_bad(int x, int y)
{
#else
int kv_bad(int x)
{
#endif
    return x;
}
