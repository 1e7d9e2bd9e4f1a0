/*
 * A sample.
 */

static __attribute__((aligned(64))) int depth;

int kv_bad(int x)
{
    return x + 1;
}
