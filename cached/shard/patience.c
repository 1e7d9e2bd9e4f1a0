/*
 * A device that does not answer.
 *
 * Reads and saves under way cannot be called back: the kernel has their memory.  So a call stops
 * waiting for them instead.  A read that brought nothing for a while counts as failed, and the call
 * computes what it lacks; a save goes on without the one who waits, whose answer says the level
 * that is reached and SSD_SLOW.  Until the device answers no further read or save is begun, and a
 * session whose save hangs has its next turn in memory.  "A while" is a quarter of the time that
 * the caller gives, at least half a second and at most KV_DISK_PATIENCE_MS.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#define PATIENCE_NS (KV_DISK_PATIENCE_MS * 1000000ull)
#define LEAST_NS 500000000ull /* A busy device may take so long. */
#define PAUSE_NS 1000000000ull

static uint64_t patience_ns(const struct flow *flow)
{
    const struct request *req = flow->req;
    if (req->deadline_ns == 0) return PATIENCE_NS;
    const uint64_t quarter_ns = (req->deadline_ns - req->out.times.arrived_ns) / 4;
    return KV_MIN(PATIENCE_NS, KV_MAX(LEAST_NS, quarter_ns));
}

/* What began after `now_ns` was taken is not. */
static bool is_late(uint64_t now_ns, uint64_t since_ns, uint64_t patience)
{
    return now_ns > since_ns && now_ns - since_ns > patience;
}

bool patience_is_over(const struct flow *flow)
{
    const enum request_method method = flow->req->method;
    if (method != REQUEST_PREFILL && method != REQUEST_DECODE && method != REQUEST_CHECKPOINT)
        return false;
    for (const struct commit *commit = flow->shard->commits; commit != NULL; commit = commit->next)
        if (commit->session->tree == flow->session->tree &&
            is_late(kv_clock_stopwatch_ns(), commit->begun_ns, patience_ns(flow)))
            return true;
    const struct compact *compact = &flow->shard->compact;
    return compact->session != NULL && compact->session->tree == flow->session->tree &&
           is_late(kv_clock_stopwatch_ns(), compact->held_ns, patience_ns(flow));
}

/* A list first: each may finish, and give another one what it waits for. */
static struct flow *late_reads(struct shard *shard, uint64_t now_ns)
{
    struct flow *late = NULL;
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (flow->read.waiting == 0) continue;
        if (!is_late(now_ns, flow->read.progress_ns, patience_ns(flow))) continue;
        flow->next_waiter = late;
        late = flow;
    }
    return late;
}

static void give_up_reads(struct shard *shard, uint64_t now_ns)
{
    struct flow *flow = late_reads(shard, now_ns);
    while (flow != NULL) {
        struct flow *next = flow->next_waiter;
        kv_store_read_give_up(&flow->read);
        flow = next;
    }
}

/* The save goes on; the answer does not wait for it.  True: one was found. */
static bool release_waiter(struct shard *shard, uint64_t now_ns)
{
    for (struct commit *commit = shard->commits; commit != NULL; commit = commit->next) {
        struct flow *waiter = commit->waiter;
        if (waiter == NULL) continue;
        if (!is_late(now_ns, commit->begun_ns, patience_ns(waiter))) continue;
        commit->waiter = NULL;
        waiter->commit = NULL;
        waiter->req->out.save_reason = KV_REASON_SSD_SLOW;
        shard->counters.late_saves++;
        waiter->wake(waiter);
        return true;
    }
    return false;
}

static void wake_next_turns(struct shard *shard)
{
    struct flow *woken = NULL;
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (!flow->waits_commit || !patience_is_over(flow)) continue;
        flow->waits_commit = false;
        flow->next_waiter = woken;
        woken = flow;
    }
    while (woken != NULL) {
        struct flow *next = woken->next_waiter;
        woken->wake(woken);
        woken = next;
    }
}

void patience_tick(struct shard *shard)
{
    const uint64_t now_ns = kv_clock_stopwatch_ns();
    const bool was_slow = shard->slow;
    /* The process stood still, and the device may have answered meanwhile: that is seen first. */
    const bool paused = is_late(now_ns, shard->patience_ns, PAUSE_NS);
    shard->patience_ns = now_ns;
    if (paused) return;
    give_up_reads(shard, now_ns);
    while (release_waiter(shard, now_ns)) {
    }
    bool slow = shard->store->reads_late > 0;
    for (const struct commit *commit = shard->commits; commit != NULL && !slow;
         commit = commit->next)
        slow = is_late(now_ns, commit->begun_ns, PATIENCE_NS);
    shard->slow = slow;
    if (slow && !was_slow)
        kv_log(shard->options.log, KV_LOG_ERROR, "ssd_slow",
               "text=\"the device under state.dir has not answered for %u ms: turns go on without "
               "it, saves are refused until it does\"",
               KV_DISK_PATIENCE_MS);
    if (was_slow && !slow)
        kv_log(shard->options.log, KV_LOG_INFO, "ssd_answers",
               "text=\"the device under state.dir answers again\"");
    if (slow) wake_next_turns(shard);
}
