/*
 * The shard's loop: messages, I/O completions, a tick.
 *
 * Each turn does a bounded amount for every source, then waits on the ring, which also wakes for
 * the mailbox.  Cancelled and overdue requests that only wait are looked at each tick; running jobs
 * see their flags themselves.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGES_PER_TURN 256u
#define TICK_MS 50

typedef void flow_fn(struct flow *flow);

static flow_fn *const entries[REQUEST_METHOD_COUNT] = {
    [REQUEST_OPEN_SESSION] = flow_open_session,
    [REQUEST_LOOKUP] = flow_lookup,
    [REQUEST_PREFILL] = flow_prefill,
    [REQUEST_DECODE] = flow_decode,
    [REQUEST_CHECKPOINT] = flow_checkpoint,
    [REQUEST_WAIT_DURABLE] = flow_wait_durable,
    [REQUEST_ROLLBACK] = flow_rollback,
    [REQUEST_COMPACT] = flow_compact,
    [REQUEST_PIN] = flow_pin,
    [REQUEST_TOUCH] = flow_touch,
    [REQUEST_GET_USAGE] = flow_get_usage,
    [REQUEST_FORK] = flow_fork,
    [REQUEST_CLOSE_SESSION] = flow_close_session,
    [REQUEST_LIST_SESSIONS] = flow_list_sessions,
    [REQUEST_GET_SESSION] = flow_get_session,
    [REQUEST_GET_STATS] = flow_get_stats,
    [REQUEST_ADVANCE_CLOCK] = flow_advance_clock,
    [REQUEST_SCRUB] = flow_scrub,
    [REQUEST_ROTATE_KEY] = flow_rotate_key,
    [REQUEST_DISK_USAGE] = flow_disk_usage,
    [REQUEST_DELETE_SESSION] = flow_delete_session,
    [REQUEST_ERASE_USER] = flow_erase_user,
    [REQUEST_WHY] = flow_why,
    [REQUEST_PURGE_MODEL] = flow_purge_model,
    [REQUEST_SET_QUOTA] = flow_set_quota,
    [REQUEST_GET_QUOTA] = flow_get_quota,
    [REQUEST_DELETE_QUOTA] = flow_delete_quota,
    [REQUEST_SET_PLAN] = flow_set_plan,
    [REQUEST_LIST_PLANS] = flow_list_plans,
    [REQUEST_LIST_USERS] = flow_list_users,
};

static void poke_run(struct kv_msg *msg)
{
    struct shard *shard = KV_CONTAINER_OF(msg, struct shard, poke);
    atomic_store(&shard->poked, false);
    shard->look_now = true;
}

kv_status shard_create(const struct shard_options *options, struct shard **ret_shard,
                       struct kv_error *err)
{
    struct shard *shard = calloc(1, sizeof(*shard));
    if (shard == NULL) return KV_FAIL(err, KV_NOMEM, "allocate the shard");
    shard->options = *options;
    shard->store = options->store;
    shard->layout = &options->store->layout;
    shard->live_count = worker_slots(options->worker);
    shard->lives = calloc(shard->live_count, sizeof(*shard->lives));
    if (shard->lives == NULL) {
        free(shard);
        return KV_FAIL(err, KV_NOMEM, "allocate live sessions");
    }
    for (uint32_t i = 0; i < shard->live_count; i++)
        shard->lives[i] = (struct live){.slot = i, .spare = KV_HBM_SLOT_NONE};
    shard->poke.run = poke_run;
    shard->started_ns = kv_clock_stopwatch_ns();
    *ret_shard = shard;
    return KV_OK;
}

void shard_destroy(struct shard *shard)
{
    if (shard == NULL) return;
    for (uint32_t i = 0; i < shard->live_count; i++) {
        live_release(shard, &shard->lives[i]);
        free(shard->lives[i].chain);
        free(shard->lives[i].pages);
        free(shard->lives[i].page_bytes);
    }
    free(shard->lives);
    answers_free_all(shard);
    free(shard->compact.trees);
    kv_scrub_destroy(shard->scrub.run);
    free(shard);
}

static void dispatch(struct kv_msg *msg)
{
    struct request *req = KV_CONTAINER_OF(msg, struct request, msg);
    struct shard *shard = req->flow;
    struct flow *flow = kv_arena_alloc(req->arena, sizeof(*flow));
    if (flow == NULL) {
        request_fail(req, KV_REASON_QUEUE_FULL, "request memory", NULL, NULL, NULL);
        atomic_fetch_sub(&shard->inflight, 1);
        request_reply(req);
        return;
    }
    flow->req = req;
    flow->shard = shard;
    flow->image_slot = KV_POOL_SLOT_NONE;
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(flow->reserved); i++)
        flow->reserved[i] = KV_POOL_SLOT_NONE;
    flow->next = shard->flows;
    if (shard->flows != NULL) shard->flows->prev = flow;
    shard->flows = flow;
    req->flow = flow;
    flow_start(flow);
}

void flow_start(struct flow *flow)
{
    if (flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow->req->in.session_name != NULL && flow->req->method != REQUEST_WHY &&
        !admit_request(flow)) {
        flow_finish(flow);
        return;
    }
    if (answers_begin(flow)) entries[flow->req->method](flow);
}

kv_status shard_post(struct shard *shard, struct request *req)
{
    /* Counted first: the shard does not leave while anybody is counted. */
    const uint32_t before = atomic_fetch_add(&shard->inflight, 1);
    const bool stopping = atomic_load(&shard->stopping);
    if (stopping || before >= KV_REQUESTS_INFLIGHT_MAX) {
        atomic_fetch_sub(&shard->inflight, 1);
        return stopping ? KV_SHUTDOWN : KV_BUSY;
    }
    req->flow = shard;
    req->msg.run = dispatch;
    kv_mailbox_post(shard->options.mailbox, &req->msg);
    return KV_OK;
}

