/*
 * A sample.
 */

#include <openssl/evp.h>

int kv_bad(int x)
{
    return x + 1;
}
