#pragma once

int kv_bad(int x);
