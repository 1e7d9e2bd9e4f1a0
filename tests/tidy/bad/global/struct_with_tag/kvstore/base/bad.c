/*
 * A sample.
 */

struct kv_state {
    int count;
};

static struct kv_state state;

int kv_bad(int x)
{
    return x + 1;
}
