/*
 * The worker thread: which job computes next, and how a job moves its session.
 *
 * The engine has one entry for computing at a time, so scheduling is taking turns.  One turn is one
 * step of every decoding job, then one piece of the first prefill job, which goes to the end of its
 * line: a piece is a chunk, or the end of a prefill (the decoder over one window), so a decoding
 * session waits for one piece at most, however many prefills there are.
 *
 * Between turns every session stands at a position that can be exported, but for those inside a
 * prefill.  Cancellation is looked at there and only there: a decode stops with its last sent token
 * pending, a prefill goes back to its last finished stop.  Nothing here decides what is kept in the
 * tiers: the worker says where the session stands, the shard draws the conclusions.
 */

#include "cached/worker/worker.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { NICE_VALUE = 5 };

enum phase { PHASE_WAITING, PHASE_PREFILL, PHASE_DECODE };

enum plant { PLANT_NONE, PLANT_WINDOW, PLANT_TAIL, PLANT_IMPORT };

struct job_list {
    struct worker_job *first;
    struct worker_job *last;
};

struct slot {
    struct eng_session *session;
    struct worker_job *job; /* The one that moves the session now. */
    bool lost;              /* Stands nowhere until a job says where to start. */
};

/* Owned by: worker, but for the mailbox and the counters. */
struct worker {
    struct eng_model *model;
    struct kv_log *log;
    uint32_t slot_count;
    uint32_t chunk_tokens;
    enum plant plant;
    uint8_t *plant_image; /* Scratch: an image on its way to import, damaged on purpose. */
    struct slot *slots;

    struct kv_mailbox *mailbox;
    struct kv_msg stop_msg;
    atomic_bool stop_posted;
    bool stopping;

    struct job_list waiting; /* Their slot is busy. */
    struct job_list prefilling;
    struct job_list decoding;

    /* Written by the worker, read by any thread. */
    _Atomic uint64_t prefill_tokens, replay_tokens, decode_tokens, chunks, jobs;
};