void shard_poke(struct shard *shard)
{
    if (!atomic_exchange(&shard->poked, true))
        kv_mailbox_post(shard->options.mailbox, &shard->poke);
}

void shard_stop(struct shard *shard)
{
    atomic_store(&shard->stopping, true);
    shard_poke(shard);
}

const char *shard_health(struct shard *shard)
{
    return atomic_load(&shard->health);
}

enum kv_reason shard_unrecorded(const struct shard *shard, kv_status status)
{
    if (status == KV_IO) return KV_REASON_RESULT_UNKNOWN;
    const bool no_room = kv_manifest_stats(shard->store->manifest).no_room;
    return status == KV_BUSY || no_room ? KV_REASON_SSD_FULL : KV_REASON_SSD_READ_ONLY;
}

enum kv_reason shard_unwritten(const struct kv_error *err)
{
    return err->sys_errno == ENOSPC ? KV_REASON_SSD_FULL : KV_REASON_SSD_READ_ONLY;
}

void shard_drop_page(struct shard *shard, struct kv_session *session, uint32_t page)
{
    struct kv_node *node = NULL;
    assert(session->tree->commits == 0); /* A save in flight names nodes. */
    while ((node = kv_index_node_next(session, node)) != NULL) {
        for (uint32_t i = 0; i < node->page_count; i++) {
            if (node->pages[i] == page) shard_before_drop(session, node);
        }
    }
    kv_store_drop_page(shard->store, session, page, KV_REASON_CORRUPT);
}

/* A list first: what is woken may finish, or start something and wait again. */
static void wake_list(struct flow *woken)
{
    while (woken != NULL) {
        struct flow *next = woken->next_waiter;
        woken->wake(woken);
        woken = next;
    }
}

void shard_commit_ended(struct shard *shard, struct kv_session *session)
{
    struct flow *woken = NULL;
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (!flow->waits_commit || flow->session->tree != session->tree) continue;
        flow->waits_commit = false;
        flow->next_waiter = woken;
        woken = flow;
    }
    wake_list(woken);
}

void shard_session_freed(struct shard *shard, struct kv_session *session)
{
    struct flow *woken = NULL;
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (!flow->waits_session || flow->session != session) continue;
        flow->waits_session = false;
        flow->next_waiter = woken;
        woken = flow;
    }
    wake_list(woken);
}

void shard_before_drop(struct kv_session *session, const struct kv_node *node)
{
    for (struct kv_session *at = kv_index_head_next(session->tree, NULL); at != NULL;
         at = kv_index_head_next(session->tree, at)) {
        struct live *live = at->live;
        if (live == NULL) continue;
        if (live->node != NULL && kv_index_is_ancestor(node, live->node))
            live_fall_back(live, node->parent);
        if (live->branch != NULL && kv_index_is_ancestor(node, live->branch)) live->branch = NULL;
    }
}

/* Requests that only wait see here that they are over; a running job looks at the flag itself. */
static void tick_flows(struct shard *shard)
{
    struct flow *woken = NULL;
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next) {
        if (!flow_is_over(flow)) continue;
        atomic_store(&flow->stop, true);
        if (!flow->waits_commit && !flow->waits_session && !flow->waits_slot && !flow->joins)
            continue;
        if (flow->waits_slot) slots_leave(flow);
        flow->waits_commit = flow->waits_session = false;
        flow->next_waiter = woken;
        woken = flow;
    }
    wake_list(woken);
}

