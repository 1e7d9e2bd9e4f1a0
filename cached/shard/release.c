/*
 * `cachectl scrub release`: quarantined places are tried, and those that are good again are used.
 *
 * One call at a time tries them (store_release.c); others wait for it, in order, and then try what
 * is left.  A call that is cancelled ends between two places: what was released stays released.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>

static void start_first(struct shard *shard);

static bool cancelled(void *context)
{
    return flow_cancelled(context);
}

static void finish(struct flow *flow, const struct kv_release_result *result, kv_status status)
{
    struct shard *shard = flow->shard;
    if (!flow->failed && (status == KV_INVALID || status == KV_IO || status == KV_BUSY))
        flow_fail(flow, shard_unrecorded(shard, status), "ssd", NULL, NULL);
    else if (!flow->failed && status != KV_OK)
        flow_fail_status(flow, status);
    if (!flow->failed && !scrub_fill_status(flow, result->released > 0))
        flow_fail_status(flow, KV_NOMEM);
    if (!flow->failed) {
        flow->req->out.scrub->released = result->released;
        flow->req->out.scrub->still_bad = result->bad;
        flow->req->out.scrub->still_named = result->named;
    }
    assert(shard->releases == flow);
    shard->releases = flow->next_waiter;
    flow_finish(flow);
}

static void tried(void *context, const struct kv_release_result *result, kv_status status)
{
    struct flow *flow = context;
    struct shard *shard = flow->shard;
    if (result->released + result->bad > 0)
        kv_log(shard->options.log, KV_LOG_INFO, "quarantine_tried", "released=%u bad=%u named=%u",
               result->released, result->bad, result->named);
    finish(flow, result, status);
    if (shard->releases != NULL) start_first(shard);
}

static void start_first(struct shard *shard)
{
    while (shard->releases != NULL) {
        struct flow *flow = shard->releases;
        const struct kv_release_result none = {0};
        const kv_status status = kv_store_release_start(shard->store, cancelled, tried, flow);
        if (status == KV_OK) return;
        finish(flow, &none, status);
    }
}

void flow_release(struct flow *flow)
{
    struct flow **link = &flow->shard->releases;
    const bool first = *link == NULL;
    while (*link != NULL)
        link = &(*link)->next_waiter;
    flow->next_waiter = NULL;
    *link = flow;
    if (first) start_first(flow->shard);
}