static void count(_Atomic uint64_t *counter, uint64_t more)
{
    (void)atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

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

static struct eng_session *session_of(const struct worker *worker, const struct worker_job *job)
{
    return worker->slots[job->slot].session;
}

static bool is_cancelled(const struct worker *worker, const struct worker_job *job)
{
    if (worker->stopping) return true;
    if (job->cancelled != NULL && atomic_load(job->cancelled)) return true;
    return job->deadline_ns != 0 && kv_clock_stopwatch_ns() >= job->deadline_ns;
}

/* ---- Planted bugs: a test that must find wrong bits is shown some. ---- */

static enum plant plant_of(const char *name)
{
#ifdef CACHED_TEST_HOOKS
    if (name != NULL && strcmp(name, "window") == 0) return PLANT_WINDOW;
    if (name != NULL && strcmp(name, "tail") == 0) return PLANT_TAIL;
    if (name != NULL && strcmp(name, "import") == 0) return PLANT_IMPORT;
#else
    (void)name;
#endif
    return PLANT_NONE;
}

#ifdef CACHED_TEST_HOOKS
/* The sign of the largest value in the newest row of layer 0, which every token computed next
 * reads: large, so that no rounding hides it.  A row begins with its codes; scales end it. */
static void damage_window(const struct kv_layout *layout, uint8_t *image, uint32_t taken_at,
                          uint32_t tokens)
{
    const uint32_t row_index = tokens - 1 - kv_layout_image_base(layout, taken_at);
    uint8_t *row =
        image + kv_layout_window_offset(layout, 0) + row_index * layout->window_row_bytes;
    uint32_t largest = 0;
    for (uint32_t i = 1; i < layout->window_row_bytes / 2; i++)
        if ((row[i] & 0x7f) > (row[largest] & 0x7f)) largest = i;
    row[largest] ^= 0x80;
}

/* The largest float of the first tail, times or by two. */
static void damage_tail(const struct kv_layout *layout, uint8_t *image)
{
    uint32_t source = 0;
    while (source < layout->source_count && layout->sources[source].tail_bytes == 0)
        source++;
    if (source == layout->source_count) return;

    uint8_t *tail = image + layout->tails_offset; /* Sources before it have no tail. */
    uint32_t largest = 0;
    for (uint32_t i = 0; i + 4 <= layout->sources[source].tail_bytes; i += 4)
        if ((kv_load32(tail + i) & 0x7fffffffu) > (kv_load32(tail + largest) & 0x7fffffffu))
            largest = i;
    tail[largest + 2] ^= 0x80;
}
#endif

/* The image to import: the job's own, or a damaged copy. */
static const uint8_t *image_to_import(struct worker *worker, const struct worker_job *job)
{
#ifdef CACHED_TEST_HOOKS
    const struct kv_layout *layout = eng_model_layout(worker->model);
    const bool has_tails = job->start_tokens % 2 == 1;
    if (worker->plant == PLANT_NONE) return job->image;
    if (worker->plant == PLANT_TAIL && !has_tails) return job->image;

    memcpy(worker->plant_image, job->image, layout->image_bytes);
    if (worker->plant == PLANT_WINDOW)
        damage_window(layout, worker->plant_image, job->image_state.tokens, job->start_tokens);
    if (worker->plant == PLANT_TAIL) damage_tail(layout, worker->plant_image);
    return worker->plant_image;
#else
    (void)worker;
    return job->image;
#endif
}

/* ---- The end of a job. ---- */

/* Everything the worker still knows of the job goes back with it; it is not touched below. */
static void post_back(struct worker *worker, struct worker_job *job)
{
    job->run_ns = kv_clock_stopwatch_ns() - job->begun_ns;
    count(&worker->jobs, 1);
    kv_mailbox_post(job->reply, &job->msg);
}

static void fill_results(struct eng_session *session, struct worker_job *job, kv_status status)
{
    job->status = status;
    job->kept = true;
    job->state = eng_session_state(session);
    job->has_logits = eng_session_has_logits(session);
    if (job->decode_export != NULL) eng_session_export(session, job->decode_export);
}

static void fill_lost(struct worker_job *job, kv_status status)
{
    job->status = status;
    job->kept = false;
    job->state = (struct kv_image_state){0};
    job->has_logits = false;
}

static void free_slot(struct worker *worker, struct worker_job *job)
{
    /* The pages go back with the job: nothing may point to them until the next one. */
    eng_session_set_pages(session_of(worker, job), NULL, 0);
    worker->slots[job->slot].job = NULL;
}

static void finish(struct worker *worker, struct worker_job *job, kv_status status)
{
    fill_results(session_of(worker, job), job, status);
    free_slot(worker, job);
    post_back(worker, job);
}

static void finish_lost(struct worker *worker, struct worker_job *job, kv_status status)
{
    eng_session_reset(session_of(worker, job));
    worker->slots[job->slot].lost = true;
    fill_lost(job, status);
    free_slot(worker, job);
    post_back(worker, job);
}

/* ---- Decode. ---- */

static uint32_t decode_limit(const struct worker_job *job)
{
    if (job->forced == NULL) return job->decode_max;
    return KV_MIN(job->decode_max, job->forced_count);
}

static bool is_stop_token(const struct worker_job *job, uint32_t token)
{
    for (uint32_t i = 0; i < job->stops_at_count; i++)
        if (job->stops_at[i] == token) return true;
    return false;
}

static void publish(struct worker_job *job, uint32_t token, uint32_t logits_crc)
{
    const uint32_t index = job->decode_done++;
    job->out_tokens[index] = token;
    job->out_crcs[index] = logits_crc;
    atomic_store_explicit(&job->out_count, index + 1, memory_order_release);
    /* The flag says whether the message is on its way: it is in one queue at most. */
    if (job->progress.run == NULL) return;
    if (!atomic_exchange(&job->progress_posted, true)) kv_mailbox_post(job->reply, &job->progress);
}

/* Processes the token sent last, then takes and sends the next one, which is left pending: so
 * between two steps the session always stands where a stream that breaks here would end. */
static void decode_step(struct worker *worker, struct worker_job *job)
{
    struct eng_session *session = session_of(worker, job);
    if (is_cancelled(worker, job)) {
        finish(worker, job, KV_CANCELLED);
        return;
    }

    const struct kv_image_state state = eng_session_state(session);
    if (state.has_pending) eng_decode_token(session, state.pending);
    assert(eng_session_has_logits(session));

    const size_t logits_bytes = eng_model_layout(worker->model)->vocab_tokens * sizeof(float);
    const uint32_t crc = kv_checksum(eng_session_logits(session), logits_bytes);
    const uint32_t token = job->forced != NULL ? job->forced[job->decode_done]
                                               : eng_session_sample(session, &job->sampling);
    eng_session_set_pending(session, token);
    publish(job, token, crc);
    count(&worker->decode_tokens, 1);

    /* A forced answer ends where its sender ended it, not at a stop token inside. */
    const bool at_limit = job->decode_done == decode_limit(job);
    const bool at_stop = is_stop_token(job, token) && (job->forced == NULL || at_limit);
    job->stopped = at_stop;
    if (at_stop || at_limit) {
        finish(worker, job, KV_OK);
    } else {
        list_push(&worker->decoding, job);
    }
}

/* ---- Prefill. ---- */

static void prefill_begin(struct worker *worker, struct worker_job *job)
{
    const uint32_t index = job->stop_index;
    const uint32_t from = index == 0 ? job->replay_from : job->stops[index - 1].tokens;
    assert(job->stops[index].tokens > (index == 0 ? job->start_tokens : from));
    eng_prefill_begin(session_of(worker, job), job->ids, from, job->stops[index].tokens);
    job->phase = PHASE_PREFILL;
    list_push(&worker->prefilling, job);
}

/* What follows the start, or the last stop. */
static void go_on(struct worker *worker, struct worker_job *job)
{
    if (job->stop_index < job->stop_count) {
        prefill_begin(worker, job);
    } else if (decode_limit(job) > 0) {
        job->phase = PHASE_DECODE;
        list_push(&worker->decoding, job);
    } else {
        finish(worker, job, KV_OK);
    }
}

static void prefill_cancel(struct worker *worker, struct worker_job *job)
{
    const bool back = eng_prefill_abort(session_of(worker, job));
    /* Rows without windows are no position to go on from: the next resume would have to know that
     * it must replay.  Nothing is lost, the store has these rows. */
    const bool has_windows = job->start != WORKER_ROWS_ONLY || job->stop_index > 0;
    if (back && has_windows) {
        finish(worker, job, KV_CANCELLED);
    } else {
        finish_lost(worker, job, KV_CANCELLED);
    }
}

static void prefill_chunk(struct worker *worker, struct worker_job *job, uint32_t left)
{
    struct eng_session *session = session_of(worker, job);
    const uint32_t position = job->stops[job->stop_index].tokens - left;
    eng_prefill_chunk(session, worker->chunk_tokens);

    const uint32_t done = left - eng_prefill_left(session);
    const uint32_t again =
        position < job->start_tokens ? KV_MIN(done, job->start_tokens - position) : 0;
    count(&worker->chunks, 1);
    count(&worker->replay_tokens, again);
    count(&worker->prefill_tokens, done - again);
}

static void prefill_reach_stop(struct worker *worker, struct worker_job *job)
{
    struct eng_session *session = session_of(worker, job);
    struct worker_stop_point *stop = &job->stops[job->stop_index];

    eng_prefill_end(session);
    stop->state = eng_session_state(session);
    if (stop->export != NULL) eng_session_export(session, stop->export);
    stop->done = true;
    job->stop_index++;
    go_on(worker, job);
}

static void prefill_piece(struct worker *worker, struct worker_job *job)
{
    const uint32_t left = eng_prefill_left(session_of(worker, job));
    if (is_cancelled(worker, job)) {
        prefill_cancel(worker, job);
    } else if (left > 0) {
        prefill_chunk(worker, job, left);
        list_push(&worker->prefilling, job);
    } else {
        prefill_reach_stop(worker, job);
    }
}

/* ---- The start of a job. ---- */

static kv_status move_to_start(struct worker *worker, const struct worker_job *job)
{
    struct eng_session *session = session_of(worker, job);

    if (job->start == WORKER_RESET) eng_session_reset(session);
    eng_session_set_pages(session, job->pages, job->page_count); /* A reset forgets them. */
    switch (job->start) {
    case WORKER_CONTINUE:
    case WORKER_RESET:
        break;
    case WORKER_CUT:
        eng_session_cut(session, job->start_tokens);
        break;
    case WORKER_IMPORT:
        if (worker->plant == PLANT_IMPORT) return KV_CORRUPT;
        /* Whatever the engine dislikes about it, it is not the image the index promised. */
        if (eng_session_import(session, image_to_import(worker, job), &job->image_state, job->ids,
                               job->start_tokens) != KV_OK)
            return KV_CORRUPT;
        break;
    case WORKER_ROWS_ONLY:
        assert(job->stop_count > 0);
        eng_session_rows_only(session, job->ids, job->start_tokens);
        break;
    }
    return KV_OK;
}

static void begin(struct worker *worker, struct worker_job *job)
{
    assert(job->stop_count <= KV_STOPS_MAX);
    assert((job->stop_count > 0) == (job->prefill_to > job->start_tokens));
    if (job->stop_count > 0) assert(job->stops[job->stop_count - 1].tokens == job->prefill_to);

    worker->slots[job->slot].job = job;
    job->begun_ns = kv_clock_stopwatch_ns();
    job->queue_ns = job->begun_ns - job->posted_ns;

    const bool needs_place = job->start == WORKER_CONTINUE || job->start == WORKER_CUT;
    assert(!needs_place || !worker->slots[job->slot].lost);
    worker->slots[job->slot].lost = false;
    const kv_status status = move_to_start(worker, job);
    if (status != KV_OK) {
        finish_lost(worker, job, status);
        return;
    }
    assert(eng_session_state(session_of(worker, job)).tokens == job->start_tokens);
    go_on(worker, job);
}

/* ---- Waiting for the slot. ---- */

/* Takes an image of where the session stands, wherever that is: the shard may have posted it before
 * it heard of the job that moved the session there, or lost it. */
static bool is_export_only(const struct worker_job *job)
{
    return job->start == WORKER_CONTINUE && job->stop_count == 0 && job->decode_max == 0;
}

static void export_now(struct worker *worker, struct worker_job *job)
{
    job->begun_ns = kv_clock_stopwatch_ns();
    job->queue_ns = job->begun_ns - job->posted_ns;
    if (worker->slots[job->slot].lost) {
        fill_lost(job, KV_CANCELLED);
    } else {
        fill_results(session_of(worker, job), job, KV_OK);
    }
    post_back(worker, job);
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
            export_now(worker, job);
        } else if (running == NULL) {
            begin(worker, job);
        } else {
            list_push(&worker->waiting, job);
        }
    }
}

