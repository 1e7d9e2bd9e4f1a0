#ifndef BAD_H
#define BAD_H
int kv_bad(int x);
#endif
