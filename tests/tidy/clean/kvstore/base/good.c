/*
 * Keeps every rule, on the limit where there is one: a function of 70 lines, a line of 100 bytes.
 * Words that are banned in code may stand in a comment: volatile, strcpy, pthread_mutex_lock.
 */

#include "kvstore/base/good.h"

#include <assert.h>
#include <stdio.h>

#define KV_TWO_LINES(x)                                                                            \
    do {

_Static_assert(sizeof(int) == 4, "as everywhere");

struct kv_good {
    int count;
    const char *name;
};

const uint32_t kv_good_table[2] = {1, 2};

static const char *const names[] = {"strcpy", "atoi(", "{", "it's"};
static const struct kv_good goods[2] = {{1, "one"}, {2, "two"}};

int kv_limit(int x)
{
    x += 0;
    x += 1;
    x += 2;
    x += 3;
    x += 4;
    x += 5;
    x += 6;
    x += 7;
    x += 8;
    x += 9;
    x += 10;
    x += 11;
    x += 12;
    x += 13;
    x += 14;
    x += 15;
    x += 16;
    x += 17;
    x += 18;
    x += 19;
    x += 20;
    x += 21;
    x += 22;
    x += 23;
    x += 24;
    x += 25;
    x += 26;
    x += 27;
    x += 28;
    x += 29;
    x += 30;
    x += 31;
    x += 32;
    x += 33;
    x += 34;
    x += 35;
    x += 36;
    x += 37;
    x += 38;
    x += 39;
    x += 40;
    x += 41;
    x += 42;
    x += 43;
    x += 44;
    x += 45;
    x += 46;
    x += 47;
    x += 48;
    x += 49;
    x += 50;
    x += 51;
    x += 52;
    x += 53;
    x += 54;
    x += 55;
    x += 56;
    x += 57;
    x += 58;
    x += 59;
    x += 60;
    x += 61;
    x += 62;
    x += 63;
    x += 64;
    x += 65;
    return x;
}

static int add_one(int x)
{
    /* aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa */
    return x + (x == '{') + (x == '"') + (x == '\'');
}

int kv_good_call(kv_good_fn *fn, int (*other)(int x))
{
    static int (*const steps[2])(int x) = {add_one, kv_limit};
    static const int few[] = {1, 2, 3};
    const struct kv_good *good = &goods[0];
    int sum = few[0];

    assert(fn != NULL);
    for (int i = 0; i < 2; i++) {
        sum += steps[i](i) + fn(i) + other(i);
    }
    (void)printf("%s %s {\n", names[0], good->name);
    return sum + (struct kv_good){.count = 3}.count;
}
