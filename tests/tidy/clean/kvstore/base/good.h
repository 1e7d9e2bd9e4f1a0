#pragma once

/* A header that keeps the rules. */

#include <stdint.h>

struct kv_good;
enum kv_kind { KV_A, KV_B };
typedef int kv_good_fn(int x);

extern const uint32_t kv_good_table[2];

int kv_limit(int x);
int kv_good_call(kv_good_fn *fn, int (*other)(int x));
