/*
 * A sample.
 */

static const char *names[] = {"one", "two"};

int kv_bad(int x)
{
    return x + 1;
}