/* ---- The thread. ---- */

static bool has_work(const struct worker *worker)
{
    return worker->waiting.first != NULL || worker->prefilling.first != NULL ||
           worker->decoding.first != NULL;
}

static void turn(struct worker *worker)
{
    struct worker_job *job;

    admit(worker);
    struct job_list steps = list_take(&worker->decoding);
    while ((job = list_pop(&steps)) != NULL)
        decode_step(worker, job);
    job = list_pop(&worker->prefilling);
    if (job != NULL) prefill_piece(worker, job);
}

void worker_run(void *arg)
{
    struct worker *worker = arg;
    kv_thread_assert(KV_THREAD_WORKER);
    kv_thread_be_nice(NICE_VALUE);

    while (!worker->stopping || has_work(worker)) {
        if (!has_work(worker)) kv_mailbox_wait(worker->mailbox, -1);
        (void)kv_mailbox_run(worker->mailbox, UINT32_MAX);
        turn(worker);
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
    if (worker->slots == NULL)
        return KV_FAIL(err, KV_NOMEM, "worker: table of %u slots", worker->slot_count);
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
    const enum plant plant = plant_of(options->plant);
    if (options->plant != NULL && plant == PLANT_NONE)
        return KV_FAIL(err, KV_INVALID, "worker: no planted bug '%s' in this build",
                       options->plant);

    struct worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL) return KV_FAIL(err, KV_NOMEM, "worker: out of memory");
    worker->model = options->model;
    worker->log = options->log;
    worker->slot_count = options->slots;
    worker->chunk_tokens = options->chunk_tokens;
    worker->plant = plant;
    worker->stop_msg.run = on_stop;
    const kv_status status = allocate(worker, err);
    if (status != KV_OK) {
        worker_destroy(worker);
        return status;
    }
    if (plant != PLANT_NONE)
        kv_log(worker->log, KV_LOG_WARN, "planted_bug", "name=%s", options->plant);
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
    free(worker->plant_image);
    free(worker);
}

struct worker_stats worker_stats(struct worker *worker)
{
    return (struct worker_stats){
        .prefill_tokens = atomic_load_explicit(&worker->prefill_tokens, memory_order_relaxed),
        .replay_tokens = atomic_load_explicit(&worker->replay_tokens, memory_order_relaxed),
        .decode_tokens = atomic_load_explicit(&worker->decode_tokens, memory_order_relaxed),
        .chunks = atomic_load_explicit(&worker->chunks, memory_order_relaxed),
        .jobs = atomic_load_explicit(&worker->jobs, memory_order_relaxed),
    };
}

uint32_t worker_slots(const struct worker *worker)
{
    return worker->slot_count;
}
