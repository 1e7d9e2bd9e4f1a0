#pragma once

/* What the `model` commands share: how a failure of the engine's model code is told, and a clock
 * for their progress. */

#include "kvstore/base/status.h"
#include "tools/cachectl/ctl.h"

/* Prints the sentence.  Returns `refused` for what is wrong with a model, "not found" when there is
 * none, "failed" for everything else. */
int model_failure(const struct kv_error *err, int refused);

/* Milliseconds that only ever grow; for differences. */
uint64_t model_now_ms(void);
