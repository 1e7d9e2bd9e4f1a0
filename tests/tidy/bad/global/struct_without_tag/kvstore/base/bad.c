/*
 * A sample.
 */

static struct {
    int count;
} state = {0};

int kv_bad(int x)
{
    return x + 1;
}
