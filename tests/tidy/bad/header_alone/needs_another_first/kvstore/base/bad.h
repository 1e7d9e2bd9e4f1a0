#pragma once

/* Uses a type of <stdint.h> without including it. */
int kv_bad(uint32_t x);