/* Windows live as long in the engine as in the pool: an idle session gives its slot back. */
static void tick_lives(struct shard *shard)
{
    const uint64_t now_ms = kv_store_now_ms(shard->store);
    for (uint32_t i = 0; i < shard->live_count; i++) {
        struct live *live = &shard->lives[i];
        if (live->session == NULL || live->busy || live->session->busy != NULL) continue;
        if (now_ms > live->session->used_ms + shard->store->options.pool_ttl_ms)
            live_release(shard, live);
    }
}

void shard_files_gone(struct shard *shard, bool is_page_file, const char *why)
{
    atomic_store(is_page_file ? &shard->pages_gone : &shard->records_gone, why);
    if (!is_page_file) kv_manifest_refuse(shard->store->manifest);
    shard_poke(shard);
}

/* Pages are of no use without records.  NULL: all is there. */
static const char *refuse_saves(struct shard *shard)
{
    const char *pages = atomic_load(&shard->pages_gone);
    const char *records = atomic_load(&shard->records_gone);
    if (pages != NULL) kv_ssd_refuse(shard->store->ssd, pages);
    if (records != NULL) kv_ssd_refuse(shard->store->ssd, records);
    return records;
}

void shard_look_at_health(struct shard *shard)
{
    const char *records_gone = refuse_saves(shard);
    const struct kv_ssd_usage usage = kv_ssd_usage(shard->store->ssd);
    const char *health = NULL;
    if (shard->store->recovery.lost_batches > 0)
        health = "acknowledged records were lost before this start: see records_lost in the log";
    if (evict_health(shard) != NULL) health = evict_health(shard);
    if (shard->store->counters.unreadable_trees > 0)
        health = "records of some sessions cannot be read: see tree_unreadable in the log";
    if (shard->slow) health = "the device of the SSD tier does not answer: turns go on without it";
    if (usage.read_only) health = "the SSD tier is read-only: see its note in the status";
    if (kv_manifest_stats(shard->store->manifest).failed)
        health = "the manifest refuses writes after a failed sync";
    if (records_gone != NULL) health = records_gone;
    const char *lost = worker_model_lost(shard->options.worker);
    if (lost != NULL) health = lost;
    atomic_store(&shard->health, health);
}

static bool finished(struct shard *shard)
{
    return atomic_load(&shard->stopping) && atomic_load(&shard->inflight) == 0 &&
           shard->commits == NULL && shard->store->operations == 0 && shard->store->dead == NULL;
}

void shard_run(void *context)
{
    struct shard *shard = context;
    uint64_t ticked_ns = 0;
    kv_thread_assert(KV_THREAD_SHARD);

    while (!finished(shard)) {
        const uint32_t ran = kv_mailbox_run(shard->options.mailbox, MESSAGES_PER_TURN);
        const uint64_t now_ns = kv_clock_stopwatch_ns();
        if (shard->look_now) tick_flows(shard);
        shard->look_now = false;
        if (now_ns - ticked_ns > TICK_MS * 1000000ull) {
            ticked_ns = now_ns;
            tick_flows(shard);
            patience_tick(shard);
            tick_lives(shard);
            shard_look_at_health(shard);
            answers_tick(shard);
            kv_store_pins_tick(shard->store);
            old_branches_tick(shard);
            sweep_tick(shard);
        }
        if (shard->sweep_waiters != NULL) sweep_tick(shard);
        delete_tick(shard);
        purge_tick(shard);
        slots_give(shard);
        slots_wake(shard);
        const bool evicts = evict_tick(shard);
        kv_store_tick(shard->store);
        const bool compacts = compact_tick(shard);
        const bool more = evicts || compacts || ran == MESSAGES_PER_TURN ||
                          shard->sweep_waiters != NULL || shard->woken_first != NULL;
        const uint64_t scrub_ns = scrub_tick(shard);
        /* Rounded up: the pace catches up, a loop that spins for it does not. */
        const uint64_t scrub_ms = scrub_ns == 0 ? 0 : scrub_ns / 1000000u + 1;
        const int wait_ms = more ? 0 : (int)KV_MIN(scrub_ms, (uint64_t)TICK_MS);
        (void)kv_disk_run(shard->options.disk, kv_mailbox_fd(shard->options.mailbox), wait_ms);
    }
    kv_store_rest(shard->store);
}
