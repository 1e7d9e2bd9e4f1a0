#pragma once

/* One value of the configuration between text and struct.  Private to cached/config*.c.  Pure. */

#include "cached/config.h"

/* KV_INVALID: "key must be RANGE, not TEXT". */
kv_status config_set(struct cached_config *config, enum config_key key, const char *text,
                     struct kv_error *err) KV_MUST_CHECK;

/* "1 to 4096", "cpu|synthetic", "at most 107 bytes". */
void config_range(const struct config_item *item, char *buf, size_t room);
