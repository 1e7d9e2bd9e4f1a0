/*
 * Failures of the `model` commands: a refused model is told apart from one that is not there and
 * from a machine that cannot read it.
 */

#include "tools/cachectl/model_common.h"

#include "kvstore/base/clock.h"

int model_failure(const struct kv_error *err, int refused)
{
    ctl_error("%s", err->text);
    if (err->status == KV_INVALID || err->status == KV_CORRUPT) return refused;
    /* Without an errno it is a file that changed while it was read. */
    if (err->status == KV_IO && err->sys_errno == 0) return refused;
    if (err->status == KV_IO && (err->sys_errno == ENOENT || err->sys_errno == ENOTDIR))
        return CLIENT_EXIT_NOT_FOUND;
    return CLIENT_EXIT_FAILED;
}

uint64_t model_now_ms(void)
{
    return kv_clock_stopwatch_ns() / 1000000;
}
