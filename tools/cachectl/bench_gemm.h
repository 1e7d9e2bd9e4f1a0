#pragma once

/* `cachectl bench gemm`. */

#include "tools/cachectl/bench_progress.h"

/* hot: one matrix again and again instead of a set.  Returns the exit code; CLIENT_EXIT_UNAVAILABLE
 * when oneDNN is not here. */
int bench_gemm(struct bench_progress *progress, bool quick, bool hot);
