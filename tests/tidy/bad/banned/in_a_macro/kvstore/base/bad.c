/*
 * A sample.
 */

#define BAD_COPY(to, from) strcpy(to, from)

int kv_bad(int x)
{
    x = 1;
    return x;
}
