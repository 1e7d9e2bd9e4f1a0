#pragma once

/* Names a struct by value that only another header defines. */
int kv_bad(struct kv_other x);
struct kv_uses {
    struct kv_other inside;
};
