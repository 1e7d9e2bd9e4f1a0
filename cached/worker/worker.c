/*
 * The worker thread: what comes in, what may begin, and the loop over passes.
 *
 * The engine has one entry for computing, so scheduling is putting passes together: each turn looks
 * at what arrived, begins jobs whose slot is free, and computes one pass over all that run
 * (worker_pass.c).  What comes while a pass computes waits for its end and no longer.
 *
 * Cancellation, deadlines and the stop are looked at between passes and only there.
 */

#include "cached/worker/worker_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void list_push(struct job_list *list, struct worker_job *job)
{
    job->next = NULL;
    if (list->last == NULL) {
        list->first = job;
    } else {
        list->last->next = job;
    }
    list->last = job;
}

static struct worker_job *list_pop(struct job_list *list)
{
    struct worker_job *job = list->first;
    if (job == NULL) return NULL;
    list->first = job->next;
    if (list->first == NULL) list->last = NULL;
    job->next = NULL;
    return job;
}

/* Takes the whole list, so that it can be walked while jobs are pushed back to it. */
static struct job_list list_take(struct job_list *list)
{
    const struct job_list taken = *list;
    *list = (struct job_list){NULL, NULL};
    return taken;
}

/* ---- Waiting for the slot. ---- */

/* Takes an image of where the session stands, wherever that is: the shard may have posted it before
 * it heard of the job that moved the session there, or lost it. */
static bool is_export_only(const struct worker_job *job)
{
    return job->start == WORKER_CONTINUE && job->stop_count == 0 && job->decode_max == 0;
}

/* Jobs of one slot keep their order, but for exports, which only need a session at rest. */
static void admit(struct worker *worker)
{
    struct job_list jobs = list_take(&worker->waiting);
    struct worker_job *job;

    while ((job = list_pop(&jobs)) != NULL) {
        const struct worker_job *running = worker->slots[job->slot].job;
        const bool at_rest = running == NULL || running->phase == PHASE_DECODE;
        if (at_rest && is_export_only(job)) {
            job_export(worker, job);
        } else if (running == NULL) {
            job_begin(worker, job);
        } else {
            list_push(&worker->waiting, job);
        }
    }
}

/* ---- The thread. ---- */

static bool has_work(const struct worker *worker)
{
    return worker->waiting.first != NULL || worker->running > 0;
}

void worker_turn(struct worker *worker)
{
    (void)kv_mailbox_run(worker->mailbox, UINT32_MAX);
    admit(worker);
    worker_pass(worker);
}

void worker_run(void *arg)
{
    struct worker *worker = arg;
    kv_thread_assert(KV_THREAD_WORKER);
    kv_thread_be_nice(KV_COMPUTE_NICE);

    while (!worker->stopping || has_work(worker)) {
        if (!has_work(worker)) kv_mailbox_wait(worker->mailbox, -1);
        worker_turn(worker);
    }
}

static void on_job(struct kv_msg *msg)
{
    struct worker_job *job = KV_CONTAINER_OF(msg, struct worker_job, inbox);
    list_push(&job->worker->waiting, job);
}

void worker_post(struct worker *worker, struct worker_job *job)
{
    assert(job->slot < worker->slot_count);
    assert(job->msg.run != NULL);
    assert(job->reply != NULL);

    job->worker = worker;
    job->posted_ns = kv_clock_stopwatch_ns();
    job->phase = PHASE_WAITING;
    job->stop_index = 0;
    job->decode_done = 0;
    job->stopped = false;
    job->computed = false;
    job->batch = (struct batch_job){.user = job->user};
    for (uint32_t i = 0; i < job->stop_count; i++)
        job->stops[i].done = false;
    atomic_store(&job->out_count, 0);
    atomic_store(&job->progress_posted, false);
    job->inbox.run = on_job;
    kv_mailbox_post(worker->mailbox, &job->inbox);
}

static void on_stop(struct kv_msg *msg)
{
    struct worker *worker = KV_CONTAINER_OF(msg, struct worker, stop_msg);
    worker->stopping = true;
}

void worker_stop(struct worker *worker)
{
    if (!atomic_exchange(&worker->stop_posted, true))
        kv_mailbox_post(worker->mailbox, &worker->stop_msg);
}

/* ---- Life of the worker. ---- */

