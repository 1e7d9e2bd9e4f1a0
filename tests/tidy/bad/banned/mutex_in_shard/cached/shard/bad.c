/*
 * A sample.
 */

int kv_bad(int x)
{
    pthread_mutex_lock(&lock);
    return x;
}
