#pragma once

#include <liburing.h>

int kv_ring_depth(int x);
