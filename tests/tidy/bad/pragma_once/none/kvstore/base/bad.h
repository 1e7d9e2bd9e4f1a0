int kv_bad(int x);