static kv_status allocate(struct worker *worker, struct kv_error *err)
{
    worker->slots = calloc(worker->slot_count, sizeof(*worker->slots));
    worker->users = calloc(worker->slot_count, sizeof(*worker->users));
    worker->pieces = calloc(worker->slot_count, sizeof(*worker->pieces));
    worker->items = calloc(worker->slot_count, sizeof(*worker->items));
    if (worker->slots == NULL || worker->users == NULL || worker->pieces == NULL ||
        worker->items == NULL)
        return KV_FAIL(err, KV_NOMEM, "worker: tables of %u slots", worker->slot_count);
    if (worker->plant != PLANT_NONE) {
        worker->plant_image = malloc(eng_model_layout(worker->model)->image_bytes);
        if (worker->plant_image == NULL) return KV_FAIL(err, KV_NOMEM, "worker: scratch image");
    }
    kv_status status = kv_mailbox_create(&worker->mailbox, err);
    for (uint32_t i = 0; status == KV_OK && i < worker->slot_count; i++)
        status = eng_session_create(worker->model, &worker->slots[i].session, err);
    return status;
}

kv_status worker_create(const struct worker_options *options, struct worker **ret_worker,
                        struct kv_error *err)
{
    assert(options->slots > 0);
    assert(options->chunk_tokens > 0);
    assert(options->chunk_tokens <= eng_model_pass_rows(options->model));
    const enum plant plant = worker_plant_of(options->plant);
    if (options->plant != NULL && plant == PLANT_NONE)
        return KV_FAIL(err, KV_INVALID, "worker: no planted bug '%s' in this build",
                       options->plant);

    struct worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL) return KV_FAIL(err, KV_NOMEM, "worker: out of memory");
    worker->model = options->model;
    worker->log = options->log;
    worker->slot_count = options->slots;
    worker->step_max = eng_model_verify_max(options->model);
    assert(worker->step_max <= KV_VERIFY_TOKENS_MAX);
    worker->draft = options->draft;
    worker->plant = plant;
    worker->stop_msg.run = on_stop;
    const kv_status status = allocate(worker, err);
    if (status != KV_OK) {
        worker_destroy(worker);
        return status;
    }
    if (plant != PLANT_NONE)
        kv_log(worker->log, KV_LOG_WARN, "planted_bug", "name=%s", options->plant);
    batch_init(&worker->batch, eng_model_pass_rows(options->model), options->chunk_tokens,
               worker->users, worker->slot_count);
    *ret_worker = worker;
    return KV_OK;
}

void worker_destroy(struct worker *worker)
{
    if (worker == NULL) return;
    assert(!has_work(worker));
    for (uint32_t i = 0; worker->slots != NULL && i < worker->slot_count; i++)
        eng_session_destroy(worker->slots[i].session);
    kv_mailbox_destroy(worker->mailbox);
    free(worker->slots);
    free(worker->users);
    free(worker->pieces);
    free(worker->items);
    free(worker->plant_image);
    free(worker);
}

static uint64_t read_counter(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

struct worker_stats worker_stats(struct worker *worker)
{
    const struct worker_counters *counters = &worker->counters;
    return (struct worker_stats){
        .prefill_tokens = read_counter(&counters->prefill_tokens),
        .replay_tokens = read_counter(&counters->replay_tokens),
        .decode_tokens = read_counter(&counters->decode_tokens),
        .chunks = read_counter(&counters->chunks),
        .jobs = read_counter(&counters->jobs),
        .prefill_rows = read_counter(&counters->prefill_rows),
        .replay_rows = read_counter(&counters->replay_rows),
        .decode_rows = read_counter(&counters->decode_rows),
        .prefill_ns = read_counter(&counters->prefill_ns),
        .replay_ns = read_counter(&counters->replay_ns),
        .decode_ns = read_counter(&counters->decode_ns),
        .passes = read_counter(&counters->passes),
        .pass_rows = read_counter(&counters->pass_rows),
        .pass_rows_max = read_counter(&counters->pass_rows_max),
        .pass_sessions = read_counter(&counters->pass_sessions),
        .pass_sessions_max = read_counter(&counters->pass_sessions_max),
        .drafts_proposed = read_counter(&counters->drafts_proposed),
        .drafts_accepted = read_counter(&counters->drafts_accepted),
    };
}

const char *worker_model_lost(struct worker *worker)
{
    return atomic_load(&worker->model_lost);
}

uint32_t worker_slots(const struct worker *worker)
{
    return worker->slot_count;
}
