/*
 * A sample.
 */

#include <curl/curl.h>

int kv_bad(int x)
{
    return x + 1;
}
